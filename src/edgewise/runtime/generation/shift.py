"""Asks at active layers whether a few candidates' answer stands, without the whole head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edgewise.backends.decoder.layers import head_weight
from edgewise.exits.shift import ShiftPredictor, shift_features

if TYPE_CHECKING:
    from edgewise.backends.decoder.base import DecoderProgram

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]


def candidate_logits(
    program: DecoderProgram, state: Float32, candidates: Int64, *, position: int
) -> Float32:
    """Logits of a few tokens only: [K] from a state [H].

    Through the fitted map where the exit has one, as its head would answer.
    """
    read = program.normed(state)
    layer = program.layers_at(position)
    exits = program.exits
    if layer < program.depth and exits is not None and layer in exits.affine:
        read = exits.affine[layer].weight @ read + exits.affine[layer].bias
    return np.asarray(head_weight(program.model)[candidates] @ read, dtype=np.float32)


class Shift:
    """Watches one token's candidates from layer to layer.

    Args:
        program: The model.
        predictor: Trained for it.
        candidates: [K], the draft exit's top answers.
    """

    def __init__(
        self, program: DecoderProgram, predictor: ShiftPredictor, candidates: Int64
    ) -> None:
        self._program, self._predictor = program, predictor
        self.candidates = candidates
        self._before: Float32 | None = None

    def chance(self, state: Float32, *, position: int) -> float:
        """Chance that leaving at a position gives the full depth's answer, from its state [H]."""
        logits = candidate_logits(self._program, state, self.candidates, position=position)
        features, self._before = shift_features(logits, self._before)
        return self._predictor.chance(self._program.layers_at(position), features)

    def holds(self, answer: int) -> bool:
        """Whether an answer of the whole head is one of the candidates, as leaving requires."""
        return bool((self.candidates == answer).any())
