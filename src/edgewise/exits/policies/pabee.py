"""PABEE: leave when enough exits in a row say the same; knows no deadline."""

from __future__ import annotations

import copy

import numpy as np
import numpy.typing as npt

from edgewise.errors import ConfigError
from edgewise.exits.policy import Float32, Policy, PolicyInputs
from edgewise.exits.thresholds import (
    Exits,
    LookEverywhere,
    Trial,
    choose_trial,
    every_head_s,
    need_validation,
)


def make(
    inputs: PolicyInputs,
    *,
    patience: int | None = None,
    budget_s: float | None = None,
    accuracy_loss: float = 0.005,
) -> Pabee:
    """Make the policy.

    Args:
        inputs: Costs; validation logits where no patience is given.
        patience: How many exits in a row must repeat the answer before them. By default chosen on
            validation data: with a budget the most accurate one whose mean cost fits it, without
            one the cheapest that loses little.
        budget_s: Mean time of a request, seconds.
        accuracy_loss: Accuracy that may be lost against the last exit, a share.

    Raises:
        ConfigError: The patience is below one, or must be chosen without validation logits.
    """
    if patience is None:
        validation = need_validation(inputs, "pabee")
        labels = validation.logits.argmax(axis=2)
        cost_s = every_head_s(inputs.costs)
        candidates = range(1, max(2, inputs.num_exits))
        trials = [
            Trial.of(patient_exits(labels, patience=p), validation, cost_s) for p in candidates
        ]
        least = float(validation.accuracy()[-1]) - accuracy_loss
        patience = candidates[choose_trial(trials, budget_s=budget_s, least_accuracy=least)]
    if isinstance(patience, bool) or patience < 1:
        raise ConfigError(f"expected a patience of at least one exit, found {patience!r}")
    return Pabee(inputs, patience=patience)


def patient_exits(labels: npt.NDArray[np.integer], *, patience: int) -> Exits:
    """[N]: where each sample leaves.

    Args:
        labels: [E, N], what each exit answers.
        patience: Repetitions asked for.

    Example:
        >>> patient_exits(np.array([[1, 1], [1, 2], [1, 2]]), patience=1).tolist()
        [1, 2]
    """
    num_exits, num_samples = labels.shape
    exits = np.full(num_samples, num_exits - 1)
    repeats = np.zeros(num_samples, dtype=int)
    open_ = np.ones(num_samples, dtype=bool)
    for k in range(1, num_exits):
        repeats = np.where(labels[k] == labels[k - 1], repeats + 1, 0)
        leaving = open_ & (repeats >= patience)
        exits[leaving] = k
        open_ &= ~leaving
    return exits


class Pabee(LookEverywhere):
    """Counts equal answers in a row; each request has its own count.

    Source:
        Zhou et al., BERT Loses Patience (NeurIPS 2020).
    """

    name = "pabee"

    def __init__(self, inputs: PolicyInputs, *, patience: int) -> None:
        super().__init__(inputs)
        self.patience = patience
        self._label = -1
        self._repeats = 0

    def begin(self) -> Policy:
        """A copy that has seen nothing."""
        fresh = copy.copy(self)
        fresh._label, fresh._repeats = -1, 0  # noqa: SLF001 - of its own kind
        return fresh

    def accept(self, exit_index: int, logits: Float32) -> bool:  # noqa: ARG002
        """Whether the answer has been repeated often enough."""
        label = int(logits[0].argmax())
        self._repeats = self._repeats + 1 if label == self._label else 0
        self._label = label
        return self._repeats >= self.patience

    def explain_accepted(self, exit_index: int) -> str:  # noqa: ARG002
        """The patience."""
        return f"{self.patience + 1} exits in a row agreed"
