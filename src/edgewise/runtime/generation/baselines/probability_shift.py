"""Leave where a few candidates' probabilities say that the answer stands: alone, or in time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edgewise.errors import ConfigError
from edgewise.exits import Policy
from edgewise.exits.shift import LayerSchedule, ShiftPredictor, top_candidates
from edgewise.runtime.generation.baselines.routed import policy_of, position_of
from edgewise.runtime.generation.baselines.walk import Walk, walk_until
from edgewise.runtime.generation.shift import Shift

if TYPE_CHECKING:
    from edgewise.runtime.generation.stepping import Decoded, StepperInputs

Float32 = npt.NDArray[np.float32]


class ProbabilityShift:
    """Takes candidates at the draft exit, asks the predictor at active layers behind it.

    Where the predictor proposes to leave, the whole head runs; the token leaves if its answer is
    among the candidates. The policy decides how deep it may go in any case.

    Args:
        inputs: Of the text.
        predictor: Trained for this model; its draft layer must be an exit of the decoder.
        policy: Of the depth; with the deadline router no token goes on for which time is up.
        threshold: Least chance at which to look.

    Raises:
        ConfigError: The decoder has no exit at the draft layer, or a threshold outside 0 to 1.
    """

    def __init__(
        self,
        inputs: StepperInputs,
        *,
        predictor: ShiftPredictor,
        policy: Policy,
        threshold: float = 0.5,
    ) -> None:
        if not 0 <= threshold <= 1:
            raise ConfigError(f"expected a threshold from 0 to 1, found {threshold}")
        self._inputs, self._predictor = inputs, predictor
        self._policy, self._threshold = policy, threshold
        self._layers = inputs.text.decoder.exit_layers
        self._draft = position_of(inputs, predictor.draft_layer, before_last=True)
        possible = [k for k in predictor.layers if k in self._layers[self._draft : -1]]
        self.schedule = LayerSchedule(predictor.scheduled, possible)

    def step(self, token: int, *, since_s: float, due_s: float) -> Sequence[Decoded]:
        """One token."""
        active = self.schedule.active()
        shift: Shift | None = None

        def look(walk: Walk) -> tuple[Float32 | None, str]:
            nonlocal shift
            if walk.position == self._draft:
                answer = walk.logits()
                shift = Shift(self._inputs.text.decoder, self._predictor, top_candidates(answer))
                return answer, ""
            if shift is not None and walk.layer in active:
                chance = shift.chance(walk.state[0], position=walk.position)
                if chance > self._threshold:
                    answer = walk.logits()
                    holds = shift.holds(int(answer.argmax()))
                    said = f"probabilities say with {chance:.2f} that it stands"
                    return answer, said if holds else ""
            return None, ""

        walk, found = walk_until(
            self._inputs, self._policy, token, since_s=since_s, due_s=due_s, look=look
        )
        if not walk.last:
            self.schedule.observe(walk.layer)
        return found


def specee(
    inputs: StepperInputs, *, predictor: ShiftPredictor, threshold: float = 0.5
) -> ProbabilityShift:
    """The predictor alone; knows no deadline."""
    policy = policy_of(inputs, "full_depth")
    return ProbabilityShift(inputs, predictor=predictor, policy=policy, threshold=threshold)


def edgewise_psf(
    inputs: StepperInputs, *, predictor: ShiftPredictor, threshold: float = 0.5
) -> ProbabilityShift:
    """The predictor within the deadline router's depth."""
    policy = inputs.setting.policy
    return ProbabilityShift(inputs, predictor=predictor, policy=policy, threshold=threshold)
