"""Leave as soon as the answer seems sure: every head evaluated, or as CALM does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import numpy.typing as npt

from edgewise.errors import ConfigError, nearest_names
from edgewise.runtime.generation.baselines.walk import Walk
from edgewise.runtime.generation.speculation import all_or_nothing
from edgewise.scores import softmax

if TYPE_CHECKING:
    from edgewise.runtime.generation.stepping import Decoded, StepperInputs

Float32 = npt.NDArray[np.float32]
Measure = Literal["softmax", "hidden"]


class LayerWise:
    """Evaluates the head of every exit it comes by; leaves when one is sure or time is up.

    Args:
        inputs: Of the text.
        threshold: The least probability of an answer to leave with.
    """

    def __init__(self, inputs: StepperInputs, *, threshold: float = 0.8) -> None:
        self._inputs = inputs
        self._threshold = _checked(threshold)

    def step(self, token: int, *, since_s: float, due_s: float) -> Sequence[Decoded]:
        """One token."""
        with all_or_nothing(self._inputs.text.cache):
            walk = Walk(self._inputs, token, since_s=since_s)
            while True:
                walk.run(walk.position + 1)
                logits = walk.logits()
                if walk.last:
                    return walk.leave(logits, "full depth; no exit was sure")
                if walk.past(due_s):
                    return walk.leave(logits, "time was up")
                chance = float(softmax(logits).max())
                if chance >= self._threshold:
                    return walk.leave(logits, f"sure with {chance:.2f}")


class Calm:
    """Leaves by a confidence whose threshold falls as the text grows; knows no deadline.

    Args:
        inputs: Of the text.
        measure: ``"softmax"``: gap of the two largest probabilities, every head evaluated.
            ``"hidden"``: cosine of the states at this exit and the one before, a head only where
            the token leaves.
        threshold: λ, 0 to 1.
        decay: τ.
        tokens: N, how long answers are at most.

    Source:
        Schuster et al., Confident Adaptive Language Modeling (2022), section 3.3 and eq. 5.
    """

    def __init__(
        self,
        inputs: StepperInputs,
        *,
        measure: Measure = "softmax",
        threshold: float = 0.8,
        decay: float = 4.0,
        tokens: int = 256,
    ) -> None:
        if measure not in get_args(Measure):
            raise ConfigError(
                f"unknown measure {measure!r}", help=nearest_names(measure, get_args(Measure))
            )
        if not (decay >= 0 and tokens >= 1):
            raise ConfigError(f"expected a decay and tokens, found {decay} and {tokens}")
        self._inputs, self._threshold = inputs, _checked(threshold)
        self._measure, self._decay, self._tokens = measure, decay, tokens
        self._done = 0

    def step(self, token: int, *, since_s: float, due_s: float) -> Sequence[Decoded]:  # noqa: ARG002
        """One token."""
        least = decaying_threshold(
            self._threshold, self._done, decay=self._decay, tokens=self._tokens
        )
        with all_or_nothing(self._inputs.text.cache):
            walk = Walk(self._inputs, token, since_s=since_s)
            while True:
                before = walk.state
                walk.run(walk.position + 1)
                if walk.last:
                    found = walk.leave(walk.logits(), "full depth; no exit was sure")
                    break
                if self._measure == "softmax":
                    logits = walk.logits()
                    sure = probability_gap(logits)
                    if sure >= least:
                        found = walk.leave(logits, f"probability gap {sure:.2f}")
                        break
                elif walk.position > 1 and (sure := cosine(before, walk.state)) >= least:
                    found = walk.leave(walk.logits(), f"states alike to {sure:.3f}")
                    break
        self._done += 1
        return found


def decaying_threshold(threshold: float, done: int, *, decay: float, tokens: int) -> float:
    """Strict for the first tokens, whose errors all later ones inherit.

    Returns:
        0.9 λ + 0.1 exp(-τ t / N), within 0 to 1.

    Source:
        Schuster et al. (2022), eq. 5.

    Example:
        >>> round(decaying_threshold(0.8, 0, decay=4.0, tokens=64), 9)
        0.82
    """
    raised = 0.9 * threshold + 0.1 * math.exp(-decay * done / tokens)
    return min(1.0, max(0.0, raised))


def probability_gap(logits: Float32) -> float:
    """Largest less second largest probability of logits [V]."""
    top = np.partition(softmax(logits), -2)[-2:]
    return float(top[1] - top[0])


def cosine(a: npt.NDArray[np.floating], b: npt.NDArray[np.floating]) -> float:
    """Of two states; 0 where one is null."""
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a.ravel() @ b.ravel()) / size if size else 0.0


def _checked(threshold: float) -> float:
    if not 0 <= threshold <= 1:
        raise ConfigError(f"expected a threshold from 0 to 1, found {threshold}")
    return threshold
