"""How claims are found, what they are given and what they return."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from edgewise.errors import ConfigError, nearest_names
from edgewise.report.chart import Chart

Provenance = Literal["measured", "simulated", "estimated"]

_PACKAGE = "edgewise.reproduce"
_NOT_CLAIMS = frozenset({"registry"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a claim is run with; each claim takes what it needs.

    Attributes:
        models: Shipped names, checkpoints or ONNX files; the claim's own where empty.
        data: A data set's name or path; the claim's own where ``None``.
        backend: ``runtime`` or ``runtime:device``, or ``"auto"``.
        threads: Of each call.
        limit: At most so many inputs; the claim's own number where ``None``.
        seeds: How many seeds, where a claim trains; its own number where ``None``.
        store: Where profiles are kept; the user's store where ``None``.
        out: Where results that take long are kept and resumed from, where a claim does.
        seed: Of everything that is drawn, where a claim does not train.
        quick: Fewer rounds, samples and nets: shows that it runs, not what it claims.
        say: Told what is going on.
    """

    models: tuple[str, ...] = ()
    data: str | None = None
    backend: str = "auto"
    threads: int = 1
    limit: int | None = None
    seeds: int | None = None
    store: Path | None = None
    out: Path | None = None
    seed: int = 0
    quick: bool = False
    say: Callable[[str], None] = field(default=lambda _: None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure: what the paper says and what we get, never in one column.

    Attributes:
        name: What it is a figure of.
        unit: ``"s"``, ``"%"``, ``"ratio"`` or a few words.
        paper: The paper's value; ``None`` where it gives none.
        ours: Ours; ``None`` where there is none.
        provenance: How ours came about.
        low: Lower bound of a 95 % interval of ours.
        high: Upper bound.
        note: Why one is missing, or what explains a difference.
    """

    name: str
    unit: str
    paper: float | None = None
    ours: float | None = None
    provenance: Provenance
    low: float | None = None
    high: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether one thing that was to be shown holds.

    Attributes:
        claim: The statement.
        holds: Whether it does; ``None`` where this run cannot say.
        detail: By how much, or why it cannot be said.
    """

    claim: str
    holds: bool | None
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    """What a claim's run found.

    Attributes:
        title: Of the claim.
        source: Where in which paper.
        setting: What the paper measured on, and what we did, as facts for people.
        figures: In order.
        verdicts: In order.
        notes: What a reader must know.
        charts: Panels of its figure; empty where the table says it all.
        details: More numbers, ready for JSON.
    """

    title: str
    source: str
    setting: dict[str, str]
    figures: tuple[Figure, ...]
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def holds(self) -> bool | None:
        """Whether all verdicts hold; ``None`` where none fails but some cannot be said."""
        found = [v.holds for v in self.verdicts]
        if False in found:
            return False
        return None if None in found or not found else True


def claim_ids() -> tuple[str, ...]:
    """Every claim, by the name of its file.

    Example:
        >>> "uniexit-table6" in claim_ids()
        True
    """
    package = importlib.import_module(_PACKAGE)
    names = {m.name for m in pkgutil.iter_modules(package.__path__)} - _NOT_CLAIMS
    return tuple(sorted(n.replace("_", "-") for n in names if not n.startswith("_")))


def claim_title(claim_id: str) -> str:
    """One line about a claim.

    Raises:
        ConfigError: There is no such claim.
    """
    return str(_module(claim_id).TITLE)


def run_claim(claim_id: str, setup: Setup) -> Reproduction:
    """Run a claim.

    Args:
        claim_id: One of `claim_ids`.
        setup: What to run it with.

    Raises:
        ConfigError: There is no such claim, or it cannot be run with this setup.
        EdgeError: Whatever stops its run.
    """
    found: Reproduction = _module(claim_id).run(setup)
    return found


def _module(claim_id: str) -> ModuleType:
    wanted = claim_id.replace("_", "-")
    if wanted not in claim_ids():
        raise ConfigError(
            f"unknown claim {claim_id!r}; {nearest_names(claim_id, claim_ids())}",
            help="edgewise reproduce --list",
        )
    return importlib.import_module(f"{_PACKAGE}.{wanted.replace('-', '_')}")
