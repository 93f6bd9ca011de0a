"""MSDNet: confidence thresholds that let chosen shares of validation samples leave at each exit."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from edgewise.errors import ConfigError, nearest_names
from edgewise.exits.policy import ANSWER, LOOK, Float32, Policy, PolicyInputs
from edgewise.exits.thresholds import (
    Float64,
    LookEverywhere,
    Trial,
    choose_trial,
    confidences,
    every_head_s,
    first_exits,
    geometric_shares,
    need_validation,
    temperatures_of,
    thresholds_for_shares,
)
from edgewise.scores import top1_confidence

Mode = Literal["dynamic", "anytime"]

# From nearly everybody at the first exit to nearly everybody at the last.
_FACTORS = np.geomspace(1 / 64, 64.0, 61)


def make(
    inputs: PolicyInputs,
    *,
    mode: Mode = "dynamic",
    q: float | None = None,
    budget_s: float | None = None,
    accuracy_loss: float = 0.005,
) -> Policy:
    """Make the policy.

    Args:
        inputs: Costs, and for ``dynamic`` validation logits.
        mode: ``"dynamic"``: a sample leaves where it is sure enough; knows no deadline, its budget
            holds on average. ``"anytime"``: the last answer that the medians let it finish.
        q: Factor from one exit's share of leaving samples to the next one's. By default chosen on
            validation data: with a budget the most accurate one whose mean cost fits it, without
            one the cheapest that loses little.
        budget_s: Mean time of a request, seconds.
        accuracy_loss: Accuracy that may be lost against the last exit, a share.

    Raises:
        ConfigError: An argument is out of its range, or there are no validation logits.
    """
    if mode not in get_args(Mode):
        raise ConfigError(
            f"unknown mode {mode!r} of policy 'msdnet'",
            help=nearest_names(str(mode), get_args(Mode)),
        )
    if mode == "anytime":
        return MSDNetAnytime(inputs)
    validation = need_validation(inputs, "msdnet")
    scores = confidences(validation, temperatures_of(inputs))
    factors = _FACTORS if q is None else [q]
    tried = [
        thresholds_for_shares(scores, geometric_shares(inputs.num_exits, float(f))) for f in factors
    ]
    cost_s = every_head_s(inputs.costs)
    best = choose_trial(
        [Trial.of(first_exits(scores, t), validation, cost_s) for t in tried],
        budget_s=budget_s,
        least_accuracy=float(validation.accuracy()[-1]) - accuracy_loss,
    )
    return MSDNet(inputs, thresholds=tried[best], q=float(factors[best]))


class MSDNet(LookEverywhere):
    """Leaves at the first exit whose largest probability reaches that exit's threshold.

    Attributes:
        thresholds: [E].
        q: The factor they come from.

    Source:
        Huang et al., Multi-Scale Dense Networks for Resource Efficient Image Classification (ICLR
        2018), dynamic evaluation. Our own reading; its code was not used.
    """

    name = "msdnet"

    def __init__(self, inputs: PolicyInputs, *, thresholds: Float64, q: float) -> None:
        super().__init__(inputs)
        self.q = q
        self.thresholds = tuple(float(t) for t in thresholds)

    def accept(self, exit_index: int, logits: Float32) -> bool:
        """Whether the largest probability reaches the threshold."""
        sure = top1_confidence(logits[0], temperature=self._temperatures[exit_index])
        return bool(sure >= self.thresholds[exit_index])

    def explain_accepted(self, exit_index: int) -> str:
        """The threshold."""
        return f"its probability reached {self.thresholds[exit_index]:.2f}"


class MSDNetAnytime(Policy):
    """Answers at each exit, and keeps the last answer whose successor would not be done in time.

    What it foresees are static medians.

    Source:
        As `MSDNet`, anytime evaluation.
    """

    name = "msdnet_anytime"

    def __init__(self, inputs: PolicyInputs) -> None:
        costs = inputs.costs
        self._last = inputs.num_exits
        # At position p: this head, the next stage and the next head.
        self._next_s = [
            float(costs.head_s[p - 1] + costs.stage_s[p] + costs.head_s[p])
            for p in range(1, self._last)
        ]

    def decide(self, position: int, now_s: float, start_s: float, deadline_s: float) -> int:  # noqa: ARG002
        """Look and go on while the next answer would still be in time."""
        if position == 0:
            return 1
        if position == self._last or self._next_s[position - 1] > deadline_s - now_s:
            return ANSWER
        return LOOK

    def accept(self, exit_index: int, logits: Float32) -> bool:  # noqa: ARG002
        """Never: a later answer is taken to be better."""
        return False

    def explain(self, exit_index: int) -> str:
        """The end, or the time."""
        if exit_index == self._last - 1:
            return "the network ended"
        return f"exit {exit_index + 1} would not have been done in time"
