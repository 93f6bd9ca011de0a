"""Deciding which backend runs what: which methods there are, and what each answers with."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

from edgewise.dispatch.problem import (
    Assignment,
    Objective,
    Problem,
    Totals,
    need_energy,
    totals,
)
from edgewise.errors import ConfigError, nearest_names

_METHODS = "edgewise.dispatch.methods"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decision:
    """What a method chose.

    Attributes:
        assignment: Who runs what.
        totals: What that costs, with switches and gaps.
        method: Which method; a static one names its backend.
        objective: What was made small.
        lower_bound: What no assignment that the method considers can go below, in the objective's
            unit; 0 where it proves nothing.
        exact: Whether that is what this one costs: none that the method considers is better.
        solves: How many shortest paths were looked for.
    """

    assignment: Assignment = field(repr=False)
    totals: Totals
    method: str
    objective: Objective
    lower_bound: float = 0.0
    exact: bool = False
    solves: int = 0

    @property
    def gap_ratio(self) -> float:
        """How much worse than the bound it may be: 0 where it is exact."""
        value = self.totals.of(self.objective)
        return 0.0 if self.exact or value <= 0 else 1 - self.lower_bound / value


def decided(  # noqa: PLR0913 - what a method knows
    problem: Problem,
    assignment: Assignment,
    *,
    method: str,
    objective: Objective,
    lower_bound: float = 0.0,
    exact: bool = False,
    solves: int = 0,
) -> Decision:
    """Make the record of an assignment; an exact one's bound is what it costs."""
    counted = totals(problem, assignment)
    return Decision(
        assignment=assignment,
        totals=counted,
        method=method,
        objective=objective,
        lower_bound=counted.of(objective) if exact else lower_bound,
        exact=exact,
        solves=solves,
    )


@cache
def method_names() -> tuple[str, ...]:
    """Every method, by the name of its file; ``static`` may name its backend: ``static:NAME``."""
    package = importlib.import_module(_METHODS)
    names = (m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_"))
    return tuple(sorted(name.replace("_", "-") for name in names))


def decide(
    problem: Problem,
    *,
    objective: Objective = "latency",
    method: str = "best",
    cap_s: float | None = None,
    memory_bytes: float | None = None,
) -> Decision:
    """Choose the backend of every operator.

    Args:
        problem: Costs.
        objective: What is made small: latency, energy, or EDP, each of the whole problem.
        method: One of `method_names`, or ``static:BACKEND``.
        cap_s: Latency that must not be exceeded, seconds; exact methods alone have it.
        memory_bytes: Weights that backends other than the home may keep, bytes; the same.

    Raises:
        ConfigError: No such objective, method or backend, or a limit that the method cannot keep.
        ProfileError: The objective needs energy, which is not known.
        Infeasible: Nothing is within the limit, or a static backend cannot run all operators;
            ``closest`` is a `Decision`.
    """
    need_energy(problem, objective)
    name, _, backend = method.partition(":")
    if name not in method_names():
        raise ConfigError(
            f"unknown dispatch method {method!r}", help=nearest_names(name, method_names())
        )
    find: Callable[..., Decision] = importlib.import_module(
        f"{_METHODS}.{name.replace('-', '_')}"
    ).find
    asked = {"backend": backend or None, "cap_s": cap_s, "memory_bytes": memory_bytes}
    options = {option: value for option, value in asked.items() if value is not None}
    odd = sorted(set(options) - set(find.__kwdefaults__ or ()))
    if odd:
        raise ConfigError(
            f"dispatch method {name!r} has no {odd[0]!r}",
            help="limits need method best or viterbi; a backend is named in static:BACKEND",
        )
    return find(problem, objective, **options)


def best_static(problem: Problem, objective: Objective) -> Decision:
    """The best single backend for everything: what every plan is held against.

    Raises:
        ConfigError, ProfileError, Infeasible: As `decide`.
    """
    return decide(problem, objective=objective, method="static")
