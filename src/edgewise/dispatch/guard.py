"""Never lose to the best single backend: a plan is kept only if its gain outlives the errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from edgewise.dispatch.problem import Float64, Objective, Problem, Segment, totals
from edgewise.dispatch.search import Decision, best_static, decide
from edgewise.errors import Infeasible
from edgewise.profiles.operators import OperatorShape, OperatorTable

DRAWS = 200
DECIDED_AGAIN = 16
_WIDTH = 2 * 1.959964  # of a 95 % interval, in standard deviations


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Guarded:
    """A plan, or the best single backend in its place.

    Attributes:
        decision: What to use.
        kept: Whether that is the plan.
        static: The best single backend; ``None`` where none can run all operators.
        gain_ratio: Share of the objective that the plan saves over it, as measured, less
            ``optimism_ratio``; ``None`` where there is none to compare with.
        low_ratio: Lower end of its 95 % interval.
        high_ratio: Upper end.
        optimism_ratio: By how much a plan looks better on the costs that it was made with than it
            is: what is cheapest by chance is chosen for it.
        reason: Why, in words.
    """

    decision: Decision
    kept: bool
    static: Decision | None
    gain_ratio: float | None
    low_ratio: float | None
    high_ratio: float | None
    optimism_ratio: float
    reason: str


def guard(  # noqa: PLR0913 - what the bootstrap is made of
    problem: Problem,
    decision: Decision,
    table: OperatorTable,
    *,
    objective: Objective,
    again: Callable[[Problem], Decision] | None = None,
    draws: int = DRAWS,
    seed: int = 0,
) -> Guarded:
    """Keep a plan where it surely beats the best single backend, else take that.

    Costs are drawn anew from their intervals, once for all operators of one shape on one backend:
    an error of a shape's cost hits each of its layers. Operators that are not dispatched are taken
    as exact: nearly all of them are the same in both.

    Args:
        problem: What was decided.
        decision: The plan.
        table: Whose intervals tell how far off its costs may be.
        objective: What the plan makes small.
        again: How the plan was made, for other costs; by ``decision.method`` without limits by
            default.
        draws: Of costs.
        seed: Of the draws.

    Returns:
        With the gain's interval. Where no cost has one, the plan is kept if it gains at all.

    Raises:
        ProfileError: The objective needs energy, which is not known.

    Source:
        B. Efron, Estimating the error rate of a prediction rule, JASA 78 (1983): what a rule gains
        on a sample that it was made with, less what it gains on the data that the sample is from,
        is its optimism.
    """
    try:
        static = best_static(problem, objective)
    except Infeasible:
        return Guarded(
            decision=decision,
            kept=True,
            static=None,
            gain_ratio=None,
            low_ratio=None,
            high_ratio=None,
            optimism_ratio=0.0,
            reason="no single backend can run all operators",
        )
    redo = again or (lambda other: decide(other, objective=objective, method=decision.method))

    def gain(where: Problem, plan: Decision) -> float:
        spent = totals(where, plan.assignment).of(objective)
        return 1 - spent / totals(where, static.assignment).of(objective)

    seen = gain(problem, decision)
    spread = _Spread(problem, table)
    optimism, low, high = 0.0, seen, seen
    if seen > 0 and spread.known and draws:
        rng = np.random.default_rng(seed)
        others = [spread.draw(rng) for _ in range(draws)]
        chosen = [(other, redo(other)) for other in others[:DECIDED_AGAIN]]
        optimism = max(0.0, float(np.mean([gain(o, p) - gain(problem, p) for o, p in chosen])))
        low, high = np.quantile([gain(o, decision) for o in others], [0.025, 0.975]) - optimism
    kept = bool(low > 0)
    return Guarded(
        decision=decision if kept else static,
        kept=kept,
        static=static,
        gain_ratio=seen - optimism,
        low_ratio=float(low),
        high_ratio=float(high),
        optimism_ratio=optimism,
        reason=_reason(static.method, seen, float(low), optimism, known=spread.known),
    )


def _reason(static: str, seen: float, low: float, optimism: float, *, known: bool) -> str:
    if seen == 0:
        return f"the plan is no better than {static}"
    if seen < 0:
        return f"the plan is predicted to cost {-seen:.2%} more than {static}"
    if not known:
        return f"the plan saves {seen:.2%} over {static}; how sure that is was not measured"
    surely = f"of {seen:.2%} that the plan saves over {static}, {optimism:.2%} is luck of the draw"
    if low > 0:
        return f"{surely}, and {low:.2%} is left at the lower end of the 95 % interval"
    return f"{surely}, and the 95 % interval of the rest reaches down to {low:.2%}"


class _Spread:
    """How far off the costs of a problem may be: factors with a lognormal law, one for each row."""

    def __init__(self, problem: Problem, table: OperatorTable) -> None:
        self.problem, names = problem, problem.backends
        self.parts = [
            problem.traces[trace].candidates[candidate].parts
            for trace, candidate in (segment.candidate for segment in problem.segments)
        ]
        shapes = dict.fromkeys([*problem.shapes, *(part for each in self.parts for part in each)])
        self.number = {shape: i for i, shape in enumerate(shapes)}
        self.at = np.array([self.number[shape] for shape in problem.shapes])
        self.sigma = np.zeros((2, len(shapes), len(names)))  # of seconds, and of joules
        self.cost = np.zeros_like(self.sigma)
        for shape, i in self.number.items():
            for b, name in enumerate(names):
                found = table.costs.get((shape, name))
                if found is not None and found.usable and found.latency is not None:
                    latency, energy = found.latency, found.energy
                    self.cost[:, i, b] = latency.median_s, energy.energy_j or 0.0
                    self.sigma[0, i, b] = log_deviation(latency.median_low_s, latency.median_high_s)
                    self.sigma[1, i, b] = log_deviation(energy.low_j, energy.high_j)
        self.between = np.array(
            [[0.0 if a == b else log_deviation(*_ends(table, a, b)) for b in names] for a in names]
        )
        self.known = bool(self.sigma.any() or self.between.any())

    def draw(self, rng: np.random.Generator) -> Problem:
        """The same problem with other costs."""
        p = self.problem
        factor = np.exp(self.sigma * rng.standard_normal(self.sigma.shape))
        between = np.exp(self.between * rng.standard_normal(self.between.shape))
        extra = (factor - 1) * self.cost
        shift: dict[Sequence[OperatorShape], Float64] = {
            parts: extra[:, [self.number[part] for part in parts]].sum(axis=1)
            for parts in dict.fromkeys(self.parts)
        }
        return replace(
            p,
            op_s=p.op_s * factor[0, self.at],
            op_j=None if p.op_j is None else p.op_j * factor[1, self.at],
            switch_s=p.switch_s * between,
            switch_j=None if p.switch_j is None else p.switch_j * between,
            segments=tuple(
                _shifted(segment, shift[parts])
                for segment, parts in zip(p.segments, self.parts, strict=True)
            ),
        )


def _shifted(segment: Segment, by: Float64) -> Segment:
    joules = None if segment.cost_j is None else segment.cost_j + by[1]
    return replace(segment, cost_s=segment.cost_s + by[0], cost_j=joules)


def _ends(table: OperatorTable, source: str, target: str) -> tuple[float | None, float | None]:
    return table.switch(source, target).interval_s or (None, None)


def log_deviation(low: float | None, high: float | None) -> float:
    """Standard deviation of the logarithm, from a 95 % interval; 0 where there is none."""
    if low is None or high is None or not 0 < low < high:
        return 0.0
    return math.log(high / low) / _WIDTH
