"""The latency-aware router: one table, published when costs change, read on the request path.

At each candidate exit, before its head runs, the router looks ahead over all later exits that
validation says are better, deepest first, and goes on when one of them fits the time left with an
upper quantile of what the way there costs. Otherwise it answers here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from edgewise.exits.policy import ANSWER
from edgewise.predict import CostTable, HorizonMargins

INFEASIBLE = -9


@dataclass(frozen=True, slots=True)
class RouterTable:
    """Everything a decision reads, as plain tuples of floats and integers.

    Attributes:
        ahead: For each position, ``(need_s, exit, exit + 1)`` of each better exit not yet passed,
            deepest first: upper-quantile seconds from here to its answer.
        steps: For each position, ``(need_s, stop)`` of each compiled run from here, longest first:
            seconds it needs even under the worst disturbance lately seen, head at its end included.
        here_s: For each position above 0, upper-quantile seconds of the head there.
        ratio: Median of observed over static prediction, lately.
    """

    ahead: tuple[tuple[tuple[float, int, int], ...], ...]
    steps: tuple[tuple[tuple[float, int], ...], ...]
    here_s: tuple[float, ...]
    ratio: float = 1.0

    def decide(self, position: int, left_s: float) -> int:
        """Say where to run to, or that the answer is due here.

        Args:
            position: Stages finished.
            left_s: Time to the deadline, seconds.

        Returns:
            A position to run to; `ANSWER`; or `INFEASIBLE` at position 0 when no exit fits.
        """
        for need_s, _, target in self.ahead[position]:
            if need_s <= left_s:
                for worst_s, stop in self.steps[position]:
                    if stop <= target and worst_s <= left_s:
                        return stop
                return position + 1
        return ANSWER if position else INFEASIBLE

    def fits_here(self, position: int, left_s: float) -> bool:
        """Whether the head at a position still fits."""
        return self.here_s[position] <= left_s


class Publisher:
    """Computes tables; what does not change between them is worked out once.

    Args:
        costs: Static medians.
        best_exits: Exits worth going to, ascending.
        segments: Compiled runs of stages.
        horizons_s: The horizons of the margins that tables will be made from.
        min_stress: A fused run is taken only if this many times its median still fits, however calm
            it has been: inside it no decision can be taken.
    """

    def __init__(
        self,
        costs: CostTable,
        *,
        best_exits: Sequence[int],
        segments: frozenset[tuple[int, int]],
        horizons_s: Sequence[float],
        min_stress: float = 1.25,
    ) -> None:
        num = costs.num_exits
        total = np.concatenate(([0.0], np.cumsum(costs.stage_s)))
        self._num = num
        self._min_stress = min_stress
        self._ways = [(p, k) for p in range(num + 1) for k in reversed(best_exits) if k >= p]
        self._runs = sorted(
            ((i, j) for i, j in segments if j - i > 1), key=lambda run: (run[0], -run[1])
        )
        ways_s = [total[k + 1] - total[p] + costs.head_s[k] for p, k in self._ways]
        runs_s = [costs.segment_s.get((i, j), total[j] - total[i]) for i, j in self._runs]
        # One array for one interpolation: ways to an answer, heads alone, fused runs.
        self._amounts_s = np.maximum([*ways_s, *costs.head_s, *runs_s], 1e-9)
        self._num_bounds = len(ways_s) + num
        logs = np.log(self._amounts_s)
        axis = np.log(np.asarray(horizons_s))
        # Weights of the two horizons around each amount, so that a table is two products.
        self._weights = np.stack([np.interp(logs, axis, row) for row in np.eye(len(axis))], axis=1)

    def publish(self, margins: HorizonMargins) -> RouterTable:
        """Compute the table for the present residuals; off the request path."""
        median, upper, worst = margins.ratios()
        bounds = self._num_bounds
        need = (
            self._amounts_s[:bounds] * (self._weights[:bounds] @ upper) + margins.floor_s
        ).tolist()
        heads = need[len(self._ways) :]
        stress = np.maximum(self._weights[bounds:] @ worst, self._min_stress)
        runs = (self._amounts_s[bounds:] * stress).tolist()
        ahead: list[list[tuple[float, int, int]]] = [[] for _ in range(self._num + 1)]
        for need_s, (p, k) in zip(need, self._ways, strict=False):
            ahead[p].append((need_s, k, k + 1))
        steps: list[list[tuple[float, int]]] = [[] for _ in range(self._num + 1)]
        for run_s, (start, stop) in zip(runs, self._runs, strict=True):
            steps[start].append((run_s + heads[stop - 1], stop))
        return RouterTable(
            ahead=tuple(tuple(row) for row in ahead),
            steps=tuple(tuple(row) for row in steps),
            here_s=(0.0, *heads),
            ratio=float(median[-1]),
        )


def default_horizons_s(costs: CostTable) -> list[float]:
    """Six amounts of work, evenly spaced by ratio, from the smallest stage to the whole network."""
    positive = costs.stage_s[costs.stage_s > 0]
    smallest = float(positive.min()) if positive.size else 1e-6
    whole = max(float(costs.stage_s.sum() + costs.head_s[-1]), smallest * 1.001)
    return [float(v) for v in np.geomspace(smallest, whole, 6)]


def seed_margins(
    margins: HorizonMargins, costs: CostTable, *, keep: Callable[[int], bool] | None = None
) -> None:
    """Fill a window with the residuals of the profile the costs come from."""
    for row in costs.samples:
        for u, (predicted, observed) in enumerate(zip(costs.medians, row, strict=True)):
            if keep is None or keep(u):
                margins.add(float(predicted), float(observed))
