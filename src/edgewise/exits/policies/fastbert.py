"""FastBERT: leave when the normalised entropy falls to the "speed"; knows no deadline."""

from __future__ import annotations

import numpy as np

from edgewise.errors import ConfigError
from edgewise.exits.policy import Float32, PolicyInputs
from edgewise.exits.thresholds import (
    LookEverywhere,
    Trial,
    certainties,
    choose_trial,
    every_head_s,
    first_exits,
    need_validation,
    temperatures_of,
)
from edgewise.scores import normalised_entropy

_SPEEDS = np.linspace(0.0, 1.0, 101)


def make(
    inputs: PolicyInputs,
    *,
    speed: float | None = None,
    budget_s: float | None = None,
    accuracy_loss: float = 0.005,
) -> FastBert:
    """Make the policy.

    Args:
        inputs: Costs and temperatures; validation logits where no speed is given.
        speed: Normalised entropy, 0 to 1, at or below which an answer is taken. By default chosen
            on validation data: with a budget the most accurate one whose mean cost fits it, without
            one the cheapest that loses little.
        budget_s: Mean time of a request, seconds.
        accuracy_loss: Accuracy that may be lost against the last exit, a share.

    Raises:
        ConfigError: The speed is outside 0 to 1, or must be chosen without validation logits.
    """
    if speed is None:
        validation = need_validation(inputs, "fastbert")
        sure = certainties(validation, temperatures_of(inputs))
        cost_s = every_head_s(inputs.costs)
        trials = [Trial.of(first_exits(sure, 1.0 - s), validation, cost_s) for s in _SPEEDS]
        least = float(validation.accuracy()[-1]) - accuracy_loss
        speed = float(_SPEEDS[choose_trial(trials, budget_s=budget_s, least_accuracy=least)])
    if not 0.0 <= speed <= 1.0:
        raise ConfigError(f"expected a speed from 0 to 1, found {speed!r}")
    return FastBert(inputs, speed=speed)


class FastBert(LookEverywhere):
    """One threshold for all exits.

    Source:
        Liu et al., FastBERT (ACL 2020), section 3.4. Its heads are taught by the last exit; that is
        a matter of training and not of this file.
    """

    name = "fastbert"

    def __init__(self, inputs: PolicyInputs, *, speed: float) -> None:
        super().__init__(inputs)
        self.speed = speed

    def accept(self, exit_index: int, logits: Float32) -> bool:
        """Whether the uncertainty is at most the speed."""
        entropy = normalised_entropy(logits[0], temperature=self._temperatures[exit_index])
        return bool(1.0 - entropy >= 1.0 - self.speed)

    def explain_accepted(self, exit_index: int) -> str:  # noqa: ARG002
        """The speed."""
        return f"its uncertainty fell to {self.speed:.2f}"
