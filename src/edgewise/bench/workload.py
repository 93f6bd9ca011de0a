"""Plays a workload for real: requests are sent when they are due, whatever became of earlier ones.

Predictions are made again after the play, for the rates and plans that were in force, so that they
answer the same question as what was observed.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from edgewise.backends.piece import Array
from edgewise.bench.arrivals import Arrivals, instants_s, schedule
from edgewise.clock import Clock, MonotonicClock
from edgewise.placement.forecast import forecast, forecast_tail
from edgewise.placement.plan import Placement
from edgewise.placement.problem import Assumptions, CpuMode, Problem
from edgewise.placement.simulate import QueueOrder, simulate
from edgewise.placement.workload import Workload
from edgewise.report.workload import (
    Figures,
    PlayedPlan,
    PlayedRequest,
    PlayedWorkload,
    TenantResult,
)
from edgewise.runtime.tenants.records import Done, PlanChange, QueueRule, TenantAnswer

Float64 = npt.NDArray[np.float64]

_NAP_S = 0.05  # how long a stop may go unnoticed
_SIMULATED_REQUESTS = 20_000
_LATE_RATIO = 0.5  # of the shortest mean response


class Engine(Protocol):
    """What plays need of `TenantEngine`."""

    def submit(  # noqa: D102
        self, tenant: str, x: Array, *, due_s: float | None = None, on_done: Done | None = None
    ) -> Any: ...

    def snapshot(self) -> Any: ...  # noqa: D102

    def drain(self, timeout_s: float) -> bool: ...  # noqa: D102

    @property
    def changes(self) -> tuple[PlanChange, ...]: ...  # noqa: D102


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What was sent, and when.

    Attributes:
        requests: In order of due instants.
        origin_s: The start, on the engine's clock.
        end_s: How long requests were sent, seconds since the start.
        drained: Whether every request had ended by then and the time allowed.
    """

    requests: tuple[PlayedRequest, ...]
    origin_s: float
    end_s: float
    drained: bool


def play_workload(  # noqa: PLR0913 - a play's whole circumstances
    workload: Workload,
    engine: Engine,
    inputs: Mapping[str, Sequence[Array]],
    *,
    duration_s: float | None = None,
    warm_up_s: float | None = None,
    queue: QueueRule | None = None,
    accelerator_provenance: str = "simulated",
    suffixes: Mapping[str, tuple[Any, Any]] | None = None,
    accuracies: Mapping[str, Sequence[float | None]] | None = None,
    clock: Clock | None = None,
    stop: threading.Event | None = None,
    drain_s: float = 10.0,
    on_tick: Callable[[Any], None] | None = None,
    tick_s: float = 0.5,
) -> PlayedWorkload:
    """Send a workload's requests, wait for their ends and compare with what was predicted.

    Args:
        workload: Tenants, rates and seed.
        engine: Runs them.
        inputs: A pool for each tenant, taken in turn.
        duration_s: How long requests come; the workload's horizon by default.
        warm_up_s: What of that no figure counts; a tenth, at most 3 s, by default.
        queue: The engine's order, for predictions.
        accelerator_provenance: ``"measured"`` for a real device.
        suffixes: By tenant, what early exits leave of the suffixes' work and its C_s²; the
            workload's own by default.
        accuracies: Of each exit, by tenant with exits.
        clock: The engine's.
        stop: Set by another thread or a signal to send no more.
        drain_s: How long requests under way may take after the last was sent.
        on_tick: Given a snapshot of the engine while the play goes on.
        tick_s: How often.

    Raises:
        EdgeError: As the engine's `submit`.
    """
    arrivals = schedule(workload, duration_s=duration_s)
    if warm_up_s is None:
        warm_up_s = min(3.0, 0.1 * arrivals.duration_s)
    sent = send(
        workload,
        engine,
        inputs,
        arrivals,
        clock=clock or MonotonicClock(),
        stop=stop or threading.Event(),
        drain_s=drain_s,
        on_tick=on_tick,
        tick_s=tick_s,
    )
    return compare(
        workload,
        sent,
        engine.changes,
        duration_s=arrivals.duration_s,
        warm_up_s=warm_up_s,
        queue=queue or QueueRule(),
        accelerator_provenance=accelerator_provenance,
        suffixes=suffixes,
        accuracies=accuracies,
    )


def send(  # noqa: PLR0913 - a play's whole circumstances
    workload: Workload,
    engine: Engine,
    inputs: Mapping[str, Sequence[Array]],
    arrivals: Arrivals,
    *,
    clock: Clock,
    stop: threading.Event,
    drain_s: float,
    on_tick: Callable[[Any], None] | None = None,
    tick_s: float = 0.5,
) -> Sent:
    """Send every request when it is due, from one thread, and wait for their ends.

    Args:
        workload: Names and budgets.
        engine: Answers them.
        inputs: A pool for each tenant.
        arrivals: When.
        clock: The engine's.
        stop: Sends no more once it is set.
        drain_s: How long requests may take after the last.
        on_tick: Given a snapshot now and then, on the caller's thread.
        tick_s: How often.

    Raises:
        EdgeError: As the engine's `submit`.
    """
    sender = _Sender(workload, engine, inputs, arrivals, clock, stop)
    thread = threading.Thread(target=sender.run, name="edgewise-player", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(tick_s)
        if on_tick is not None and thread.is_alive():
            on_tick(engine.snapshot())
    if sender.problem is not None:
        raise sender.problem
    drained = engine.drain(drain_s)
    return Sent(
        requests=sender.requests(),
        origin_s=sender.origin_s,
        end_s=sender.end_s,
        drained=drained,
    )


class _Sender:
    """The open loop, and what came back."""

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        workload: Workload,
        engine: Engine,
        inputs: Mapping[str, Sequence[Array]],
        arrivals: Arrivals,
        clock: Clock,
        stop: threading.Event,
    ) -> None:
        self.origin_s = clock.now_s()
        self.end_s = arrivals.duration_s
        self.problem: BaseException | None = None
        self._tenants = workload.tenants
        self._engine = engine
        self._inputs = inputs
        self._arrivals = arrivals
        self._clock = clock
        self._stop = stop
        self._sent_s: list[float] = []
        self._answers: dict[int, TenantAnswer] = {}

    def run(self) -> None:
        """Send until all are sent, or asked to stop."""
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001 - raised again on the caller's thread
            self.problem = error

    def _run(self) -> None:
        counts = Counter[int]()
        tenants = self._arrivals.tenant.tolist()
        for number, due_s in enumerate(self._arrivals.due_s.tolist()):
            if not self._wait_until(due_s):
                return
            which = tenants[number]
            name = self._tenants[which].name
            pool = self._inputs[name]
            x = pool[counts[which] % len(pool)]
            counts[which] += 1
            self._sent_s.append(self._clock.now_s() - self.origin_s)
            self._engine.submit(
                name,
                x,
                due_s=self.origin_s + due_s,
                on_done=partial(self._answers.__setitem__, number),
            )
        self._wait_until(self._arrivals.duration_s)

    def _wait_until(self, due_s: float) -> bool:
        """Whether to go on."""
        while not self._stop.is_set():
            left_s = self.origin_s + due_s - self._clock.now_s()
            if left_s <= 0:
                return True
            self._clock.sleep_s(min(left_s, _NAP_S))
        self.end_s = min(self.end_s, self._clock.now_s() - self.origin_s)
        return False

    def requests(self) -> tuple[PlayedRequest, ...]:
        """What became of all that were sent."""
        now_s = self._clock.now_s() - self.origin_s
        found = []
        for number, sent_s in enumerate(self._sent_s):
            tenant = self._tenants[int(self._arrivals.tenant[number])]
            due_s = float(self._arrivals.due_s[number])
            answer = self._answers.get(number)
            if answer is None:
                found.append(
                    PlayedRequest(
                        tenant=tenant.name,
                        due_s=due_s,
                        sent_s=sent_s,
                        done_s=now_s,
                        outcome="dropped",
                        met=None if tenant.budget_s is None else False,
                        plan=-1,
                        reason="had not ended when the play did",
                    )
                )
                continue
            answered = answer.outcome == "answered"
            late = tenant.budget_s is not None and answer.response_s > tenant.budget_s
            found.append(
                PlayedRequest(
                    tenant=tenant.name,
                    due_s=due_s,
                    sent_s=sent_s,
                    done_s=answer.done_s - self.origin_s,
                    outcome=answer.outcome,
                    met=None if tenant.budget_s is None else answered and not late,
                    plan=answer.plan,
                    accelerator_wait_s=answer.accelerator_wait_s,
                    service_s=answer.service_s,
                    load_s=answer.load_s,
                    missed=answer.missed,
                    cpu_wait_s=answer.cpu_wait_s,
                    cpu_s=answer.cpu_s,
                    exit_index=answer.exit_index,
                    reason=answer.reason,
                )
            )
        return tuple(found)


def compare(  # noqa: PLR0913 - a play's whole circumstances
    workload: Workload,
    sent: Sent,
    changes: Sequence[PlanChange],
    *,
    duration_s: float,
    warm_up_s: float,
    queue: QueueRule,
    accelerator_provenance: str = "simulated",
    suffixes: Mapping[str, tuple[Any, Any]] | None = None,
    accuracies: Mapping[str, Sequence[float | None]] | None = None,
) -> PlayedWorkload:
    """Hold what was observed against what the plans in force predict.

    Args:
        workload: Tenants and rates.
        sent: What became of every request.
        changes: Plans, in order; the first is the one that the play began with.
        duration_s: How long it was to last.
        warm_up_s: What no figure counts.
        queue: In which order the accelerator served.
        accelerator_provenance: ``"measured"`` for a real device.
        suffixes: By tenant, what early exits leave of the suffixes' work and its C_s²; the
            workload's own by default.
        accuracies: Of each exit, by tenant with exits.
    """
    counted = [r for r in sent.requests if r.due_s >= warm_up_s]
    spans = _spans(workload, sent, changes, warm_up_s)
    forecasts = [_forecast(workload, span, queue, suffixes) for span in spans]
    window_s = max(0.0, sent.end_s - warm_up_s)
    results = []
    for i, tenant in enumerate(workload.tenants):
        own = [r for r in counted if r.tenant == tenant.name]
        exits = _exits(own, tenant.profile.last) if tenant.exits else ()
        results.append(
            TenantResult(
                tenant=tenant.name,
                model=tenant.profile.model_id,
                budget_s=tenant.budget_s,
                rate_per_s=len(own) / window_s if window_s else 0.0,
                requests=len(own),
                outcomes=dict(Counter(r.outcome for r in own)),
                predicted=_predicted(i, tenant.budget_s, spans, forecasts, own),
                observed=_observed(i, own, spans),
                exits=exits,
                accuracy_ratio=_accuracy(exits, (accuracies or {}).get(tenant.name)),
            )
        )
    lateness = [r.sent_s - r.due_s for r in sent.requests]
    has_device = workload.accelerator is not None
    served = [r.service_s for r in counted if r.service_s is not None]
    busy = (
        _mean([f.accelerator_busy for f in forecasts], [s.length_s for s in spans]),
        sum(served) / window_s if window_s else None,
    )
    notes = []
    if not sent.drained:
        notes.append("Some requests had not ended when the time to drain was over.")
    if any(not f.stable for f in forecasts):
        notes.append("For a part of the time the plan in force was predicted to be unstable.")
    late_p99_s = float(np.quantile(lateness, 0.99)) if lateness else None
    usual_s = _usual_s(results)
    if late_p99_s is not None and usual_s is not None and late_p99_s > _LATE_RATIO * usual_s:
        notes.append(
            "The machine was too busy to send requests when they were due; what was observed"
            " includes that."
        )
    return PlayedWorkload(
        name=workload.name,
        objective=workload.objective,
        queue=_say_queue(queue),
        forecast="formulas" if queue.discipline == "fcfs" else "event simulation of that queue",
        duration_s=sent.end_s,
        warm_up_s=warm_up_s,
        accelerator=workload.accelerator.name if workload.accelerator else None,
        accelerator_provenance=accelerator_provenance if has_device else None,
        accelerator_busy=busy if has_device else (None, None),
        tenants=tuple(results),
        plans=tuple(_played_plan(change, sent.origin_s) for change in changes),
        requests=sent.requests,
        rates={t.name: t.rate.steps or ((0.0, t.rate.at_s(0.0)),) for t in workload.tenants},
        late_p99_s=late_p99_s,
        stopped="" if sent.end_s >= duration_s else f"after {sent.end_s:.1f} of {duration_s:g} s",
        notes=tuple(notes),
    )


def _exits(own: Sequence[PlayedRequest], count: int) -> tuple[int, ...]:
    """Answers by exit."""
    left = Counter(r.exit_index for r in own if r.outcome == "answered")
    return tuple(left[k] for k in range(count))


def _accuracy(exits: Sequence[int], known: Sequence[float | None] | None) -> float | None:
    """Of the exits that answered, weighted; ``None`` where that of any is not known."""
    used = [(a, n) for a, n in zip(known or (), exits, strict=False) if n]
    if not used or any(a is None for a, _ in used):
        return None
    return _mean([a for a, _ in used if a is not None], [n for _, n in used])


def _usual_s(results: Sequence[TenantResult]) -> float | None:
    """The shortest mean of any tenant, predicted or observed."""
    means = [m for r in results for m in (r.predicted.mean_s, r.observed.mean_s) if m is not None]
    return min(means, default=None)


def _say_queue(queue: QueueRule) -> str:
    if queue.discipline == "fcfs":
        return "first come, first served"
    return f"switch-aware, at most {queue.burst} in a row"


def _played_plan(change: PlanChange, origin_s: float) -> PlayedPlan:
    drained_s = change.drained_s
    return PlayedPlan(
        number=change.number,
        from_s=change.routed_s - origin_s,
        warm_s=change.routed_s - change.began_s,
        drain_s=None if drained_s is None else drained_s - change.routed_s,
        reason=change.reason,
        residency=change.placement.residency,
        shares=change.placement.shares,
    )


# --- predictions ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """A stretch with one plan and one set of rates, seconds since the start."""

    from_s: float
    to_s: float
    placement: Placement

    @property
    def length_s(self) -> float:
        return self.to_s - self.from_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Forecast:
    """What one span should show; ``tail(i, t)`` is P(R_i > t)."""

    mean_s: Float64
    miss: Float64
    cpu_busy: Float64
    accelerator_busy: float
    stable: bool
    tail: Callable[[int, float], float]


def _spans(
    workload: Workload, sent: Sent, changes: Sequence[PlanChange], warm_up_s: float
) -> list[_Span]:
    begins = [(c.routed_s - sent.origin_s, c.placement) for c in changes]
    cuts = {warm_up_s, *workload.phases_s, *(at_s for at_s, _ in begins)}
    edges = [*sorted(c for c in cuts if warm_up_s <= c < sent.end_s), sent.end_s]
    return [
        _Span(
            from_s=from_s,
            to_s=to_s,
            placement=[plan for at_s, plan in begins if at_s <= from_s or plan is begins[0][1]][-1],
        )
        for from_s, to_s in itertools.pairwise(edges)
    ]


def _forecast(
    workload: Workload,
    span: _Span,
    queue: QueueRule,
    suffixes: Mapping[str, tuple[Any, Any]] | None,
) -> _Forecast:
    problem = _problem_of(workload, span, suffixes)
    plan = span.placement
    places, cores = np.array([plan.places]), np.array([plan.cores])
    held = None
    if plan.residency == "pinned":
        held = np.array([[float(s.sram_bytes or 0) for s in plan.shares]])
    found = forecast(problem, places, cores, shares_bytes=held)
    mean_s, miss, tail = found.response_s[0], found.miss[0], _formula_tail(found)
    if queue.discipline != "fcfs" and problem.accelerator is not None and found.stable[0]:
        mean_s, miss, tail = _simulated(workload, problem, plan, queue, held)
    return _Forecast(
        mean_s=mean_s,
        miss=miss,
        cpu_busy=found.cpu_busy[0],
        accelerator_busy=float(found.accelerator_busy[0]),
        stable=bool(found.stable[0]),
        tail=tail,
    )


def _formula_tail(found: Any) -> Callable[[int, float], float]:
    return lambda i, t_s: float(forecast_tail(found, np.array(t_s))[0, i])


def _simulated(
    workload: Workload,
    problem: Problem,
    plan: Placement,
    queue: QueueRule,
    held: Float64 | None,
) -> tuple[Float64, Float64, Callable[[int, float], float]]:
    """Play the plan on a virtual clock: formulas know no queue but first come, first served."""
    length_s = _SIMULATED_REQUESTS / float(problem.rates.sum())
    rng = np.random.default_rng(workload.seed)
    arrivals = [
        instants_s(t.rate, duration_s=length_s, rng=rng) if t.rate.kind == "periodic" else None
        for t in workload.tenants
    ]
    found = simulate(
        problem,
        plan.places,
        plan.cores,
        horizon_s=length_s,
        seed=workload.seed,
        arrivals=arrivals,
        shares_bytes=None if held is None else held[0],
        order=QueueOrder(
            discipline="switch-aware",
            burst=queue.burst,
            threshold=queue.threshold,
            timeout_s=queue.timeout_s,
            within="deadline",
        ),
    )
    waits = [t.response_s for t in found.tenants]
    mean_s = np.array([w.mean() if len(w) else np.nan for w in waits])
    miss = np.array([t.missed.mean() if len(t.missed) else np.nan for t in found.tenants])
    return mean_s, miss, lambda i, t_s: float((waits[i] > t_s).mean()) if len(waits[i]) else 0.0


def _problem_of(
    workload: Workload, span: _Span, suffixes: Mapping[str, tuple[Any, Any]] | None
) -> Problem:
    """The planner's problem at a span's rates, with the cores split as its plan split them."""

    def problem(cpu: CpuMode) -> Problem:
        return workload.problem(
            residency=span.placement.residency,
            rates_per_s=workload.rates_per_s(span.from_s),
            assumptions=Assumptions(cpu=cpu),
            suffixes=suffixes,
        )

    by_mode = {mode: problem(mode) for mode in ("both", "workers", "threads")}
    modes = [
        "workers" if s.workers == s.cores else "threads" if s.workers == 1 else "both"
        for s in span.placement.shares
    ]
    names = ("cpu_s", "cpu_wait_s", "cpu_busy", "cpu_waits", "workers", "cpu_threads")
    arrays: dict[str, Any] = {
        name: np.stack([getattr(by_mode[mode], name)[i] for i, mode in enumerate(modes)])
        for name in names
    }
    return replace(by_mode["both"], **arrays)


def _predicted(
    i: int,
    budget_s: float | None,
    spans: Sequence[_Span],
    forecasts: Sequence[_Forecast],
    own: Sequence[PlayedRequest],
) -> Figures:
    """Each span by the tenant's requests in it; utilisation by its length."""
    counts = [sum(s.from_s <= r.due_s < s.to_s for r in own) for s in spans]
    total = sum(counts)
    if not total:
        return Figures(mean_s=None, p95_s=None, p99_s=None, miss=None, dsr=None, cpu_busy=None)
    used = [(f, n / total) for f, n in zip(forecasts, counts, strict=True) if n]

    def tail(t_s: float) -> float:
        return sum(share * f.tail(i, t_s) for f, share in used)

    mean_s = sum(share * float(f.mean_s[i]) for f, share in used)
    with_prefix = [
        (f.miss[i], n)
        for f, s, n in zip(forecasts, spans, counts, strict=True)
        if n and s.placement.shares[i].place
    ]
    with_suffix = [
        (float(f.cpu_busy[i]), s.length_s)
        for f, s in zip(forecasts, spans, strict=True)
        if s.placement.shares[i].workers
    ]
    return Figures(
        mean_s=mean_s,
        p95_s=_quantile_s(tail, 0.95, mean_s),
        p99_s=_quantile_s(tail, 0.99, mean_s),
        miss=_mean([float(m) for m, _ in with_prefix], [n for _, n in with_prefix]),
        dsr=None if budget_s is None else 1 - tail(budget_s),
        cpu_busy=_mean([b for b, _ in with_suffix], [n for _, n in with_suffix]),
    )


def _quantile_s(tail: Callable[[float], float], q: float, mean_s: float) -> float:
    if not np.isfinite(mean_s):
        return float(mean_s)
    low, high = 0.0, 2 * mean_s / (1 - q)  # Markov: P(R > m / (1 - q)) <= 1 - q
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle) > 1 - q else (low, middle)
    return high


def _mean(values: Sequence[float], weights: Sequence[float]) -> float | None:
    total = sum(weights)
    pairs = zip(values, weights, strict=True)
    return sum(v * w for v, w in pairs) / total if total else None


def _observed(i: int, own: Sequence[PlayedRequest], spans: Sequence[_Span]) -> Figures:
    took = [r.response_s for r in own if r.outcome == "answered"]
    p95_s, p99_s = np.quantile(took, (0.95, 0.99)) if took else (None, None)
    missed = [r.missed for r in own if r.missed is not None]
    judged = [r.met for r in own if r.met is not None]
    spent = [r.cpu_s for r in own if r.cpu_s is not None]
    room_s = sum(s.length_s * s.placement.shares[i].workers for s in spans)
    return Figures(
        mean_s=float(np.mean(took)) if took else None,
        p95_s=None if p95_s is None else float(p95_s),
        p99_s=None if p99_s is None else float(p99_s),
        miss=sum(missed) / len(missed) if missed else None,
        dsr=sum(judged) / len(judged) if judged else None,
        cpu_busy=sum(spent) / room_s if room_s else None,
    )
