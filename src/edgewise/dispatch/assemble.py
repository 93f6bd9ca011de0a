"""From a decision to a plan: who runs each piece, what that costs, and why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from edgewise.dispatch.plan import DispatchPlan, PhasePlan, Reason, Step
from edgewise.dispatch.problem import (
    Assignment,
    Float64,
    Objective,
    Problem,
    Segment,
    Totals,
    totals,
)
from edgewise.dispatch.residency import Residency, evaluate_residency
from edgewise.errors import ConfigError, ProfileError
from edgewise.profiles.operators import OperatorShape, OperatorTable

if TYPE_CHECKING:
    from edgewise.dispatch.search import Decision

    Choice = Assignment | Decision | Residency


def make_plan(  # noqa: PLR0913 - what a plan says about itself
    phases: Sequence[tuple[Problem, Choice]],
    table: OperatorTable,
    *,
    model: str,
    objective: Objective,
    method: str,
    because: Reason | Sequence[Reason] = "method",
    notes: Mapping[str, str] | None = None,
) -> DispatchPlan:
    """Make a plan of decisions, one for each forward pass.

    Args:
        phases: Problems of one trace each, and what was decided for them. The totals of a
            :class:`~edgewise.dispatch.residency.Residency` count copies by tensor, of all others
            as the paper's replay does, between neighbours.
        table: The costs that they were decided by.
        model: Its name.
        objective: What was made small.
        method: How.
        because: Reason of what would be better elsewhere, even with the switches: the method does
            not look, a guard, or a constraint; one for all passes, or one for each.
        notes: Facts for people.

    Raises:
        ConfigError: No problem, several traces in one, or problems over different backends.
    """
    if not phases or len({problem.backends for problem, _ in phases}) != 1:
        raise ConfigError("a plan is made of at least one problem, all over the same backends")
    reasons = [because] * len(phases) if isinstance(because, str) else because
    return DispatchPlan(
        model=model,
        objective=objective,
        method=method,
        backends=phases[0][0].backends,
        state=table.state,
        device_id=table.device_id,
        thread_policy=table.thread_policy,
        provenance=table.provenance,
        table=table.name,
        phases=tuple(
            make_phase(problem, choice, table, objective=objective, because=reason)
            for (problem, choice), reason in zip(phases, reasons, strict=True)
        ),
        notes=dict(notes or {}),
    )


def make_phase(
    problem: Problem,
    choice: Choice,
    table: OperatorTable,
    *,
    objective: Objective,
    because: Reason = "method",
) -> PhasePlan:
    """Make the plan of one forward pass; see :func:`make_plan`."""
    if len(problem.traces) != 1:
        raise ConfigError(f"a phase is one forward pass, found {len(problem.traces)}")
    assignment = _assignment(problem, choice)
    counted = totals(problem, assignment)
    view = _View(problem, table, objective, counted, because)
    steps = view.steps(assignment)
    predicted_s, predicted_j = counted.latency_s, counted.energy_j
    switches, switch_s = counted.backend_switches, counted.switch_s
    fixed_s = counted.gap_s - view.behind_s(assignment)
    if isinstance(choice, Residency):
        steps = _with_copies(problem, choice, steps)
        predicted_s, predicted_j = choice.latency_s, choice.energy_j
        switches, switch_s, fixed_s = len(choice.copies), choice.copy_s, choice.fixed_s
    statics = static_costs(problem, table, by_tensor=isinstance(choice, Residency))
    scores = {name: _score(objective, s, j) for name, (s, j) in statics.items()}
    best = min(scores, key=scores.__getitem__, default="")
    trace = problem.traces[0]
    return PhasePlan(
        phase=trace.phase,
        length=trace.length,
        past=trace.past,
        steps=steps,
        predicted_s=predicted_s,
        predicted_j=predicted_j,
        best_static=best,
        best_static_s=statics[best][0] if best else math.inf,
        switches=switches,
        switch_s=switch_s,
        fixed_s=fixed_s,
        static_s={name: s for name, (s, _) in statics.items()},
        static_j={name: j for name, (_, j) in statics.items() if j is not None},
    )


def static_costs(
    problem: Problem, table: OperatorTable, *, by_tensor: bool = False
) -> dict[str, tuple[float, float | None]]:
    """Seconds and joules of each backend alone, one operator at a time.

    Args:
        problem: Of one trace where copies are counted by tensor.
        table: Costs.
        by_tensor: Count tensors that go to the operators that stay on torch, and back.

    Returns:
        By backend; without those that cannot run everything.
    """
    found: dict[str, tuple[float, float | None]] = {}
    for number, name in enumerate(problem.backends):
        if not np.isfinite(problem.op_s[:, number]).all():
            continue
        if by_tensor:
            counted = evaluate_residency(problem.traces[0], table, [name] * problem.num_operators)
            found[name] = counted.latency_s, counted.energy_j
        else:
            backend = np.full(problem.num_operators, number, dtype=np.int64)
            alone = totals(problem, Assignment(backend=backend))
            found[name] = alone.latency_s, alone.energy_j
    return found


def _score(objective: Objective, seconds: float, joules: float | None) -> float:
    if objective == "latency":
        return seconds
    if joules is None:
        raise ProfileError(f"the objective {objective!r} needs energy, which was not measured")
    return joules if objective == "energy" else joules * seconds


def _assignment(problem: Problem, choice: Choice) -> Assignment:
    if isinstance(choice, Assignment):
        return choice
    if isinstance(choice, Residency):
        numbers = [problem.backends.index(name) for name in choice.backends]
        return Assignment(backend=np.array(numbers, dtype=np.int64))
    return choice.assignment


def _with_copies(problem: Problem, found: Residency, steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Put what is copied for each operator in place of the switch between neighbours."""
    paid: dict[int, float] = {}
    for copy in found.copies:
        paid[copy.before] = paid.get(copy.before, 0.0) + copy.copy_s
    places = [i for i, node in enumerate(problem.traces[0].nodes) if node.supported]
    return tuple(
        replace(step, switch_s=paid.get(place, 0.0))
        for step, place in zip(steps, places, strict=True)
    )


def _finite(seconds: float) -> float | None:
    return float(seconds) if np.isfinite(seconds) else None


@dataclass(frozen=True, slots=True, eq=False)
class _View:
    """A problem seen from one solution: what each piece would cost elsewhere."""

    problem: Problem
    table: OperatorTable
    objective: Objective
    counted: Totals
    because: Reason

    def value(self, seconds: Float64, joules: Float64 | None) -> Float64:
        """What is to be small, of one piece. EDP is linearised where the solution is.

        Source:
            d(E L) = L dE + E dL.
        """
        if self.objective == "latency" or joules is None:
            return seconds
        if self.objective == "energy":
            return joules
        energy_j = self.counted.energy_j or 0.0
        with np.errstate(invalid="ignore"):
            value: Float64 = energy_j * seconds + self.counted.latency_s * joules
        return np.where(np.isfinite(seconds), value, np.inf)

    def steps(self, assignment: Assignment) -> tuple[Step, ...]:
        p = self.problem
        segments = {p.segments[i].start: p.segments[i] for i in assignment.segments}
        found, start = [], 0
        while start < p.num_operators:
            segment = segments.get(start)
            stop = start + 1 if segment is None else segment.stop
            found.append(self.step(assignment, start, stop, segment))
            start = stop
        return tuple(found)

    def step(self, assignment: Assignment, start: int, stop: int, segment: Segment | None) -> Step:
        p, b = self.problem, int(assignment.backend[start])
        seconds, joules = self.alone(start, stop, segment)
        value = self.value(seconds, joules)
        elsewhere = [i for i in range(len(p.backends)) if i != b and np.isfinite(value[i])]
        other = min(elsewhere, key=lambda i: value[i], default=None)
        parts = self.parts(segment) if segment is not None else (p.shapes[start],)
        singly_s, _ = self.singly(start, stop)
        before = int(assignment.backend[start - 1]) if start else b
        name, kind = p.names[start], p.shapes[start].kind
        if segment is not None:
            trace, candidate = segment.candidate
            name = p.traces[trace].candidates[candidate].name
            kind = p.traces[trace].candidates[candidate].kind
        tie = other is not None and self.tie(start, stop, segment, b, other)
        return Step(
            name=name,
            kind=kind,
            backend=p.backends[b],
            covers=p.names[start:stop],
            shapes=tuple(part.key for part in parts),
            predicted_s=float(sum(self.seconds(part, b) for part in parts)),
            switch_s=float(p.switch_s[start, before, b]),
            predicted_j=None if joules is None else float(joules[b]),
            best_other=None if other is None else p.backends[other],
            margin_s=None if other is None else float(seconds[other] - seconds[b]),
            margin_j=None if other is None or joules is None else float(joules[other] - joules[b]),
            one_by_one_s=None if segment is None else _finite(singly_s.min()),
            tie=tie,
            reason=self.reason(
                assignment, (start, stop), value, other, is_segment=segment is not None, tie=tie
            ),
        )

    def reason(  # noqa: PLR0913
        self,
        assignment: Assignment,
        span: tuple[int, int],
        value: Float64,
        other: int | None,
        *,
        is_segment: bool,
        tie: bool,
    ) -> Reason:
        """Why a piece is where it is."""
        b = int(assignment.backend[span[0]])
        if other is None:
            return "only one"
        if value[other] >= value[b]:
            return "tie" if tie else "segment" if is_segment else "cheapest"
        if value[other] + self.switching(assignment, span, other) >= value[b] + self.switching(
            assignment, span, b
        ):
            return "saves a switch"
        return "tie" if tie else self.because

    def switching(self, assignment: Assignment, span: tuple[int, int], backend: int) -> float:
        """Of going to a piece and on from it, were it on that backend."""
        p = self.problem
        cost = 0.0
        for t, source, target in (
            (span[0], assignment.backend[max(span[0] - 1, 0)], backend),
            (span[1], backend, assignment.backend[min(span[1], p.num_operators - 1)]),
        ):
            if 0 < t < p.num_operators:
                joules = None if p.switch_j is None else p.switch_j[t, source, target]
                cost += float(self.value(p.switch_s[t, source, target], joules))
        return cost

    def alone(
        self, start: int, stop: int, segment: Segment | None
    ) -> tuple[Float64, Float64 | None]:
        """[B] seconds and joules of a piece on each backend, by the cheaper way there is."""
        singly_s, singly_j = self.singly(start, stop)
        if segment is None:
            return singly_s, singly_j
        if segment.cost_j is None or singly_j is None:
            return np.minimum(segment.cost_s, singly_s), None
        better = self.value(segment.cost_s, segment.cost_j) <= self.value(singly_s, singly_j)
        return (
            np.where(better, segment.cost_s, singly_s),
            np.where(better, segment.cost_j, singly_j),
        )

    def singly(self, start: int, stop: int) -> tuple[Float64, Float64 | None]:
        """[B] of operators one by one, with what stays on torch between them."""
        p = self.problem
        gap = slice(start + 1, stop)
        seconds = p.op_s[start:stop].sum(axis=0) + p.gap_s[gap].sum()
        if p.op_j is None or p.gap_j is None:
            return seconds, None
        return seconds, p.op_j[start:stop].sum(axis=0) + p.gap_j[gap].sum()

    def parts(self, segment: Segment) -> tuple[OperatorShape, ...]:
        trace, candidate = segment.candidate
        return self.problem.traces[trace].candidates[candidate].parts

    def behind_s(self, assignment: Assignment) -> float:
        """What segments compute of the gaps behind them, which are counted as open."""
        found = 0.0
        for segment in (self.problem.segments[number] for number in assignment.segments):
            b = int(assignment.backend[segment.start])
            whole_s = sum(self.seconds(part, b) for part in self.parts(segment))
            found += whole_s - float(segment.cost_s[b])
        return found

    def seconds(self, shape: OperatorShape, backend: int) -> float:
        latency = self.table.cost(shape, self.problem.backends[backend]).latency
        return math.inf if latency is None else latency.median_s

    def tie(self, start: int, stop: int, segment: Segment | None, b: int, other: int) -> bool:
        """Whether the intervals of a piece on two backends overlap."""
        p = self.problem
        ops = p.shapes[start:stop]
        own = self.interval(ops if segment is None else self.parts(segment), b)
        ways = [ops] if segment is None else [ops, self.parts(segment)]
        for shapes in ways:
            there = self.interval(shapes, other)
            if shapes is ops and there is not None:
                gap_s = float(p.gap_s[start + 1 : stop].sum()) * (self.objective != "energy")
                there = there[0] + gap_s, there[1] + gap_s
            if own and there and own[0] <= there[1] and there[0] <= own[1]:
                return True
        return False

    def interval(self, shapes: Sequence[OperatorShape], backend: int) -> tuple[float, float] | None:
        """Sum of the ends; ``None`` where one is not known."""
        low = high = 0.0
        for shape in shapes:
            row = self.table.costs.get((shape, self.problem.backends[backend]))
            if row is None or row.latency is None:
                return None
            ends: tuple[float | None, float | None]
            ends = row.latency.median_low_s, row.latency.median_high_s
            if self.objective == "energy":
                ends = row.energy.low_j, row.energy.high_j
            if ends[0] is None or ends[1] is None:
                return None
            low, high = low + ends[0], high + ends[1]
        return low, high
