"""Plans for several states of the device, and which of them holds in the present one.

A plan that is best on a calm machine need not be beside a co-runner: several threads then wait for
each other's cores, and caches are shared. Nothing here watches the device; it is told.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgewise.device.state import DeviceState
from edgewise.dispatch.plan import DispatchPlan
from edgewise.dispatch.plan_file import plan_from_json, plan_to_json
from edgewise.errors import ConfigError, ProfileError
from edgewise.profiles.exchange import write_whole
from edgewise.profiles.operators import LatencySummary, OperatorShape, OperatorTable

UTILISATION = "cpu.utilisation_ratio"
"""Share of all cores' time that other programs use; times the cores, their load."""

HYSTERESIS_CORES = 0.2
"""The kernel counts in steps of 10 ms, so a window of 0.1 s is uncertain by a tenth of a core."""

FORMAT = "edgewise-dispatch-states"
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Contended:
    """A plan for a busier state.

    Attributes:
        plan: Its ``state`` says what ran beside when its costs were measured.
        from_cores: Load of other programs from which it is taken, cores.
    """

    plan: DispatchPlan
    from_cores: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePlans:
    """Plans of one model, from calm to busy.

    Attributes:
        calm: Where others use little, and where nobody knows what they use.
        contended: Busier states, by rising load.
        hysteresis_cores: A state is entered half of this above its bound, and left half of it
            below.

    Raises:
        ConfigError: The bounds do not rise, leave no room for the hysteresis, or the plans are of
            several models.
    """

    calm: DispatchPlan
    contended: tuple[Contended, ...] = ()
    hysteresis_cores: float = HYSTERESIS_CORES

    def __post_init__(self) -> None:
        half = self.hysteresis_cores / 2
        bounds = [each.from_cores for each in self.contended]
        rising = all(b > a for a, b in zip([half, *bounds], bounds, strict=False))
        if not (0 <= half < math.inf and rising and all(map(math.isfinite, bounds))):
            raise ConfigError(
                f"expected bounds that rise from above {half:g} cores, found"
                f" {', '.join(f'{b:g}' for b in bounds) or 'none'}",
                help="a calm machine shows about 0.1 cores of others' load",
            )
        models = {plan.model for plan in self.plans}
        if len(models) > 1:
            raise ConfigError(f"expected plans of one model, found {', '.join(sorted(models))}")

    @property
    def plans(self) -> tuple[DispatchPlan, ...]:
        """All plans, the calm one first; a level is a number into it."""
        return (self.calm, *(each.plan for each in self.contended))

    def level(self, others_busy_cores: float | None, *, current: int = 0) -> int:
        """Number of the plan that holds.

        Args:
            others_busy_cores: Load of other programs, cores; ``None`` or NaN where unknown.
            current: Number of the plan in force: within the hysteresis it stays.

        Returns:
            0, the calm plan, where the load is unknown.
        """
        load = others_busy_cores
        if load is None or math.isnan(load):
            return 0
        half = self.hysteresis_cores / 2
        bounds = [each.from_cores for each in self.contended]
        level = min(max(current, 0), len(bounds))
        while level < len(bounds) and load >= bounds[level] + half:
            level += 1
        while level > 0 and load < bounds[level - 1] - half:
            level -= 1
        return level

    def choose(self, others_busy_cores: float | None, *, current: int = 0) -> DispatchPlan:
        """The plan that holds, as :meth:`level` numbers it."""
        return self.plans[self.level(others_busy_cores, current=current)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Which plan holds, and why.

    Attributes:
        plan: The plan.
        level: Its number; 0 is calm.
        others_busy_cores: Load of other programs that it was chosen by; ``None`` where unknown.
        since_s: When it was chosen, on the clock of the states.
        reason: In words.
    """

    plan: DispatchPlan
    level: int
    others_busy_cores: float | None
    since_s: float
    reason: str


class StateChooser:
    """Takes each published state of the device, and says which plan holds.

    ``on_state`` is for a monitor's thread: ``Monitor(..., on_state=[chooser.on_state])``. Whoever
    runs the model reads :attr:`chosen` or :attr:`plan`: one reference, no lock, no look at the
    device.

    Args:
        plans: For the states.
        cores: Of the machine, that the utilisation is a share of.
        hold_s: A change is followed by none for so long, on the clock of the states; 0 for no such
            pause.

    Raises:
        ConfigError: No core, or a negative time.
    """

    def __init__(self, plans: StatePlans, *, cores: float, hold_s: float = 0.5) -> None:
        if not (cores > 0 and hold_s >= 0):
            raise ConfigError(
                f"expected cores above zero and a time of zero or more, found {cores} and {hold_s}"
            )
        self.plans = plans
        self._cores, self._hold_s = cores, hold_s
        self._changes = 0
        self._published = Chosen(
            plan=plans.calm,
            level=0,
            others_busy_cores=None,
            since_s=-math.inf,
            reason="calm: no state of the device is known yet",
        )

    @property
    def chosen(self) -> Chosen:
        """The present choice."""
        return self._published

    @property
    def plan(self) -> DispatchPlan:
        """The plan that holds."""
        return self._published.plan

    @property
    def changes(self) -> int:
        """How often the plan has changed."""
        return self._changes

    def on_state(self, state: DeviceState) -> None:
        """Take a new state of the device; publishes only where the plan changes."""
        now = self._published
        ratio = state.value(UTILISATION)
        load = None if ratio is None else ratio * self._cores
        level = self.plans.level(load, current=now.level)
        if level == now.level or state.at_s - now.since_s < self._hold_s:
            return
        self._changes += 1
        plan = self.plans.plans[level]
        why = (
            f"others' load is unknown: {state.reason(UTILISATION)}"
            if load is None
            else f"others use {load:.2f} cores"
        )
        self._published = Chosen(
            plan=plan,
            level=level,
            others_busy_cores=load,
            since_s=state.at_s,
            reason=f"{plan.state}: {why}",
        )


@dataclass(frozen=True, slots=True, order=True)
class Choice:
    """Who runs a shape.

    Attributes:
        backend: Runtime on device.
        threads: Of the call.
    """

    backend: str
    threads: int

    def __str__(self) -> str:
        return f"{self.backend}, {self.threads} thread" + "s" * (self.threads > 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """What a shape is best run by in two states.

    Attributes:
        shape: The operator or segment.
        calm: Cheapest on the calm machine.
        contended: Cheapest beside the co-runner.
        calm_s: What each costs on the calm machine: the calm choice, the contended one, seconds.
        contended_s: What each costs beside the co-runner: the calm choice, the contended one.
        certain: The two intervals do not overlap in either state; false where both choices are one.
    """

    shape: OperatorShape
    calm: Choice
    contended: Choice
    calm_s: tuple[float, float]
    contended_s: tuple[float, float]
    certain: bool

    @property
    def differs(self) -> bool:
        """Whether the cheapest is another one in the other state, certainly or not."""
        return self.calm != self.contended

    @property
    def lost_s(self) -> float:
        """What the calm choice costs more than the contended one beside the co-runner, seconds."""
        return self.contended_s[0] - self.contended_s[1]


Tables = OperatorTable | Sequence[OperatorTable]


def preferences(
    calm: Tables, contended: Tables, shapes: Iterable[OperatorShape] | None = None
) -> tuple[Preference, ...]:
    """The cheapest backend of each shape in both states; with several tables, threads as well.

    Args:
        calm: Costs on the calm machine; one table for each thread policy.
        contended: Costs beside a co-runner, of the same backends and thread policies.
        shapes: Which; all that both have by default. One that has no choice in common is left out.

    Raises:
        ProfileError: The tables are of two devices.
    """
    rows = [_costs(tables) for tables in (calm, contended)]
    devices = {table.device_id for tables in (calm, contended) for table in _listed(tables)}
    if len(devices) > 1:
        raise ProfileError(
            f"expected costs of one device in two states, found devices"
            f" {', '.join(sorted(devices))}",
            help="measure both states on one machine",
        )
    wanted = tuple(rows[0]) if shapes is None else tuple(dict.fromkeys(shapes))
    found = []
    for shape in wanted:
        quiet, busy = (row.get(shape, {}) for row in rows)
        common = sorted(quiet.keys() & busy.keys())
        if common:
            found.append(_preference(shape, common, quiet, busy))
    return tuple(found)


def flips(
    calm: Tables, contended: Tables, shapes: Iterable[OperatorShape] | None = None
) -> tuple[Preference, ...]:
    """The shapes that prefer another backend beside the co-runner, beyond the intervals."""
    return tuple(each for each in preferences(calm, contended, shapes) if each.certain)


def lost_ratio(
    found: Sequence[Preference], counts: Mapping[OperatorShape, int] | None = None
) -> float:
    """What the calm choices lose beside the co-runner, over the contended ones' total.

    By the same samples that the choices were made from it is never negative, noise or not: time
    choices afresh to know.

    Args:
        found: Of each shape.
        counts: How often a shape counts; once by default.

    Raises:
        ProfileError: There is no shape.
    """
    if not found:
        raise ProfileError("no shape was measured in both states")
    weights = [1 if counts is None else counts.get(p.shape, 1) for p in found]
    lost_s = sum(w * p.lost_s for w, p in zip(weights, found, strict=True))
    return lost_s / sum(w * p.contended_s[1] for w, p in zip(weights, found, strict=True))


def write_state_plans(plans: StatePlans, path: Path) -> None:
    """Write plans as one JSON file, whole or not at all.

    Raises:
        ProfileError: It cannot be written; what was there before stays.
    """
    document = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "hysteresis_cores": plans.hysteresis_cores,
        "calm": plan_to_json(plans.calm),
        "contended": [
            {"from_cores": each.from_cores, "plan": plan_to_json(each.plan)}
            for each in plans.contended
        ],
    }
    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
    write_whole(path, (text + "\n").encode(), what="the plans")


def read_state_plans(path: Path) -> StatePlans:
    """Read what :func:`write_state_plans` wrote.

    Raises:
        ConfigError: The file is missing, truncated, another kind of file, of a newer format, or
            a field is missing or wrong.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read the plans {path}: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ConfigError(f'{path} holds no plans for states: it does not say "format": "{FORMAT}"')
    version = document.get("format_version")
    if version != FORMAT_VERSION:
        raise ConfigError(
            f"{path} has format {version!r} of plans; this Edgewise reads {FORMAT_VERSION}",
            help="pip install --upgrade edgewise",
        )
    try:
        return StatePlans(
            calm=plan_from_json(document["calm"], where=f"{path}: calm"),
            contended=tuple(
                Contended(
                    from_cores=float(each["from_cores"]),
                    plan=plan_from_json(each["plan"], where=f"{path}: state {n + 1}"),
                )
                for n, each in enumerate(document["contended"])
            ),
            hysteresis_cores=float(document["hysteresis_cores"]),
        )
    except KeyError as error:
        raise ConfigError(f"{path}: the plans have no field {error}") from error
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is damaged: {error}") from error


def _listed(tables: Tables) -> Sequence[OperatorTable]:
    return (tables,) if isinstance(tables, OperatorTable) else tables


def _costs(tables: Tables) -> dict[OperatorShape, dict[Choice, LatencySummary]]:
    found: dict[OperatorShape, dict[Choice, LatencySummary]] = {}
    for table in _listed(tables):
        for (shape, backend), cost in table.costs.items():
            if cost.usable and cost.latency is not None:
                choice = Choice(backend=backend, threads=cost.thread_policy.threads)
                found.setdefault(shape, {})[choice] = cost.latency
    return found


def _preference(
    shape: OperatorShape,
    common: Sequence[Choice],
    quiet: dict[Choice, LatencySummary],
    busy: dict[Choice, LatencySummary],
) -> Preference:
    calm = min(common, key=lambda c: quiet[c].median_s)
    contended = min(common, key=lambda c: busy[c].median_s)
    apart = (
        quiet[calm].median_high_s < quiet[contended].median_low_s
        and busy[contended].median_high_s < busy[calm].median_low_s
    )
    return Preference(
        shape=shape,
        calm=calm,
        contended=contended,
        calm_s=(quiet[calm].median_s, quiet[contended].median_s),
        contended_s=(busy[calm].median_s, busy[contended].median_s),
        certain=calm != contended and apart,
    )
