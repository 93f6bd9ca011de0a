"""The router with a quality signal: leaves early when an answer is sure, to save energy.

A look costs a head's time and energy. So it is taken only at exits where validation data say that
it pays, and only while the way that the router has chosen still fits the deadline with it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edgewise.errors import ConfigError
from edgewise.exits.policies.edgewise import Edgewise
from edgewise.exits.policies.edgewise import make as make_edgewise
from edgewise.exits.policy import ANSWER, LOOK, Float32, Policy, PolicyInputs, Step
from edgewise.exits.thresholds import Exits, Float64, confidences, need_validation, temperatures_of
from edgewise.predict.state_costs import StateCosts, UnitCosts
from edgewise.scores import top1_confidence

_THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99, 0.999)
_MOST_SAMPLES = 2000


def make(
    inputs: PolicyInputs,
    *,
    save: str = "energy",
    accuracy_loss: float = 0.005,
    **options: Any,
) -> EdgewiseSaving:
    """Make the router and what it saves with.

    Args:
        inputs: Costs, validated accuracy, temperatures and validation logits.
        save: What for; ``"energy"`` is all there is. Work is taken as its measure, as time in the
            cost table: a meter is not needed.
        accuracy_loss: Accuracy that leaving early may cost against the exit that the router has
            chosen, a share of validation samples.
        options: Those of policy ``edgewise``.

    Raises:
        ConfigError: An argument is out of its range, or there are no validation logits.
    """
    router = make_edgewise(inputs, **options)
    assert isinstance(router, Edgewise)  # noqa: S101 - without `save` it is the router itself
    return add_saving(router, inputs, save=save, accuracy_loss=accuracy_loss)


def add_saving(
    router: Edgewise, inputs: PolicyInputs, *, save: str = "energy", accuracy_loss: float = 0.005
) -> EdgewiseSaving:
    """Give a router the quality signal; arguments and errors as for `make`."""
    if save != "energy":
        raise ConfigError(f"cannot save {save!r}", help='save="energy" is what there is')
    if not 0.0 <= accuracy_loss <= 1.0:
        raise ConfigError(f"expected an accuracy loss from 0 to 1, found {accuracy_loss!r}")
    need_validation(inputs, "edgewise with save='energy'")
    threshold, looks = plan_looks(inputs, accuracy_loss=accuracy_loss)
    return EdgewiseSaving(router, inputs, threshold=threshold, looks=looks)


class EdgewiseSaving(Policy):
    """Asks the router first; looks where it pays and the deadline keeps fitting.

    The router's bound for its way counts single stages, so stopping at an exit that a fused run
    would have passed is covered by it; the look is added to that bound.

    Attributes:
        router: Decides on time, and learns.
        threshold: Probability at which an answer is taken.
        looks: For each exit that the router may aim at, the exits to look at on the way.
    """

    name = "edgewise_saving"

    def __init__(
        self,
        router: Edgewise,
        inputs: PolicyInputs,
        *,
        threshold: float,
        looks: Sequence[Sequence[int]],
    ) -> None:
        self.router = router
        self.threshold = threshold
        self.looks = tuple(tuple(row) for row in looks)
        self._temperatures = temperatures_of(inputs)
        num = inputs.num_exits
        # [target position][position]: whether to look here, and where to stop next.
        self._here = [[p - 1 in self._looks_to(t) for p in range(num + 1)] for t in range(num + 1)]
        self._stop = [
            [
                min((k + 1 for k in self._looks_to(t) if k + 1 > p), default=t)
                for p in range(num + 1)
            ]
            for t in range(num + 1)
        ]

        self._sure = False

    def begin(self) -> Policy:
        """A copy that knows whether its request ended because an answer was sure."""
        return copy.copy(self)

    def _looks_to(self, target: int) -> tuple[int, ...]:
        return self.looks[target - 1] if target else ()

    def decide(self, position: int, now_s: float, start_s: float, deadline_s: float) -> int:
        """As the router says, with a look where it pays and fits."""
        table = self.router.table
        left_s = deadline_s - now_s
        ways = table.ways[position]
        fitting = next((way for way in ways if way[0] <= left_s), None)
        if fitting is None:
            return self.router.decide(position, now_s, start_s, deadline_s)
        need_s, target = fitting
        if target == position:
            return ANSWER
        if self._here[target][position]:
            head_s, cheapest = ways[-1]
            # The cheapest way is to answer here, unless this head is so dear that no look pays.
            if cheapest == position and need_s + head_s <= left_s:
                return LOOK
        limit = self._stop[target][position]
        for worst_s, stop in table.steps[position]:
            if stop <= limit and worst_s <= left_s:
                return stop
        return position + 1

    def accept(self, exit_index: int, logits: Float32) -> bool:
        """Whether the answer is sure enough to stop with time to spare."""
        sure = top1_confidence(logits[0], temperature=self._temperatures[exit_index])
        self._sure = bool(sure >= self.threshold)
        return self._sure

    def observe(self, steps: Sequence[Step], *, met: bool, feasible: bool | None = None) -> None:
        """The router learns; a head that was looked at is a unit like any other."""
        self.router.observe(steps, met=met, feasible=feasible)

    def feasible(self, left_s: float) -> bool:
        """As the router."""
        return self.router.feasible(left_s)

    def reprice(self, costs: StateCosts) -> None:
        """The router takes new costs over; which exits to look at stays as planned."""
        self.router.reprice(costs)

    def unit_costs(self) -> UnitCosts:
        """As the router."""
        return self.router.unit_costs()

    def expected_s(self, predicted_s: float) -> float:
        """As the router."""
        return self.router.expected_s(predicted_s)

    def explain(self, exit_index: int) -> str:
        """As the router, or that it was sure."""
        if self._sure:
            return f"it was at least {100 * self.threshold:.4g} % sure; time was left"
        return self.router.explain(exit_index)


def plan_looks(
    inputs: PolicyInputs, *, accuracy_loss: float
) -> tuple[float, list[tuple[int, ...]]]:
    """Choose the threshold, and for each exit aimed at the exits to look at before it.

    For a threshold, exits are added one at a time, each time the one that lowers the mean cost of
    validation samples most, while accuracy stays within the loss. The threshold is the one that
    saves most on the way to the best exit.

    Args:
        inputs: Costs, validated accuracy, temperatures and validation logits.
        accuracy_loss: Against the exit aimed at, a share.

    Returns:
        The threshold, and for each exit the exits to look at, ascending; empty where none pays.
    """
    validation = need_validation(inputs, "edgewise_saving")
    step = -(-validation.labels.size // _MOST_SAMPLES)
    sure = confidences(validation, temperatures_of(inputs))[:, ::step]
    correct = validation.correct[:, ::step]
    paths_s = _paths_s(inputs)
    head_s = inputs.costs.head_s
    best = inputs.ranked_exits()[0]

    def plan(threshold: float, target: int) -> tuple[float, tuple[int, ...]]:
        least = float(correct[target].mean()) - accuracy_loss
        leaves = sure >= threshold
        chosen: tuple[int, ...] = ()
        cost_s = float(paths_s[0, target + 1] + head_s[target])
        while True:
            tried = []
            for k in range(target):
                if k in chosen:
                    continue
                looks = tuple(sorted((*chosen, k)))
                places = [*looks, target]
                first = _first(leaves[places])
                right = correct[places][first, np.arange(first.size)]
                mean_s = float(_ends_s(places, paths_s, head_s)[first].mean())
                if right.mean() >= least and mean_s < cost_s:
                    tried.append((mean_s, looks))
            if not tried:
                return cost_s, chosen
            cost_s, chosen = min(tried)

    threshold = min(_THRESHOLDS, key=lambda t: (plan(t, best)[0], -t))
    return threshold, [plan(threshold, k)[1] for k in range(inputs.num_exits)]


def _first(leaves: npt.NDArray[np.bool_]) -> Exits:
    """[N]: the first place that a sample leaves at, the last one in any case, from [P, N]."""
    leaves[-1] = True
    return np.asarray(leaves.argmax(axis=0))


def _ends_s(places: Sequence[int], paths_s: Float64, head_s: Float64) -> Float64:
    """[P]: seconds until each of some exits has answered, the ones before it too."""
    starts = [0, *(k + 1 for k in places[:-1])]
    parts = [paths_s[p, k + 1] + head_s[k] for p, k in zip(starts, places, strict=True)]
    return np.cumsum(parts)


def _paths_s(inputs: PolicyInputs) -> Float64:
    """[S + 1, S + 1]: median seconds from a position to another over the longest compiled runs."""
    costs, num = inputs.costs, inputs.num_exits
    paths_s = np.zeros((num + 1, num + 1))
    for start in range(num):
        for stop in range(start + 1, num + 1):
            at = start
            while at < stop:
                after = inputs.longest_step(at, stop)
                single_s = float(costs.stage_s[at:after].sum())
                paths_s[start, stop] += costs.segment_s.get((at, after), single_s)
                at = after
    return paths_s
