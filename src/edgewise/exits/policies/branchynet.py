"""BranchyNet: run every head on the way and stop at the first sure answer; knows no deadline."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgewise.errors import ConfigError
from edgewise.exits.policy import ANSWER, LOOK, Policy, PolicyInputs
from edgewise.model import Validation
from edgewise.scores import normalised_entropy

Float32 = npt.NDArray[np.float32]


def make(
    inputs: PolicyInputs, *, threshold: float | None = None, accuracy_loss: float = 0.005
) -> BranchyNet:
    """Make the policy.

    Args:
        inputs: Temperatures and validation logits.
        threshold: Normalised entropy, 0 to 1, below which an answer is taken. By default the
            largest one that costs at most ``accuracy_loss`` on validation data.
        accuracy_loss: Accuracy that may be lost against the last exit, a share.

    Raises:
        ConfigError: A number is outside 0 to 1, or the threshold must be chosen without validation
            data.
    """
    if not 0.0 <= accuracy_loss <= 1.0:
        raise ConfigError(f"expected an accuracy loss from 0 to 1, found {accuracy_loss!r}")
    if threshold is None:
        if inputs.validation is None:
            raise ConfigError(
                "policy 'branchynet' needs a threshold: the model carries no validation logits",
                help="pass threshold=0.3, or prepare the model with `edgewise prepare`",
            )
        threshold = choose_threshold(
            inputs.validation, inputs.temperatures, accuracy_loss=accuracy_loss
        )
    if not 0.0 <= threshold <= 1.0:
        raise ConfigError(f"expected an entropy threshold from 0 to 1, found {threshold!r}")
    return BranchyNet(inputs, threshold=threshold)


def choose_threshold(
    validation: Validation, temperatures: tuple[float, ...], *, accuracy_loss: float
) -> float:
    """Largest threshold on a grid of 0.01 that loses at most a share of accuracy.

    Args:
        validation: Logits [E, N, C] and labels [N].
        temperatures: [E].
        accuracy_loss: Against the last exit.
    """
    entropy = np.stack(
        [
            normalised_entropy(z, temperature=t)
            for z, t in zip(validation.logits, temperatures, strict=True)
        ]
    )  # [E, N]
    correct = validation.correct
    floor = correct[-1].mean() - accuracy_loss
    best = 0.0
    for threshold in np.arange(0.0, 1.0001, 0.01):
        sure = entropy <= threshold
        sure[-1] = True
        exits = sure.argmax(axis=0)  # first sure exit of each sample
        if correct[exits, np.arange(exits.size)].mean() >= floor:
            best = float(threshold)
    return best


class BranchyNet(Policy):
    """Looks at each exit in turn.

    Source:
        Teerapittayanon, McDanel, Kung, BranchyNet (ICPR 2016), algorithm 1.
    """

    name = "branchynet"

    def __init__(self, inputs: PolicyInputs, *, threshold: float) -> None:
        self.threshold = threshold
        self._temperatures = inputs.temperatures or (1.0,) * inputs.num_exits
        self._last = inputs.num_exits

    def decide(self, position: int, now_s: float, start_s: float, deadline_s: float) -> int:  # noqa: ARG002
        """Look at every exit; answer at the last."""
        if position == 0:
            return 1
        return ANSWER if position == self._last else LOOK

    def accept(self, exit_index: int, logits: Float32) -> bool:
        """Whether the entropy is at most the threshold."""
        entropy = normalised_entropy(logits[0], temperature=self._temperatures[exit_index])
        return bool(entropy <= self.threshold)

    def explain(self, exit_index: int) -> str:
        """The threshold, or the end."""
        if exit_index == self._last - 1:
            return "no earlier exit was sure"
        return f"entropy fell to {self.threshold:.2f}"
