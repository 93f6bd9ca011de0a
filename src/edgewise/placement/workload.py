"""Workload files: a device, and tenants with models and rates, checked key by key.

A file that is wrong is refused as a whole, with the line and the key that are wrong.
"""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edgewise.device.accelerator import Accelerator, load_accelerator
from edgewise.errors import ConfigError, ProfileError, nearest_names
from edgewise.placement.problem import Assumptions, Objective, Problem, Residency, Tenant
from edgewise.placement.workload_schema import (
    KEYS_OF_KIND,
    PROFILE_SUFFIX,
    SILENT,
    RateKind,
    Residencies,
    Source,
    Table,
    checked,
)
from edgewise.profiles.partition import PartitionProfile
from edgewise.profiles.shipped_partitions import load_partition_profile
from edgewise.units import parse_duration_s

MODEL_SUFFIXES = (".onnx", ".tflite")
CHECKPOINT_MANIFEST = "model.json"  # in the folder of a model with exits
_SILENT_RATIO = 0.01  # of its highest rate: what a tenant is planned for while it is silent


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """How often a tenant is asked, over time.

    Attributes:
        kind: ``poisson``: at random. ``periodic``: as a camera does. ``stepped``: at random, at a
            rate that steps. ``trace``: at given instants, once.
        per_s: Rate per second of the first two kinds.
        jitter_ratio: How far a periodic request may come late, as a share of the period, 0 to 1.
        steps: (seconds since the start, rate per second), in order, the first at 0.
        instants_s: Of a trace, seconds since the start, in order.
    """

    kind: RateKind = "poisson"
    per_s: float = 0.0
    jitter_ratio: float = 0.0
    steps: tuple[tuple[float, float], ...] = ()
    instants_s: tuple[float, ...] = field(default=(), repr=False)

    def at_s(self, instant_s: float) -> float:
        """Rate per second that the planner is told at an instant; above zero.

        That of a trace is its mean. A tenant that is silent by its steps is planned for with one
        per cent of its highest rate.
        """
        if self.kind == "trace":
            return len(self.instants_s) / self.instants_s[-1]
        if self.kind != "stepped":
            return self.per_s
        now = next(rate for start_s, rate in reversed(self.steps) if start_s <= instant_s)
        return now or _SILENT_RATIO * max(rate for _, rate in self.steps)

    @property
    def arrival_cv2(self) -> float:
        """C_a², squared coefficient of variation of the time between two requests.

        1 for Poisson and within each step. Periodic with delays uniform on [0, j·T): the
        difference of two of them has the variance j²T²/6. That of a trace is counted.
        """
        if self.kind == "periodic":
            return self.jitter_ratio**2 / 6
        if self.kind == "trace" and len(self.instants_s) > 2:
            gaps = np.diff(self.instants_s)
            return float(gaps.var() / gaps.mean() ** 2)
        return 1.0

    @property
    def changes_s(self) -> tuple[float, ...]:
        """Instants at which the rate steps, the first being 0."""
        return tuple(start_s for start_s, _ in self.steps) or (0.0,)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkloadTenant:
    """One tenant of a workload.

    Attributes:
        name: Unique.
        model: The model's file, or folder of a checkpoint; ``None`` where it is a name.
        profile: What it costs where it is cut.
        rate: How often it is asked.
        budget_s: Time within which it should answer; ``None`` for none.
        weight: Under the objective ``weighted``.
        priority: 0 is served first.
        exits: Whether its suffix may be left early under its budget.
        model_name: What the workload calls the model where that is no file: of a network, or of a
            profile alone, which can be planned for but not played.
    """

    name: str
    model: Path | None
    profile: PartitionProfile
    rate: Rate
    budget_s: float | None = None
    weight: float = 1.0
    priority: int = 16
    exits: bool = False
    model_name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workload:
    """What is to be placed, and played.

    Attributes:
        name: The file's, without its suffix.
        tenants: At least one.
        accelerator: What they share; ``None`` for none.
        cores: Of the CPU.
        objective: What is minimised.
        residency: Whether models switch in the accelerator's memory, have fixed shares of it, or
            whichever is better.
        horizon_s: How long a plan is to pay off, and how long the workload is played.
        seed: Of arrivals.
        suffixes: By tenant, what early exits leave of each suffix's work and its C_s², [P + 1]
            both; a file does not say that.
    """

    name: str
    tenants: tuple[WorkloadTenant, ...]
    accelerator: Accelerator | None
    cores: int
    objective: Objective = "mean"
    residency: Residencies = "switch"
    horizon_s: float = 60.0
    seed: int = 0
    suffixes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict, repr=False)

    @property
    def residencies(self) -> tuple[Residency, ...]:
        """Those that may be planned for."""
        if self.residency != "best":
            return (self.residency,)
        can_pin = self.accelerator is not None and self.accelerator.can_pin
        return ("switch", "pinned") if can_pin else ("switch",)

    @property
    def phases_s(self) -> tuple[float, ...]:
        """Instants at which any tenant's rate steps, the first being 0."""
        return tuple(sorted({at_s for t in self.tenants for at_s in t.rate.changes_s}))

    def rates_per_s(
        self, at_s: float = 0.0, *, instead: Mapping[str, float] | None = None
    ) -> tuple[float, ...]:
        """Rates of all tenants at an instant.

        Args:
            at_s: Seconds since the start.
            instead: Rates to take in place of the file's, by tenant.

        Raises:
            ConfigError: ``instead`` names a tenant that is not there.
        """
        other = dict(instead or {})
        names = [t.name for t in self.tenants]
        for name in other:
            if name not in names:
                raise ConfigError(f"unknown tenant {name!r}", help=nearest_names(name, names))
        return tuple(other.get(t.name, t.rate.at_s(at_s)) for t in self.tenants)

    def problem(
        self,
        *,
        residency: Residency | None = None,
        rates_per_s: Sequence[float] | None = None,
        assumptions: Assumptions | None = None,
        suffixes: Mapping[str, tuple[Any, Any]] | None = None,
    ) -> Problem:
        """Make the planner's problem.

        Args:
            residency: The first of `residencies` by default.
            rates_per_s: [n]; those at the start by default.
            assumptions: Which formulas; ours by default.
            suffixes: In place of the workload's own.

        Raises:
            ConfigError: As `Problem.of`.
        """
        rates = self.rates_per_s() if rates_per_s is None else rates_per_s
        left = self.suffixes if suffixes is None else suffixes
        return Problem.of(
            [
                Tenant(
                    name=t.name,
                    profile=t.profile,
                    rate_per_s=rate,
                    weight=t.weight,
                    deadline_s=t.budget_s,
                    priority=t.priority,
                    arrival_cv2=t.rate.arrival_cv2,
                    suffix_ratio=left.get(t.name, (None, None))[0],
                    suffix_cv2=left.get(t.name, (None, None))[1],
                )
                for t, rate in zip(self.tenants, rates, strict=True)
            ],
            self.accelerator,
            cores=self.cores,
            objective=self.objective,
            assumptions=assumptions,
            residency=residency or self.residencies[0],
        )


def load_workload(path: str | Path) -> Workload:
    """Read a workload file; paths in it are relative to it.

    Raises:
        ConfigError: It cannot be read, is not TOML, or says something that cannot be; the message
            names the file, the line and the key.
        ProfileError: A profile is missing or damaged; the message says where it was asked for.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read the workload {path}: {error}",
            help="name a TOML file with [device] and [[tenant]] tables",
        ) from error
    return parse_workload(text, where=str(path), folder=path.parent)


def parse_workload(text: str, *, where: str, folder: Path) -> Workload:
    """Read a workload from TOML text.

    Args:
        text: The file's content.
        where: Its name, for messages.
        folder: What paths in it are relative to.

    Raises:
        ConfigError: As `load_workload`.
        ProfileError: Likewise.
    """
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not TOML: {error}") from error
    source = Source(text, where)
    for key in found:
        if key not in {"device", "tenant"}:
            source.fail(key, f"unknown key {key!r}", help=nearest_names(key, ("device", "tenant")))
    device, tenants = found.get("device"), found.get("tenant")
    if not isinstance(device, dict):
        source.fail("device", "expected a table [device]")
    if not (isinstance(tenants, list) and tenants and all(isinstance(t, dict) for t in tenants)):
        source.fail("tenant", "expected at least one table [[tenant]]")
    table = source.table("device")
    values = checked(device, "device", table)
    accelerator = _accelerator(values, table, folder)
    tables = [source.table("tenant", n) for n in range(len(tenants))]
    read = tuple(_tenant(t, own, folder) for t, own in zip(tenants, tables, strict=True))
    for n, tenant in enumerate(read):
        if tenant.name in {t.name for t in read[:n]}:
            tables[n].fail(
                "name", f"two tenants are called {tenant.name!r}", help="give it another name"
            )
        made_for = tenant.profile.accelerator
        if accelerator is not None and made_for and made_for != accelerator.name:
            tables[n].fail(
                "profile" if "profile" in tenants[n] else "model",
                f"its profile is of accelerator {made_for!r}, the workload's is"
                f" {accelerator.name!r}",
                help=f"edgewise profile MODEL --segments --accelerator {accelerator.name}",
            )
    if values["objective"] == "deadline-miss" and all(t.budget_s is None for t in read):
        table.fail(
            "objective",
            "'deadline-miss' needs the budget of at least one tenant",
            help='give a tenant budget = "50 ms", or plan for "mean"',
        )
    return Workload(
        name=Path(where).stem,
        tenants=read,
        accelerator=accelerator,
        cores=values["cores"],
        objective=values["objective"],
        residency=values["residency"],
        horizon_s=float(values["horizon_s"]),
        seed=values["seed"],
    )


def _accelerator(values: Mapping[str, Any], table: Table, folder: Path) -> Accelerator | None:
    name = values["accelerator"]
    if name == "none":
        return None
    with table.asking("accelerator"):
        found = load_accelerator(folder / name if (folder / name).is_file() else name)
    if values["residency"] == "pinned" and not found.can_pin:
        table.fail(
            "residency",
            f"accelerator {found.name!r} gives models no fixed shares of its memory",
            help="write residency = 'switch', or set can_pin in the accelerator's description",
        )
    return found


def _tenant(found: dict[str, Any], table: Table, folder: Path) -> WorkloadTenant:
    values = checked(found, "tenant", table)
    model = folder / values["model"]
    is_checkpoint = (model / CHECKPOINT_MANIFEST).is_file()
    is_file = model.suffix.lower() in MODEL_SUFFIXES or is_checkpoint
    if is_file and not (model.is_file() or is_checkpoint):
        table.fail("model", f"there is no file {model}")
    budget_s = None
    if values["budget"] is not None:
        with table.asking("budget"):
            budget_s = parse_duration_s(values["budget"])
    if values["exits"] and budget_s is None:
        table.fail("exits", "early exits need a budget", help='add budget = "50 ms"')
    if values["exits"] and is_file and not is_checkpoint:
        table.fail(
            "exits",
            f"{values['model']} has no exits",
            help="name a model that `edgewise prepare` gave exits, or leave exits out",
        )
    asked = "profile" if values["profile"] is not None else "model"
    with table.asking(asked):
        profile = _profile(values["profile"], values["model"], folder)
    return WorkloadTenant(
        name=values["name"],
        model=model if is_file else None,
        profile=profile,
        rate=_rate(values["rate"], table, folder),
        budget_s=budget_s,
        weight=float(values["weight"]),
        priority=values["priority"],
        exits=values["exits"],
        model_name="" if is_file else values["model"],
    )


def _profile(named: str | None, model: str, folder: Path) -> PartitionProfile:
    """The profile that was named, the one beside the model or the workload, or a shipped one."""
    path = folder / (model if named is None else named)
    if named is None and path.suffix.lower() in MODEL_SUFFIXES:
        beside = path.with_name(path.stem + PROFILE_SUFFIX)
        if not beside.is_file():
            raise ProfileError(
                f"there is no profile {beside} beside the model",
                help=f"edgewise profile {path} --segments --export {beside}",
            )
        return load_partition_profile(beside)
    if named is None and not path.is_file():  # a network's name
        path = path.with_name(path.name + PROFILE_SUFFIX)
    return load_partition_profile(path if path.is_file() else named or model)


def _rate(found: Any, table: Table, folder: Path) -> Rate:
    if not isinstance(found, dict):
        if not math.isfinite(found) or found <= 0:
            table.fail("rate", f"expected requests per second above zero, found {found!r}", SILENT)
        return Rate(per_s=float(found))
    values = checked(found, "rate", table)
    kind = values["kind"]
    needed, allowed = KEYS_OF_KIND[kind]
    for key in needed:
        if values[key] is None:
            table.fail("rate", f"a {kind} rate needs the key {key!r}")
    for key in found:
        if key not in {"kind", *needed, *allowed}:
            table.fail(
                key,
                f"a {kind} rate has no {key!r}",
                help=f"it has {', '.join((*needed, *allowed))}",
            )
    if kind == "stepped":
        return Rate(kind=kind, steps=_steps(values["steps"], table))
    if kind == "trace":
        return Rate(kind=kind, instants_s=_instants(folder / values["file"], table))
    jitter_ratio = float(values["jitter_ratio"] or 0.0)
    if jitter_ratio > 1:
        table.fail("jitter_ratio", f"expected at most 1, found {jitter_ratio:g}")
    return Rate(kind=kind, per_s=float(values["per_s"]), jitter_ratio=jitter_ratio)


def _steps(found: list[Any], table: Table) -> tuple[tuple[float, float], ...]:
    for step in found:
        pair = isinstance(step, list) and len(step) == 2 and all(_is_number(v) for v in step)
        if not (pair and step[0] >= 0 and step[1] >= 0):
            table.fail("steps", f"expected [seconds, requests per second], found {step!r}")
    starts = [float(start_s) for start_s, _ in found]
    if not starts or starts[0] != 0 or any(b <= a for a, b in itertools.pairwise(starts)):
        table.fail("steps", f"expected steps that rise from 0 s, found them at {starts}")
    if not any(rate for _, rate in found):
        table.fail("steps", "every rate is 0", SILENT)
    return tuple((float(start_s), float(rate)) for start_s, rate in found)


def _instants(path: Path, table: Table) -> tuple[float, ...]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        table.fail("file", f"cannot read the trace {path}: {error}")
    instants: list[float] = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            instant_s = float(line)
        except ValueError:
            table.fail("file", f"{path}, line {number}: expected seconds, found {line.strip()!r}")
        if not math.isfinite(instant_s) or instant_s < (instants[-1] if instants else 0.0):
            table.fail(
                "file", f"{path}, line {number}: {instant_s:g} s comes before its forerunner"
            )
        instants.append(instant_s)
    if not instants or instants[-1] <= 0:
        table.fail("file", f"the trace {path} has no instant after 0 s")
    return tuple(instants)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
