"""EENet: learnt scores of answers, with thresholds that keep a budget on average."""

from __future__ import annotations

import copy
import math

from edgewise.errors import ConfigError
from edgewise.exits.eenet import Schedule, fit_schedule
from edgewise.exits.policy import Float32, Policy, PolicyInputs
from edgewise.exits.thresholds import (
    LookEverywhere,
    every_head_s,
    need_validation,
    temperatures_of,
)
from edgewise.scores import softmax

# Of the time that the whole network takes with every head, where no budget is given.
_DEFAULT_BUDGET_RATIO = 0.75


def make(
    inputs: PolicyInputs, *, budget_s: float | None = None, epochs: int = 100, seed: int = 0
) -> EENet:
    """Fit the scheduler on validation logits and make the policy.

    Args:
        inputs: Costs, temperatures and validation logits.
        budget_s: Mean time of a request, seconds; three quarters of the whole network with every
            head by default.
        epochs: Of fitting, for each of the two nets.
        seed: Of their first weights.

    Raises:
        ConfigError: An argument is out of its range, or there are no validation logits.
    """
    cost_s = every_head_s(inputs.costs)
    budget_s = _DEFAULT_BUDGET_RATIO * float(cost_s[-1]) if budget_s is None else budget_s
    if not 0.0 < budget_s < math.inf:
        raise ConfigError(f"expected a mean budget above zero, found {budget_s!r}")
    if epochs < 1:
        raise ConfigError(f"expected at least one epoch, found {epochs!r}")
    validation = need_validation(inputs, "eenet")
    schedule = fit_schedule(
        validation.logits,
        validation.labels,
        cost_s,
        budget_s=budget_s,
        temperatures=temperatures_of(inputs),
        epochs=epochs,
        seed=seed,
    )
    return EENet(inputs, schedule=schedule)


class EENet(LookEverywhere):
    """Leaves at the first exit whose score reaches its threshold; remembers the scores before.

    Attributes:
        schedule: What was fitted.

    Source:
        See `edgewise.exits.eenet.fit_schedule`.
    """

    name = "eenet"

    def __init__(self, inputs: PolicyInputs, *, schedule: Schedule) -> None:
        super().__init__(inputs)
        self.schedule = schedule
        self._scores: list[float] = []

    def begin(self) -> Policy:
        """A copy that has seen nothing."""
        fresh = copy.copy(self)
        fresh._scores = []  # noqa: SLF001 - of its own kind
        return fresh

    def accept(self, exit_index: int, logits: Float32) -> bool:
        """Whether the score reaches the threshold."""
        probabilities = softmax(logits[0], temperature=self._temperatures[exit_index])
        score = self.schedule.scorer.score(exit_index, probabilities, self._scores)
        self._scores.append(score)
        return score >= self.schedule.thresholds[exit_index]

    def explain_accepted(self, exit_index: int) -> str:
        """The threshold."""
        return f"its learnt score reached {self.schedule.thresholds[exit_index]:.2f}"
