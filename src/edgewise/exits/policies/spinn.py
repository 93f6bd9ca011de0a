"""SPINN's scheduler: the confidence threshold whose expected latency fits the budget."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from edgewise.errors import ConfigError, nearest_names
from edgewise.exits.policy import Float32, Policy, PolicyInputs, Step
from edgewise.exits.thresholds import (
    LookEverywhere,
    Trial,
    confidences,
    every_head_s,
    first_exits,
    need_validation,
    temperatures_of,
)
from edgewise.scores import top1_confidence

Objective = Literal["accuracy", "latency"]

# The last one lets nobody leave early.
_THRESHOLDS = (*(round(0.05 * i, 2) for i in range(20)), 0.98, 0.99, 0.999, 1.01)


def make(
    inputs: PolicyInputs,
    *,
    objective: Objective = "accuracy",
    scale_factor: bool = True,
    accuracy_loss: float = 0.005,
) -> Spinn:
    """Make the policy.

    Args:
        inputs: Costs, temperatures and validation logits.
        objective: What is best among thresholds whose expected latency fits a request's budget:
            ``"accuracy"``, or ``"latency"`` among those that lose little accuracy.
        scale_factor: Multiply profiled latencies by measured / profiled time of the last request.
        accuracy_loss: For ``"latency"``: accuracy that may be lost against the last exit, a share.

    Raises:
        ConfigError: The objective is unknown, or there are no validation logits.
    """
    if objective not in get_args(Objective):
        raise ConfigError(
            f"unknown objective {objective!r} of policy 'spinn'",
            help=nearest_names(str(objective), get_args(Objective)),
        )
    validation = need_validation(inputs, "spinn")
    sure = confidences(validation, temperatures_of(inputs))
    cost_s = every_head_s(inputs.costs)
    designs = [(t, Trial.of(first_exits(sure, t), validation, cost_s)) for t in _THRESHOLDS]
    if objective == "latency":
        least = float(validation.accuracy()[-1]) - accuracy_loss
        kept = [d for d in designs if d[1].accuracy >= least]
        designs = sorted(kept or designs, key=lambda d: d[1].mean_s)
    else:
        designs.sort(key=lambda d: (-d[1].accuracy, d[1].mean_s))
    return Spinn(inputs, designs=designs, scale_factor=scale_factor)


class Spinn(LookEverywhere):
    """Chooses one threshold at a request's start; looks at each exit.

    Expected latency is the sum over exits of the share of validation samples that leave there,
    times the profiled time to get there with all heads on the way, times the scale factor. It is a
    mean: many requests take longer.

    Source:
        Laskaridis et al., SPINN (MobiCom 2020), the scheduler without its network. Our own reading;
        no code of theirs is public.
    """

    name = "spinn"

    def __init__(
        self, inputs: PolicyInputs, *, designs: Sequence[tuple[float, Trial]], scale_factor: bool
    ) -> None:
        super().__init__(inputs)
        self._designs = [(trial.mean_s, threshold) for threshold, trial in designs]  # best first
        self._soonest = min(self._designs)[1]
        self._scaled = scale_factor
        # One cell, shared with the copies that decide for single requests.
        self._scale = np.ones(1)
        self._threshold = self._soonest

    def begin(self) -> Policy:
        """A copy, which keeps its request's threshold."""
        return copy.copy(self)

    def choose(self, left_s: float) -> float:
        """The threshold for a request with a time left."""
        scale = float(self._scale[0])
        for mean_s, threshold in self._designs:
            if mean_s * scale <= left_s:
                return threshold
        return self._soonest

    def decide(self, position: int, now_s: float, start_s: float, deadline_s: float) -> int:
        """Choose the threshold first, then look at each exit."""
        if position == 0:
            self._threshold = self.choose(deadline_s - now_s)
        return super().decide(position, now_s, start_s, deadline_s)

    def accept(self, exit_index: int, logits: Float32) -> bool:
        """Whether the largest probability reaches the threshold."""
        sure = top1_confidence(logits[0], temperature=self._temperatures[exit_index])
        return bool(sure >= self._threshold)

    def observe(
        self,
        steps: Sequence[Step],
        *,
        met: bool,  # noqa: ARG002
        feasible: bool | None = None,  # noqa: ARG002
    ) -> None:
        """Measure the scale factor on the request just run."""
        predicted_s = sum(s.predicted_s for s in steps)
        observed_s = sum(s.observed_s for s in steps)
        if self._scaled and predicted_s > 0 and observed_s > 0:
            self._scale[0] = observed_s / predicted_s

    def expected_s(self, predicted_s: float) -> float:
        """Static medians times the scale factor."""
        return predicted_s * float(self._scale[0])

    def explain_accepted(self, exit_index: int) -> str:  # noqa: ARG002
        """The scheduler's threshold."""
        return "its probability reached the threshold chosen for the budget"
