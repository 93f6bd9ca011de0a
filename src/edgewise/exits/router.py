"""The latency-aware router: one table, published when costs change, read on the request path.

At each candidate exit, before its head runs, the router looks over all ways to an answer: the later
exits that validation says are better than this one, this one, and later ones whose head is so much
cheaper that they answer sooner. It takes the best whose way fits the time left, at an upper
quantile of what that way costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgewise.errors import ProfileError
from edgewise.exits.policy import ANSWER, LATE, PolicyInputs
from edgewise.predict import CostTable, HorizonMargins
from edgewise.predict.state_costs import STATIC, StateCosts, UnitCosts

Float64 = npt.NDArray[np.float64]

# Two readings of the clock and a decision, on a slow core.
_LEAST_FLOOR_S = 20e-6


@dataclass(frozen=True, slots=True)
class RouterTable:
    """Everything a decision reads, as plain tuples of floats and integers.

    Attributes:
        ways: For each position, ``(need_s, target)`` of each way to an answer, best answer first
            and so cheapest last: upper-quantile seconds from here, and the position whose head
            answers. The target of answering here is the position itself.
        steps: For each position, ``(need_s, stop)`` of each compiled run from here, longest first:
            seconds it needs even under the worst disturbance lately seen, head at its end included.
        ratio: Median of observed over predicted, lately.
        unit_costs: What each unit is predicted to take in the device's present state.
    """

    ways: tuple[tuple[tuple[float, int], ...], ...]
    steps: tuple[tuple[tuple[float, int], ...], ...]
    ratio: float = 1.0
    unit_costs: UnitCosts = STATIC

    def decide(self, position: int, left_s: float) -> int:
        """Say where to run to, or that the answer is due here.

        Args:
            position: Stages finished.
            left_s: Time to the deadline, seconds.

        Returns:
            A position to run to; `ANSWER`; or `LATE` when no way fits.
        """
        for need_s, target in self.ways[position]:
            if need_s <= left_s:
                if target == position:
                    return ANSWER
                for worst_s, stop in self.steps[position]:
                    if stop <= target and worst_s <= left_s:
                        return stop
                return position + 1
        return LATE

    def soonest(self, position: int) -> int:
        """What to do when no way fits: go on if a later exit answers sooner, else `LATE`, here."""
        return LATE if self.ways[position][-1][1] == position else position + 1


class Publisher:
    """Computes tables; what does not change between them is worked out once per state.

    Args:
        inputs: Costs, validated accuracy and compiled runs.
        horizons_s: The horizons of the margins that tables will be made from.
        floor_s: Added to each bound: the timer's and the controller's own share. By default what
            a request was measured to pay beside its units, and at least 20 µs.
        min_stress: A fused run is taken only if this many times its median still fits, however calm
            it has been: inside it no decision can be taken.
        energy_budget_j: What a request may use, joules; exits that are predicted to need more are
            left out wherever another way remains. It holds once energy is predicted.
    """

    def __init__(
        self,
        inputs: PolicyInputs,
        *,
        horizons_s: Sequence[float],
        floor_s: float | None = None,
        min_stress: float = 1.25,
        energy_budget_j: float | None = None,
    ) -> None:
        costs = inputs.costs
        num = costs.num_exits
        total = np.concatenate(([0.0], np.cumsum(costs.stage_s)))
        self._num = num
        self._costs = costs
        self._energy_budget_j = energy_budget_j
        self._segments = sorted(inputs.segments)
        self._floor_s = max(_LEAST_FLOOR_S, costs.overhead_s) if floor_s is None else floor_s
        self._min_stress = min_stress
        self._ways = [(p, k) for p in range(num + 1) for k in _useful_exits(inputs, p)]
        self._runs = sorted(
            ((i, j) for i, j in inputs.segments if j - i > 1), key=lambda run: (run[0], -run[1])
        )
        ways_s = [costs.remaining_s(p, k) for p, k in self._ways]
        runs_s = [costs.segment_s.get((i, j), total[j] - total[i]) for i, j in self._runs]
        self._static_runs_s = np.array(runs_s)
        self._num_bounds = len(ways_s) + num
        self._axis = np.log(np.asarray(horizons_s))
        # Index arrays, so that costs in another state are a few array operations.
        self._way_from = np.array([p for p, _ in self._ways])
        self._way_to = np.array([k for _, k in self._ways])
        self._run_from = np.array([i for i, _ in self._runs], dtype=int)
        self._run_to = np.array([j for _, j in self._runs], dtype=int)
        self._unit_costs = STATIC
        self._affordable = np.ones(len(ways_s), dtype=bool)
        # One array for one interpolation: ways to an answer, heads alone, fused runs.
        self._take_amounts(np.array([*ways_s, *costs.head_s, *runs_s]))

    @property
    def is_repriced(self) -> bool:
        """Whether costs are those of a state, not the static medians."""
        return self._unit_costs is not STATIC

    def _take_amounts(self, amounts_s: Float64) -> None:
        self._amounts_s = np.maximum(amounts_s, 1e-9)
        # Weights of the two horizons around each amount, so that a table is two products.
        logs, eye = np.log(self._amounts_s), np.eye(len(self._axis))
        self._weights = np.stack([np.interp(logs, self._axis, row) for row in eye], axis=1)

    def reprice(self, costs: StateCosts) -> None:
        """Take over what units cost in a new state; tables published from now on hold it.

        A fused run is taken to change as its stages do together.

        Raises:
            ProfileError: The costs are of another number of exits.
        """
        num = self._num
        if len(costs.stage_s) != num or len(costs.head_s) != num:
            raise ProfileError(
                f"expected costs of {num} stages and heads, found {len(costs.stage_s)} and"
                f" {len(costs.head_s)}: they are predicted for another model",
                help="edgewise fit MODEL",
            )
        total = np.concatenate(([0.0], np.cumsum(costs.stage_s)))
        static = np.concatenate(([0.0], np.cumsum(self._costs.stage_s)))
        ways_s = total[self._way_to + 1] - total[self._way_from] + costs.head_s[self._way_to]
        change = (total[self._run_to] - total[self._run_from]) / np.maximum(
            static[self._run_to] - static[self._run_from], 1e-12
        )
        runs_s = self._static_runs_s * change
        self._take_amounts(np.concatenate((ways_s, costs.head_s, runs_s)))
        runs = dict(zip(self._runs, runs_s.tolist(), strict=True))
        stages, heads = costs.stage_s.tolist(), costs.head_s.tolist()
        seconds = {
            f"segment:{i}-{j}": runs[i, j] if j - i > 1 else stages[i] for i, j in self._segments
        } | {f"head:{k}": s for k, s in enumerate(heads)}
        whole_s = float(total[-1] + costs.head_s[-1])
        self._unit_costs = UnitCosts(seconds=seconds, whole_s=whole_s, regime=costs.regime)
        if self._energy_budget_j is not None and costs.stage_j is not None:
            assert costs.head_j is not None  # noqa: S101 - energy comes for both or for none
            # Stages run in order, so what an exit needs does not depend on the way to it.
            need_j = np.cumsum(costs.stage_j) + costs.head_j
            self._affordable = need_j[self._way_to] <= self._energy_budget_j

    def publish(self, margins: HorizonMargins) -> RouterTable:
        """Compute the table for the present residuals; off the request path."""
        # Static costs are of one state only, and so are all windows.
        median, upper, worst = margins.ratios(whole_s=self._unit_costs.whole_s)
        bounds = self._num_bounds
        need = (
            self._amounts_s[:bounds] * (self._weights[:bounds] @ upper) + self._floor_s
        ).tolist()
        heads = need[len(self._ways) :]
        stress = np.maximum(self._weights[bounds:] @ worst, self._min_stress)
        runs = (self._amounts_s[bounds:] * stress).tolist()
        ways: list[list[tuple[float, int]]] = [[] for _ in range(self._num + 1)]
        for need_s, (p, k), fits in zip(need, self._ways, self._affordable.tolist(), strict=False):
            if fits:
                ways[p].append((need_s, k + 1))
        for p, row in enumerate(ways):
            if not row:  # none is affordable: the least energy is the nearest exit's
                n = min((n for n, (q, _) in enumerate(self._ways) if q == p), key=self._nearest)
                row.append((need[n], self._ways[n][1] + 1))
        steps: list[list[tuple[float, int]]] = [[] for _ in range(self._num + 1)]
        for run_s, (start, stop) in zip(runs, self._runs, strict=True):
            steps[start].append((run_s + heads[stop - 1], stop))
        return RouterTable(
            ways=tuple(tuple(row) for row in ways),
            steps=tuple(tuple(row) for row in steps),
            ratio=float(median[-1]),
            unit_costs=self._unit_costs,
        )

    def _nearest(self, way: int) -> int:
        return self._ways[way][1]


def _useful_exits(inputs: PolicyInputs, position: int) -> list[int]:
    """Exits worth answering at from a position, the one just reached among them, best first.

    An exit is left out where a better one costs no more.
    """
    here = [position - 1] if position else []
    better = inputs.better_exits(position)
    others = [k for k in inputs.ranked_exits() if k >= position and k not in better]
    useful: list[int] = []
    least_s = np.inf
    for k in (*better, *here, *others):
        need_s = inputs.costs.remaining_s(position, k)
        if need_s < least_s:
            useful.append(k)
            least_s = need_s
    return useful


def default_horizons_s(costs: CostTable) -> list[float]:
    """Six amounts of work, evenly spaced by ratio, from the smallest stage to the whole network."""
    positive = costs.stage_s[costs.stage_s > 0]
    smallest = float(positive.min()) if positive.size else 1e-6
    whole = max(float(costs.stage_s.sum() + costs.head_s[-1]), smallest * 1.001)
    return [float(v) for v in np.geomspace(smallest, whole, 6)]


def seed_margins(margins: HorizonMargins, costs: CostTable) -> None:
    """Fill a window with the residuals of the profile the costs come from."""
    for row in costs.samples:
        margins.begin_group()
        for predicted_s, observed_s in zip(costs.medians, row, strict=True):
            margins.add(float(predicted_s), float(observed_s))
