"""Plans anew when rates change or the accelerator comes and goes, and moves only where it pays."""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from edgewise.errors import ConfigError, EdgeError
from edgewise.placement.plan import Placement, make_placement
from edgewise.placement.problem import Problem
from edgewise.placement.search import plan as search_plan
from edgewise.runtime.tenants.checks import why
from edgewise.runtime.tenants.engine import TenantEngine
from edgewise.runtime.tenants.records import PlanChange
from edgewise.runtime.tenants.watch import EngineSnapshot
from edgewise.units import format_duration

PlanSearch = Callable[..., Placement]
_log = logging.getLogger(__name__)

_LEAST_PER_S = 1e-2  # of a tenant that is not asked any more: a plan needs a rate
_EMA = 0.3
_SETTLE_S = 0.5  # after a change is drained, what it did to responses may still show


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplanDecision:
    """One look that led to a search.

    Attributes:
        at_s: On the engine's clock.
        rates_per_s: By tenant, what was planned for.
        decision_s: How long the search took, on the engine's clock.
        present_s: Mean response that the present plan is predicted to give under these rates,
            seconds; infinite where a queue is unstable.
        best_s: The same of the plan found; ``None`` where none was.
        gain_s: What moving is worth: request-seconds saved over the horizon.
        cost_s: What moving is taken to cost: request-seconds, learned from past changes.
        placement: The plan found; ``None`` where none was.
        change: What was carried out; ``None`` where the plan stays.
        reason: Why, for people.
    """

    at_s: float
    rates_per_s: Mapping[str, float]
    decision_s: float
    present_s: float
    best_s: float | None
    gain_s: float
    cost_s: float
    placement: Placement | None
    change: PlanChange | None
    reason: str

    @property
    def moved(self) -> bool:
        """Whether the plan changed."""
        return self.change is not None


class SwitchingCost:
    """What a change of plan costs, learned from those that were made.

    A change's harm is what requests answered while it went on took longer than those before,
    summed, and at least what their 99 % quantile rose by: one request's worth of tail. Harm and the
    time of warming are averaged exponentially.

    Args:
        first_s: Request-seconds, until a change has been seen.
    """

    def __init__(self, first_s: float) -> None:
        self.harm_s = first_s
        self.warming_s: float | None = None
        self.seen = 0

    def learn(self, engine: TenantEngine, change: PlanChange) -> None:
        """Take a drained change into account."""
        end_s = (change.drained_s or change.routed_s) + _SETTLE_S
        during = engine.responses(change.began_s, end_s)
        before = engine.responses(change.began_s - max(end_s - change.began_s, 1.0), change.began_s)
        if not (during.size and before.size):
            return
        sums = float(np.maximum(during - before.mean(), 0.0).sum())
        usual = float(np.maximum(before - before.mean(), 0.0).mean()) * during.size
        tail = float(np.quantile(during, 0.99) - np.quantile(before, 0.99))
        self._add(max(sums - usual, tail, 0.0), change.routed_s - change.began_s)

    def _add(self, harm_s: float, warming_s: float) -> None:
        weight = 1.0 if self.seen == 0 else _EMA
        self.harm_s += weight * (harm_s - self.harm_s)
        before_s = warming_s if self.warming_s is None else self.warming_s
        self.warming_s = before_s + weight * (warming_s - before_s)
        self.seen += 1


class Replanner:
    """Keeps an engine's plan in step with its rates.

    It searches where a tenant's rate has changed, or has drifted by ``drift_ratio`` from what the
    plan was made for, and where the accelerator was lost or came back. It moves where the predicted
    gain over the horizon, for which rates have lately stayed the same, exceeds the cost of
    switching, where the gain is at least ``least_gain_ratio`` of the mean response, and
    ``hold_s`` after the last change. Going back to a plan that was just left costs twice as much
    each time within a horizon. An unstable plan is left at once for a stable one. A plan that
    is infeasible, unstable or cannot be loaded is not taken, and the decision says so.

    Args:
        engine: Whose plan it is.
        problem: What the first plan was made for; its rates are replaced.
        period_s: Between looks.
        plan: The search: ``plan(problem, method=...)``.
        method: Of the search.
        horizon_s: How long rates stay the same, until changes have been seen.
        hold_s: The least time between two changes.
        least_gain_ratio: Of the mean response.
        drift_ratio: Of a rate, either way.
        first_cost_s: Request-seconds of a change, until one has been seen.
    """

    def __init__(  # noqa: PLR0913 - each is one knob
        self,
        engine: TenantEngine,
        problem: Problem,
        *,
        period_s: float = 1.0,
        plan: PlanSearch = search_plan,
        method: str = "best",
        horizon_s: float = 60.0,
        hold_s: float = 5.0,
        least_gain_ratio: float = 0.05,
        drift_ratio: float = 1.25,
        first_cost_s: float = 1.0,
    ) -> None:
        if not (period_s > 0 and horizon_s > 0 and hold_s >= 0 and drift_ratio > 1):
            raise ConfigError(
                "expected a period and a horizon above zero, a hold of zero or more and a drift"
                f" above 1, found {period_s!r}, {horizon_s!r}, {hold_s!r} and {drift_ratio!r}"
            )
        self.cost = SwitchingCost(first_cost_s)
        self._engine, self._problem = engine, problem
        self._period_s, self._search, self._method = period_s, plan, method
        self._horizon_s, self._hold_s = horizon_s, hold_s
        self._least_gain_ratio, self._drift_ratio = least_gain_ratio, drift_ratio
        self._planned = {t.name: t.rate_per_s for t in problem.tenants}
        self._was_lost = ""
        self._changed_s: float | None = None
        self._learned: set[int] = {c.number for c in engine.changes}
        self._failed: dict[tuple[Any, ...], float] = {}  # plan: when it failed
        self._is_pending = False
        self._left: dict[tuple[Any, ...], tuple[float, int]] = {}  # plan: when left, how often
        self._decisions: deque[ReplanDecision] = deque(maxlen=1000)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def decisions(self) -> tuple[ReplanDecision, ...]:
        """Every look that led to a search; the last thousand."""
        return tuple(self._decisions)

    def start(self) -> None:
        """Look every period, on a thread of its own."""
        if self._thread is None:
            self._stop.clear()
            self._thread = threading.Thread(
                target=self._work, name="edgewise-replanner", daemon=True
            )
            self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stop looking; a change that goes on is waited for, up to ``timeout_s``."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
            self._thread = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def step(self) -> ReplanDecision | None:
        """Look once.

        Returns:
            The decision; ``None`` where nothing has changed.
        """
        self._learn()
        now = self._engine.snapshot()
        rates = {
            t.tenant: self._planned[t.tenant]
            if t.rate_per_s is None
            else max(t.rate_per_s, _LEAST_PER_S)
            for t in now.tenants
        }
        changed = any(t.rate_changed for t in now.tenants)
        if changed:
            self._note_change(now.at_s)
        device_changed = now.lost != self._was_lost
        if not (changed or device_changed or self._is_pending or self._has_drifted(rates)):
            return None
        self._was_lost = now.lost
        decision = self._decide(now, rates)
        self._decisions.append(decision)
        return decision

    def _work(self) -> None:
        while not self._stop.wait(self._period_s):
            try:
                self.step()
            except Exception:  # noqa: BLE001 - the plan in force goes on; the next look may do
                _log.exception("planning anew failed; the plan stays")

    def _learn(self) -> None:
        now_s = self._engine.clock.now_s()
        for change in self._engine.changes:
            if change.number in self._learned or change.drained_s is None:
                continue
            if now_s >= change.drained_s + _SETTLE_S:
                self._learned.add(change.number)
                self.cost.learn(self._engine, change)

    def _note_change(self, now_s: float) -> None:
        if self._changed_s is not None:
            lasted_s = max(now_s - self._changed_s, self._period_s)
            self._horizon_s += _EMA * (lasted_s - self._horizon_s)
        self._changed_s = now_s

    def _has_drifted(self, rates: Mapping[str, float]) -> bool:
        limit = math.log(self._drift_ratio)
        return any(
            abs(math.log(rate / max(self._planned[name], _LEAST_PER_S))) > limit
            for name, rate in rates.items()
        )

    def _decide(self, now: EngineSnapshot, rates: Mapping[str, float]) -> ReplanDecision:
        problem = self._problem_now(rates, lost=now.lost)
        start_s = self._engine.clock.now_s()
        present = self._present(problem)
        found, reason = None, ""
        try:
            found = self._search(problem, method=self._method)
        except EdgeError as error:  # Infeasible among them
            reason = f"kept: no plan was found: {why(error)}"
        decision_s = self._engine.clock.now_s() - start_s
        total = sum(rates.values())
        decision = ReplanDecision(
            at_s=now.at_s,
            rates_per_s=dict(rates),
            decision_s=decision_s,
            present_s=_mean_s(present),
            best_s=None if found is None else _mean_s(found),
            gain_s=0.0 if found is None else self._gain_s(present, found, total),
            cost_s=self._cost_s(found, now.at_s),
            placement=found,
            change=None,
            reason=reason,
        )
        if found is None:
            # Asked again when rates move on; the alarm has been heard.
            self._settle(rates)
            return decision
        against = self._against(decision, present, found, now.at_s)
        self._is_pending = against == _LATER
        if self._is_pending:
            return replace(decision, reason=f"kept: {against}")
        self._settle(rates)
        if against:
            return replace(decision, reason=f"kept: {against}")
        return self._move(decision, found, now.at_s)

    def _move(self, decision: ReplanDecision, found: Placement, now_s: float) -> ReplanDecision:
        reason = f"predicted {_said(decision.present_s)} now, {_said(decision.best_s)} then"
        left = _identity(self._engine.placement)
        try:
            change = self._engine.apply(found, reason=reason)
        except EdgeError as error:
            self._failed[_identity(found)] = now_s
            _log.warning("the plan stays: %s", error.message)
            return replace(decision, reason=f"kept: the new plan failed: {why(error)}")
        self._left[left] = (now_s, self._left.get(left, (0.0, 0))[1] + 1)
        return replace(decision, change=change, reason=reason)

    def _settle(self, rates: Mapping[str, float]) -> None:
        """These rates have been planned for, whether or not that led to a move."""
        self._planned = dict(rates)
        self._engine.acknowledge_rates()

    def _against(
        self, decision: ReplanDecision, present: Placement | None, found: Placement, now_s: float
    ) -> str:
        """Why not to move; ``""`` for a reason to."""
        if _identity(found) == _identity(self._engine.placement):
            return "the present plan is the best one"
        if now_s - self._failed.get(_identity(found), -math.inf) < self._horizon_s:
            return "that plan failed to load a moment ago"
        if not found.stable:
            return "the best plan found is unstable"
        if present is None or not present.stable:
            return ""
        return self._too_little(decision, present, found) or (
            _LATER if now_s - self._engine.changes[-1].routed_s < self._hold_s else ""
        )

    def _too_little(self, decision: ReplanDecision, present: Placement, found: Placement) -> str:
        ratio = _gain_ratio(present, found)
        if ratio < self._least_gain_ratio:
            return f"the gain is {ratio:.1%}, less than {self._least_gain_ratio:.0%}"
        if decision.gain_s <= decision.cost_s:
            gain, cost = decision.gain_s, decision.cost_s
            return f"moving gains {gain:.3g} request-seconds and costs {cost:.3g}"
        return ""

    def _problem_now(self, rates: Mapping[str, float], *, lost: str) -> Problem:
        problem = self._problem.with_rates([rates[t.name] for t in self._problem.tenants])
        if not lost or problem.accelerator is None:
            return problem
        return Problem.of(
            problem.tenants,
            None,
            cores=problem.cores,
            objective=problem.objective,
            assumptions=problem.assumptions,
        )

    def _present(self, problem: Problem) -> Placement | None:
        """The plan in force under the rates as they are; ``None`` where it cannot be judged."""
        placement = self._engine.placement
        shares = {s.tenant: s for s in placement.shares}
        ordered = [shares[t.name] for t in problem.tenants]
        if any(s.place > last for s, last in zip(ordered, problem.last, strict=True)):
            return None  # it has prefixes, and the device is away
        pinned = placement.residency == problem.residency == "pinned"
        return make_placement(
            problem,
            [s.place for s in ordered],
            [s.cores for s in ordered],
            shares_bytes=[s.sram_bytes or 0 for s in ordered] if pinned else None,
            method="present",
        )

    def _gain_s(self, present: Placement | None, found: Placement, rate_per_s: float) -> float:
        if not found.stable:
            return 0.0
        if present is None or not present.stable:
            return math.inf
        # For the objective "mean" this is the time saved; others are taken to be worth as much.
        saved_s = _gain_ratio(present, found) * _mean_s(present)
        return saved_s * rate_per_s * self._horizon_s

    def _cost_s(self, found: Placement | None, now_s: float) -> float:
        """Harm of a change, doubled for each time that plan was left within a horizon."""
        left_s, times = self._left.get(_identity(found), (-math.inf, 0)) if found else (0.0, 0)
        if now_s - left_s > self._horizon_s:
            times = 0
        return self.cost.harm_s * 2.0**times


_LATER = "the last change is too recent"


def _identity(placement: Placement) -> tuple[Any, ...]:
    return (
        placement.residency,
        *sorted((s.tenant, s.place, s.workers, s.threads, s.sram_bytes) for s in placement.shares),
    )


def _mean_s(placement: Placement | None) -> float:
    """Mean response over all requests."""
    if placement is None:
        return math.inf
    rates = np.array([p.rate_per_s for p in placement.predicted])
    return float(np.array([p.response_s for p in placement.predicted]) @ rates / rates.sum())


def _gain_ratio(present: Placement, found: Placement) -> float:
    """Share of the objective that moving saves; both are stable."""
    return 1 - found.score / present.score if present.score > 0 else 0.0


def _said(seconds: float | None) -> str:
    return "overload" if seconds is None or math.isinf(seconds) else format_duration(seconds)
