"""SwapLess, Figure 8: one tenant's rate rises twice; who adapts, and what that is worth."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgewise.bench.arrivals import Arrivals, schedule
from edgewise.bench.placement_runs import FCFS, MeasuredModel, Play, play, tenants_of
from edgewise.placement import search
from edgewise.placement.plan import Placement
from edgewise.placement.problem import PAPER, Assumptions, Problem, Residency
from edgewise.placement.response import evaluate
from edgewise.placement.workload import Rate, Workload, WorkloadTenant
from edgewise.report.chart import Chart, Series
from edgewise.report.workload import PlayedRequest
from edgewise.reproduce import _placement as common
from edgewise.reproduce import _played as played
from edgewise.reproduce.registry import Figure, Reproduction, Setup, Verdict
from edgewise.runtime.tenants.engine import TenantEngine
from edgewise.runtime.tenants.records import QueueRule
from edgewise.runtime.tenants.replanner import Replanner

TITLE = "A tenant's rate rises from 1 to 3 to 5 requests/s: plans follow, and no request is lost"

_NETS, _QUICK_NETS = ("mnasnet", "inception_v4"), ("mnasnet", "efficientnet_b0")
_STEPS = (1.0, 3.0, 5.0)  # of the second network; requests per second in the paper
_QUICK_SCALE = 5.0  # of those rates: that network is small
_INNER = (9, 3)  # inner places, full and quick
_PHASE_S = (20.0, 5.0)
_BUSY = 0.75  # of the accelerator, in the last phase, with everything on it
_PERIOD_S, _HOLD_S = 0.5, 2.0  # between looks; between changes of plan
_SETTLE_S = 0.5  # after a change is drained, what it did may still show
_BINS_PER_PHASE = 10
_PAPER_REDUCTION, _PAPER_SEARCH_S = 75.1, 3e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Policy:
    """Who plans, and how.

    Attributes:
        method: Of the search.
        queue: The accelerator's order.
        replans: Whether plans follow the rates.
        assumptions: Which formulas; ours where ``None``.
        residency: Of the accelerator's memory; ``None`` for whichever is better.
        quick: Whether a quick run plays it.
    """

    method: str
    queue: QueueRule = FCFS
    replans: bool = False
    assumptions: Assumptions | None = None
    residency: Residency | None = "switch"
    quick: bool = False


_POLICIES = {
    "edgewise": _Policy(method="best", queue=QueueRule(), replans=True, residency=None, quick=True),
    "swapless": _Policy(method="greedy", replans=True, assumptions=PAPER, quick=True),
    "compiler": _Policy(method="compiler", quick=True),
    "threshold": _Policy(method="threshold"),
    "alpha-zero": _Policy(method="alpha-zero", replans=True, assumptions=PAPER),
    "rate-pinning": _Policy(method="rate-pinning", replans=True, residency="pinned"),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Scene:
    """What every policy meets alike."""

    models: tuple[MeasuredModel, ...]
    arrivals: Arrivals
    rates: tuple[tuple[float, ...], ...]  # of each phase, by tenant
    phase_s: float

    def problem(self, policy: _Policy, phase: int = 0) -> Problem:
        return Problem.of(
            tenants_of(self.models, self.rates[phase]),
            common.device(),
            cores=played.cores(),
            assumptions=policy.assumptions,
            residency=policy.residency or "switch",
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Outcome:
    """One policy's play; ``searches_s`` is how long each search for a plan took."""

    name: str
    play: Play
    phase_s: float
    phases: int
    searches_s: Sequence[float] = ()

    @property
    def requests(self) -> list[PlayedRequest]:
        return [r for r in self.play.requests if r.outcome == "answered"]

    def mean_s(self, phase: int | None = None, tenant: str | None = None) -> float:
        """Mean response of requests due in a phase, or in all; NaN where none was answered."""
        found = [
            r.response_s
            for r in self.requests
            if (phase is None or self._phase(r) == phase) and tenant in {None, r.tenant}
        ]
        return float(np.mean(found)) if found else float("nan")

    def _phase(self, request: PlayedRequest) -> int:
        return min(int(request.due_s / self.phase_s), self.phases - 1)

    @property
    def changes_s(self) -> list[tuple[float, float]]:
        """From when to when each change of plan could be felt, seconds since the start."""
        return [
            (c.began_s - self.play.origin_s, (c.drained_s or c.routed_s) - self.play.origin_s)
            for c in self.play.changes[1:]
        ]

    def p99_s(self) -> tuple[float | None, float | None]:
        """Of requests that met a change of plan, and of all others."""
        near: list[float] = []
        far: list[float] = []
        for r in self.requests:
            met = any(a <= r.done_s and r.due_s <= b + _SETTLE_S for a, b in self.changes_s)
            (near if met else far).append(r.response_s)
        return _p99_s(near), _p99_s(far)

    @property
    def decisions_s(self) -> list[float]:
        """How long each decision took, predictions of its plan included."""
        replanner = self.play.extra
        return [] if replanner is None else [d.decision_s for d in replanner.decisions]

    @property
    def reasons(self) -> list[str]:
        """When it looked, and why it moved or stayed."""
        replanner = self.play.extra
        decisions = () if replanner is None else replanner.decisions
        return [f"{d.at_s - self.play.origin_s:.1f} s: {d.reason}" for d in decisions]


def run(setup: Setup) -> Reproduction:
    """Play every policy over the same requests, one after the other.

    Args:
        setup: ``limit`` (requests of each play, about), ``seed``; ``quick`` plays three policies
            over small networks, shortly.
    """
    scene = _scene(setup)
    outcomes: dict[str, _Outcome] = {}
    for name, policy in _POLICIES.items():
        if policy.quick or not setup.quick:
            setup.say(f"{name}: {scene.arrivals.duration_s:.0f} s")
            outcomes[name] = _play(scene, name, policy)
    others = [o.play.other_ratio for o in outcomes.values()]
    first, second = (m.name for m in scene.models)
    constant = scene.rates[0][0]
    return Reproduction(
        title=TITLE,
        source="SwapLess (arXiv:2602.17808), Figure 8 and section V-D",
        setting={
            **played.setting(
                "MnasNet at a constant rate, Inception-v4 at 1, 3 and 5 requests/s, on a Coral USB"
                " Accelerator and a Raspberry Pi 5",
                ours=f"{first} at {constant:.3g}/s, {second} at"
                f" {', '.join(f'{r[1]:.3g}' for r in scene.rates)} requests/s for"
                f" {scene.phase_s:.3g} s each; every policy over the same requests, in turn",
                others=others,
            ),
            "predicted": "nothing here but what policies plan with: costs measured a moment before",
        },
        figures=tuple(_figures(scene, outcomes)),
        verdicts=_verdicts(setup, outcomes),
        notes=tuple(_notes(scene, outcomes)),
        charts=(_time_chart(outcomes, scene), _plan_chart(outcomes["edgewise"], scene)),
        details={name: _as_json(o, scene) for name, o in outcomes.items()},
    )


def _scene(setup: Setup) -> _Scene:
    models = played.models(setup)
    names = _QUICK_NETS if setup.quick else _NETS
    found = tuple(models.get(net, places=_INNER[setup.quick]) for net in names)
    scale = _QUICK_SCALE if setup.quick else 1.0
    steps = [scale * step for step in _STEPS]
    constant = _constant_per_s(found, steps[-1])
    phase_s = _PHASE_S[setup.quick]
    if setup.limit is not None:
        phase_s = setup.limit / (len(steps) * constant + sum(steps))
    rates = (
        Rate(per_s=constant),
        Rate(kind="stepped", steps=tuple((k * phase_s, s) for k, s in enumerate(steps))),
    )
    workload = Workload(
        name="rising",
        tenants=tuple(
            WorkloadTenant(name=m.name, model=None, profile=m.profile, rate=rate)
            for m, rate in zip(found, rates, strict=True)
        ),
        accelerator=common.device(),
        cores=played.cores(),
        horizon_s=len(steps) * phase_s,
        seed=setup.seed,
    )
    return _Scene(
        models=found,
        arrivals=schedule(workload),
        rates=tuple((constant, step) for step in steps),
        phase_s=phase_s,
    )


def _constant_per_s(models: Sequence[MeasuredModel], other_per_s: float) -> float:
    """Rate of the first at which the accelerator, with everything on it, is `_BUSY` at the end.

    The paper does not give it. By bisection: utilisation rises with the rate.
    """

    def busy(rate_per_s: float) -> float:
        problem = Problem.of(
            tenants_of(models, (rate_per_s, other_per_s)), common.device(), cores=1
        )
        places = problem.last[None]
        return float(evaluate(problem, places, np.zeros_like(places)).accelerator_busy[0])

    low, high = 1e-2, 1e4
    for _ in range(40):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if busy(middle) < _BUSY else (low, middle)
    return low


def _play(scene: _Scene, name: str, policy: _Policy) -> _Outcome:
    problem = scene.problem(policy)
    options = {"residency": "either"} if policy.residency is None else {}
    first = search.propose(problem, policy.method, **options)
    searches_s: list[float] = []
    seen = play(
        scene.models,
        problem.with_residency(first.residency),
        first,
        scene.arrivals,
        queue=policy.queue,
        beside=functools.partial(_replanner, scene, problem, policy, searches_s)
        if policy.replans
        else None,
    )
    return _Outcome(
        name=name,
        play=seen,
        phase_s=scene.phase_s,
        phases=len(scene.rates),
        searches_s=searches_s,
    )


def _replanner(
    scene: _Scene,
    problem: Problem,
    policy: _Policy,
    searches_s: list[float],
    engine: TenantEngine,
) -> Replanner:
    def find(now: Problem, *, method: str) -> Placement:
        options = {"residency": "either"} if policy.residency is None else {}
        kind = policy.residency or now.residency
        begin_s = engine.clock.now_s()
        found = search.search(now.with_residency(kind), method, **options)
        searches_s.append(engine.clock.now_s() - begin_s)
        return found.placement()

    return Replanner(
        engine,
        problem,
        period_s=_PERIOD_S,
        plan=find,
        method=policy.method,
        horizon_s=scene.phase_s,
        hold_s=_HOLD_S,
    )


def _p99_s(responses: Sequence[float]) -> float | None:
    return float(np.quantile(responses, 0.99)) if responses else None


def _reduction(ours: float, theirs: float) -> float:
    return 100 * (1 - ours / theirs)


def _figures(scene: _Scene, outcomes: dict[str, _Outcome]) -> Iterator[Figure]:
    edgewise, compiler = outcomes["edgewise"], outcomes["compiler"]
    for name, outcome in outcomes.items():
        yield Figure(
            name=f"{name}: mean response over all",
            unit="s",
            ours=outcome.mean_s(),
            provenance="measured",
            note="by phase " + ", ".join(_ms(outcome.mean_s(k)) for k in range(outcome.phases)),
        )
    phases = range(len(scene.rates))
    best = max(_reduction(edgewise.mean_s(k), compiler.mean_s(k)) for k in phases)
    yield Figure(
        name="edgewise against compiler, reduction of the mean, best phase",
        unit="%",
        paper=_PAPER_REDUCTION,
        ours=best,
        provenance="measured",
        note='the paper: "up to", against baselines',
    )
    for name, outcome in outcomes.items():
        if name != "edgewise":
            yield Figure(
                name=f"edgewise against {name}, reduction of the mean over all",
                unit="%",
                ours=_reduction(edgewise.mean_s(), outcome.mean_s()),
                provenance="measured",
            )
    for name, outcome in outcomes.items():
        if not _POLICIES[name].replans:
            continue
        near, far = outcome.p99_s()
        yield Figure(
            name=f"{name}: changes of plan",
            unit="changes",
            ours=float(len(outcome.changes_s)),
            provenance="measured",
            note="; ".join(_said(scene, outcome)),
        )
        yield Figure(
            name=f"{name}: p99 of requests that met a change of plan",
            unit="s",
            ours=near,
            provenance="measured",
            note=f"of all others {_ms(far)}" if near is not None else "no change of plan",
        )
        took, whole = outcome.searches_s, outcome.decisions_s
        yield Figure(
            name=f"{name}: search for a plan, median",
            unit="s",
            paper=_PAPER_SEARCH_S if name == "swapless" else None,
            ours=float(np.median(took)) if took else None,
            provenance="measured",
            note=f"{len(took)} while suffixes use the cores; with the plan's predictions"
            f" {_ms(float(np.median(whole)))}"
            if took and whole
            else "none was made",
        )
    for name, outcome in outcomes.items():
        yield Figure(
            name=f"{name}: requests without an answer",
            unit=f"of {len(outcome.play.requests)}",
            ours=float(outcome.play.lost),
            provenance="measured",
        )


def _said(scene: _Scene, outcome: _Outcome) -> list[str]:
    """Every plan with its instant: place and cores of each tenant."""
    found = []
    for change in outcome.play.changes:
        at_s = max(0.0, change.routed_s - outcome.play.origin_s)
        shares = (
            f"{s.tenant} {s.place}/{m.profile.last} on {s.cores}"
            for s, m in zip(change.placement.shares, scene.models, strict=True)
        )
        found.append(f"{at_s:.1f} s {change.placement.residency}: {', '.join(shares)}")
    return found


def _verdicts(setup: Setup, outcomes: dict[str, _Outcome]) -> tuple[Verdict, ...]:
    edgewise = outcomes["edgewise"]
    others = [o.play.other_ratio for o in outcomes.values()]
    compiler = outcomes["compiler"]
    best = max(_reduction(edgewise.mean_s(k), compiler.mean_s(k)) for k in range(edgewise.phases))
    lost = {name: o.play.lost for name, o in outcomes.items()}
    rival = min((o for o in outcomes.values() if o is not edgewise), key=_Outcome.mean_s)
    changes = edgewise.changes_s
    return (
        played.verdict(
            setup,
            f"in its best phase edgewise cuts the compiler's mean by {_PAPER_REDUCTION} % or more",
            holds=best >= _PAPER_REDUCTION,
            detail=f"{best:.1f} %; over all"
            f" {_reduction(edgewise.mean_s(), compiler.mean_s()):.1f} %",
            others=others,
        ),
        played.verdict(
            setup,
            "edgewise has the lowest mean over all",
            holds=edgewise.mean_s() <= rival.mean_s(),
            detail=f"{_ms(edgewise.mean_s())}, next {rival.name} {_ms(rival.mean_s())}",
            others=others,
        ),
        played.verdict(
            setup,
            "plans follow the rates",
            holds=bool(changes),
            detail=f"{len(changes)} change{'' if len(changes) == 1 else 's'} of plan",
            others=others,
        ),
        Verdict(
            claim="no request fails or is lost under any policy",
            holds=not any(lost.values()),
            detail=", ".join(f"{name} {count}" for name, count in lost.items()),
        ),
    )


def _notes(scene: _Scene, outcomes: dict[str, _Outcome]) -> Iterator[str]:
    first, second = (m.name for m in scene.models)
    yield (
        f"The paper does not give the constant rate: {first} is asked so often that the"
        f" accelerator, with everything on it, is {100 * _BUSY:.0f} % busy in the last phase."
    )
    if scene.rates[0][1] != _STEPS[0]:
        yield f"{second} stands in for Inception-v4 in a quick run, at {_QUICK_SCALE:g} its rates."
    for name, outcome in outcomes.items():
        late_s = outcome.play.late_p99_s
        if late_s > 0.5 * outcome.mean_s():
            yield (
                f"{name}: the machine was too busy to send requests when they were due (p99"
                f" {_ms(late_s)} late); means include that."
            )


def _bins(outcome: _Outcome) -> tuple[list[float], list[float | None]]:
    """Mean response over time, ms, by the instant that requests were due."""
    width_s = outcome.phase_s / _BINS_PER_PHASE
    count = outcome.phases * _BINS_PER_PHASE
    found: list[list[float]] = [[] for _ in range(count)]
    for r in outcome.requests:
        found[min(int(r.due_s / width_s), count - 1)].append(r.response_s)
    x = [(k + 0.5) * width_s for k in range(count)]
    return x, [1e3 * float(np.mean(each)) if each else None for each in found]


def _time_chart(outcomes: dict[str, _Outcome], scene: _Scene) -> Chart:
    steps = ", ".join(f"{rates[1]:.3g}" for rates in scene.rates)
    series = []
    for name, outcome in outcomes.items():
        x, y = _bins(outcome)
        series.append(Series(name=name, x=x, y=y))
    return Chart(
        title=f"{scene.models[1].name} at {steps} requests/s",
        x_label="time, s",
        y_label="mean response, ms",
        provenance="measured",
        series=tuple(series),
    )


def _plan_chart(outcome: _Outcome, scene: _Scene) -> Chart:
    """Share of each model's work on the accelerator over time."""
    starts = [max(0.0, c.routed_s - outcome.play.origin_s) for c in outcome.play.changes]
    x = [*starts, scene.phase_s * len(scene.rates)]
    series = []
    for i, model in enumerate(scene.models):
        places = [c.placement.shares[i].place for c in outcome.play.changes]
        depth = [100 * float(model.profile.depth_ratio[p]) for p in (*places, places[-1])]
        series.append(Series(name=model.name, x=x, y=depth))
    return Chart(
        title="edgewise: work on the accelerator",
        x_label="time, s",
        y_label="% of the model's work",
        provenance="measured",
        kind="step",
        y_range=(0.0, 105.0),
        series=tuple(series),
    )


def _as_json(outcome: _Outcome, scene: _Scene) -> dict[str, Any]:
    near_s, far_s = outcome.p99_s()
    return {
        "mean_s": outcome.mean_s(),
        "phases": [
            {
                "rates_per_s": list(rates),
                "mean_s": outcome.mean_s(k),
                "tenants": {m.name: outcome.mean_s(k, m.name) for m in scene.models},
            }
            for k, rates in enumerate(scene.rates)
        ],
        "plans": _said(scene, outcome),
        "p99_near_changes_s": near_s,
        "p99_elsewhere_s": far_s,
        "lost": outcome.play.lost,
        "searches_s": list(outcome.searches_s),
        "decisions_s": outcome.decisions_s,
        "decisions": outcome.reasons,
        "late_p99_s": outcome.play.late_p99_s,
        "other_ratio": outcome.play.other_ratio,
        "overruns": outcome.play.overruns,
        "calls": outcome.play.calls,
    }


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None or not np.isfinite(seconds) else f"{1e3 * seconds:.3g} ms"
