"""This machine under a CPU quota that steps and co-runners that come and go."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgewise.bench.evaluate import make_for_budget, open_model
from edgewise.bench.quota import CpuQuota, QuotaUnavailable, quota_effect
from edgewise.bench.state_campaign import QUOTAS, default_loads, measure_states
from edgewise.bench.throttle import (
    ORACLE,
    Repetition,
    ThrottleRow,
    default_scene,
    play_throttled,
    summarise_throttled,
)
from edgewise.device.cores import usable_cores
from edgewise.device.load import other_load
from edgewise.device.monitor import Monitor
from edgewise.device.sensor import make_sensors
from edgewise.errors import ConfigError, ProfileError
from edgewise.exits import Policy, PolicyInputs
from edgewise.predict.fitting import fit_kind
from edgewise.report.chart import Chart, Series
from edgewise.report.evaluation import Estimate
from edgewise.report.wording import HERO, format_share, say_policy
from edgewise.reproduce.registry import Figure, Provenance, Reproduction, Setup, Verdict
from edgewise.runtime import Session
from edgewise.runtime.repricing import Repricer
from edgewise.units import format_duration

if TYPE_CHECKING:
    from edgewise.backends import Program
    from edgewise.predict import CostTable
    from edgewise.predict.fitted import FittedPredictor

TITLE = "Real throttling: deadlines and depth while this machine's CPU quota and co-runners change"

BLIND = "edgewise_without_state"
"""The hero, told nothing of the device: it learns from residuals alone."""
RIVALS = ("static_table_scaled", "spinn")
POLICIES = (HERO, BLIND, "static_table", *RIVALS, "branchynet", "full_depth", ORACLE)

_LEAST_DSR, _LEAST_OF_ORACLE = 0.95, 0.9
_BUDGET_RATIO = 1.5
_RUNNING = 10  # requests behind each point of a running mean
_MODEL, _DATA = "fashion-lite0", "fashion-mnist-sample"
_KIND = "physical"  # of all kinds the one that needs the fewest states


@dataclass(frozen=True, slots=True, kw_only=True)
class _Effort:
    hold_s: float
    repetitions: int
    rounds: int
    passes: int
    inputs: int
    effect_periods_s: tuple[float, ...]
    effect_s: float


_FULL = _Effort(
    hold_s=1.0,
    repetitions=6,
    rounds=5,
    passes=8,
    inputs=500,
    effect_periods_s=(0.004, 0.008, 0.02, 0.1),
    effect_s=1.0,
)
_QUICK = _Effort(
    hold_s=0.1,
    repetitions=2,
    rounds=2,
    passes=1,
    inputs=60,
    effect_periods_s=(0.008,),
    effect_s=0.2,
)


def run(setup: Setup) -> Reproduction:
    """Measure in states, then play.

    Args:
        setup: ``models`` has at most one; the shipped one by default.

    Raises:
        ConfigError: Several models were named.
    """
    if len(setup.models) > 1:
        raise ConfigError(f"expected one model, found {', '.join(setup.models)}")
    effort = _QUICK if setup.quick else _FULL
    name = setup.models[0] if setup.models else _MODEL
    setup.say(f"{name}: loading and measuring")
    program, costs, sample = open_model(
        name,
        data=setup.data or _DATA,
        limit=setup.limit or effort.inputs,
        backend=setup.backend,
        threads=setup.threads,
        store=setup.store,
        seed=setup.seed,
    )
    full_depth_s = costs.full_depth_s()
    budget_s = _BUDGET_RATIO * full_depth_s
    before = other_load(0.2)
    cores = usable_cores().threads
    notes: list[str] = []
    details: dict[str, Any] = {"full_depth_s": full_depth_s, "budget_s": budget_s}
    with contextlib.ExitStack() as stack:
        quota = _permitted_quota(stack, effort, notes, details)
        fitted = _fit(program, effort, cores, quota=quota, setup=setup, notes=notes)
        names = [n for n in POLICIES if n != BLIND or fitted is not None]
        makers = _makers(names, program, costs, budget_s=budget_s, notes=notes)
        played = play_throttled(
            lambda: {n: Session(program, costs, policy=make()) for n, make in makers.items()},
            sample,
            scene=default_scene(effort.hold_s, cores=cores, with_quota=quota is not None),
            repetitions=effort.repetitions,
            budget_s=budget_s,
            quota=quota,
            around=lambda sessions: _following(sessions[HERO], fitted),
            on_progress=lambda share: setup.say(f"{name}: playing, {share:.0%}"),
        )
    rows = summarise_throttled(played)
    details |= {
        "rows": {row.policy: _plain(dataclasses.asdict(row)) for row in rows},
        "time_line": played[0].time_line(),
    }
    notes += (
        *(
            f"{load.label} ended by itself: {load.problem}"
            for repetition in played
            for load in repetition.loads
            if load.problem
        ),
        (
            f"Every request has {format_duration(budget_s)}: {_BUDGET_RATIO} times the median of"
            f" the whole network on the calm machine, {format_duration(full_depth_s)}."
        ),
        (
            "Requests follow one another; each input goes to every policy, in an order that"
            " rotates. Intervals are over repetitions, each with policies that have learned nothing"
            " yet."
        ),
        (
            "Hindsight (oracle) answers requests of its own, a moment before or after the others:"
            " it sees other stalls than they do, and its other heads run within its time."
        ),
        (
            f"Before the first repetition other programs used {format_share(before.other_ratio)} of"
            " the machine."
        ),
    )
    provenance: Provenance = "simulated" if program.backend == "null" else "measured"
    return Reproduction(
        title=TITLE,
        source="after UniExit, sections 7.3 to 7.5, on this machine instead of a Jetson",
        setting={
            "paper": "Jetson Orin Nano and Xavier NX under platform-managed DVFS, with co-runners",
            "ours": f"{program.model.name} on {program.backend}, {setup.threads} thread;"
            f" {'quota 100→25→100 % of a core and ' if quota is not None else ''}map, audio and"
            f" CPU co-runners; {effort.repetitions} repetitions; {sample.source}",
        },
        figures=figures(rows, provenance),
        verdicts=judge(rows),
        notes=tuple(notes),
        charts=charts(rows, played[0], budget_s=budget_s, provenance=provenance),
        details=details,
    )


def judge(rows: Sequence[ThrottleRow]) -> tuple[Verdict, ...]:
    """The three things that are to be shown of the hero."""
    by_name = {row.policy: row for row in rows}
    mine, oracle = by_name[HERO], by_name.get(ORACLE)
    of_oracle = mine.depth_of_oracle
    rivals = [by_name[name] for name in RIVALS if name in by_name]
    better = [
        rival
        for rival in rivals
        if rival.dsr.value > mine.dsr.value
        and rival.mean_depth_ratio.value > mine.mean_depth_ratio.value
    ]
    hindsight = "" if oracle is None else f"; hindsight {format_share(oracle.dsr.value)}"
    return (
        Verdict(
            claim=f"{say_policy(HERO)} meets at least {_LEAST_DSR:.0%} of its deadlines",
            holds=mine.dsr.value >= _LEAST_DSR,
            detail=format_share(mine.dsr.value) + hindsight,
        ),
        Verdict(
            claim=f"its mean depth is at least {_LEAST_OF_ORACLE} of hindsight's",
            holds=None if of_oracle is None else of_oracle.value >= _LEAST_OF_ORACLE,
            detail="hindsight was not compared" if of_oracle is None else f"{of_oracle.value:.3f}",
        ),
        Verdict(
            claim="no scheduler with a scale factor is better in both deadlines met and depth",
            holds=not better if rivals else None,
            detail="; ".join(
                f"{say_policy(r.policy)}: {format_share(r.dsr.value)} and depth"
                f" {r.mean_depth_ratio.value:.3f}"
                for r in (mine, *(better or rivals))
            ),
        ),
    )


def figures(rows: Sequence[ThrottleRow], provenance: Provenance) -> tuple[Figure, ...]:
    """Five figures of each policy; the paper has none of this machine."""
    found = []
    for row in rows:
        for what, unit, scale, estimate in (
            ("deadlines met", "%", 100.0, row.dsr),
            ("mean depth", "ratio", 1.0, row.mean_depth_ratio),
            ("mean depth over hindsight's", "ratio", 1.0, row.depth_of_oracle),
            ("right", "%", 100.0, row.accuracy),
            ("right and in time", "%", 100.0, row.right_in_time),
        ):
            found.append(
                Figure(
                    name=f"{_say(row.policy)}: {what}",
                    unit=unit,
                    ours=None if estimate is None else scale * estimate.value,
                    low=_limit(estimate, "low", scale),
                    high=_limit(estimate, "high", scale),
                    provenance=provenance,
                )
            )
    return tuple(found)


def charts(
    rows: Sequence[ThrottleRow],
    shown: Repetition,
    *,
    budget_s: float,
    provenance: Provenance,
) -> tuple[Chart, ...]:
    """The first repetition over time, and what all came to."""
    line = shown.time_line()
    drawn = [name for name in (HERO, BLIND, ORACLE) if name in line["policies"]]
    end_s = max((r.at_s for r in shown.requests), default=0.0)
    steps = [*((q["at_s"], q["ratio"]) for q in line["quotas"])] or [(0.0, 1.0)]
    disturbed = [
        Series(
            name="CPU quota",
            x=[*(t for t, _ in steps), end_s],
            y=[*(r for _, r in steps), steps[-1][1]],
        )
    ]
    spans: dict[str, list[float]] = {}
    for load in line["loads"]:
        spans.setdefault(load["label"], []).extend((load["start_s"], load["stop_s"]))
    for n, (label, ends_s) in enumerate(spans.items()):
        level = 0.05 * (n + 1)  # one above the other
        x = [0.0, *(t for t in ends_s for _ in range(2))]
        y = [0.0, *([0.0, level, level, 0.0] * (len(ends_s) // 2))]
        disturbed.append(Series(name=label, x=x, y=y))
    over_time = [
        Chart(
            title="What was imposed",
            x_label="time (s)",
            y_label="share of one core",
            series=tuple(disturbed),
            provenance=provenance,
            kind="step",
            y_range=(0.0, 1.05),
        )
    ]
    depth = [
        Series(
            name=_say(name),
            x=line["policies"][name]["at_s"],
            y=_running_mean(line["policies"][name]["depth_ratio"]),
        )
        for name in drawn
    ]
    latency = [
        Series(
            name=_say(name),
            x=line["policies"][name]["at_s"],
            y=[v / budget_s for v in line["policies"][name]["latency_s"]],
        )
        for name in drawn
    ]
    over_time += [
        Chart(
            title=f"Depth, mean of {_RUNNING} requests",
            x_label="time (s)",
            y_label="depth (ratio)",
            series=tuple(depth),
            provenance=provenance,
            y_range=(0.0, 1.05),
        ),
        Chart(
            title="Latency over budget",
            x_label="time (s)",
            y_label="latency / budget",
            series=tuple(latency),
            provenance=provenance,
            kind="points",
        ),
    ]
    bars = Chart(
        title="All repetitions",
        x_label="",
        y_label="%",
        series=(
            _bars(rows, "deadlines met", "dsr"),
            _bars(rows, "right and in time", "right_in_time"),
            _bars(rows, "mean depth", "mean_depth_ratio"),
        ),
        provenance=provenance,
        kind="bars",
        y_range=(0.0, 105.0),
    )
    return (*over_time, bars)


def _running_mean(values: Sequence[float]) -> list[float]:
    """Mean of the last `_RUNNING` values, fewer at the start."""
    parts = (values[max(0, n - _RUNNING + 1) : n + 1] for n in range(len(values)))
    return [math.fsum(part) / len(part) for part in parts]


def _bars(rows: Sequence[ThrottleRow], name: str, what: str) -> Series:
    shown = [getattr(row, what) for row in rows]
    return Series(
        name=name,
        x=[_say(row.policy) for row in rows],
        y=[100 * each.value for each in shown],
        low=[_limit(each, "low", 100.0) for each in shown],
        high=[_limit(each, "high", 100.0) for each in shown],
    )


def _permitted_quota(
    stack: contextlib.ExitStack, effort: _Effort, notes: list[str], details: dict[str, Any]
) -> CpuQuota | None:
    try:
        effects = quota_effect(effort.effect_periods_s, seconds=effort.effect_s)
        quota = stack.enter_context(CpuQuota())
    except QuotaUnavailable as error:
        notes.append(f"co-runners only, no CPU quota: {error.message}")
        return None
    details["quota_effect"] = [dataclasses.asdict(each) for each in effects]
    notes += [
        f"A computation of 10 ms under 25 % per {format_duration(e.period_s)}: {e.got_ratio:.0%} of"
        f" a core; 5th, 50th, 95th percentile {format_duration(e.p05_s)},"
        f" {format_duration(e.p50_s)}, {format_duration(e.p95_s)}."
        for e in effects
    ]
    notes.append(
        f"The quota holds within {format_duration(quota.period_s)}: a thread runs at full speed"
        " until its share is used up, then stands still, all threads of the process together."
    )
    return quota


def _fit(  # noqa: PLR0913
    program: Program,
    effort: _Effort,
    cores: int,
    *,
    quota: CpuQuota | None,
    setup: Setup,
    notes: list[str],
) -> FittedPredictor | None:
    """Costs by state, measured with the disturbances that are played later."""
    said: list[str] = []

    def say(text: str) -> None:
        setup.say(text)
        if "imposed" in text:
            said.append(text)

    with Monitor(make_sensors()) as monitor:
        samples = measure_states(
            program,
            quotas=QUOTAS if quota is not None else (1.0,),
            loads=default_loads(cores),
            rounds=effort.rounds,
            passes=effort.passes,
            source=monitor,
            quota=quota,
            seed=setup.seed,
            say=say,
        )
    notes += said
    try:
        fitted = fit_kind(_KIND, samples, seed=setup.seed)
    except ProfileError as error:
        notes.append(f"{say_policy(HERO)} runs without the device's state: {error.message}")
        return None
    notes.append(
        f"{say_policy(HERO)} follows the state by a {_KIND} predictor of"
        f" {', '.join(fitted.predictor.features)}, fitted in {samples.num_states} states"
        f" ({format_duration(samples.elapsed_s or 0.0)})."
    )
    return fitted


@contextlib.contextmanager
def _following(session: Session, fitted: FittedPredictor | None) -> Iterator[None]:
    """Keep a session's costs in step with the machine's state."""
    if fitted is None:
        yield
        return
    repricer = Repricer(fitted, [session.policy])
    with Monitor(make_sensors(), on_state=[repricer.on_state]):
        yield


def _makers(
    names: Sequence[str],
    program: Program,
    costs: CostTable,
    *,
    budget_s: float,
    notes: list[str],
) -> dict[str, Callable[[], Policy]]:
    """What makes each policy anew; the notes say which cannot be made for this model."""
    inputs = PolicyInputs.of(program.model, costs, segments=program.segments)
    makers: dict[str, Callable[[], Policy]] = {}
    for name in names:
        make = functools.partial(
            make_for_budget, HERO if name == BLIND else name, inputs, budget_s=budget_s
        )
        try:
            made = make()
        except ConfigError as error:
            if name == HERO:
                raise
            notes.append(f"{say_policy(name)} left out: {error.message}")
            continue
        # Tuning takes seconds, and who learns nothing is the same each time.
        learns = type(made).observe is not Policy.observe
        makers[name] = make if learns else functools.partial(_same, made)
    return makers


def _same(policy: Policy) -> Policy:
    return policy


def _say(policy: str) -> str:
    return "hindsight (bound)" if policy == ORACLE else say_policy(policy)


def _limit(estimate: Estimate | None, end: str, scale: float = 1.0) -> float | None:
    value = math.inf if estimate is None else float(getattr(estimate, end))
    return scale * value if math.isfinite(value) else None


def _plain(record: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON can say it: a limit that does not exist is null, not infinity."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {key: plain(value) for key, value in record.items()}
