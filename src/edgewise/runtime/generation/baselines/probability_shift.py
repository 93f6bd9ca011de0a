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
from edgewise.runtime.generation.baselines.walk import Walk
from edgewise.runtime.generation.shift import Shift
from edgewise.runtime.generation.speculation import all_or_nothing

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
        clock, factor = self._inputs.setting.clock, self._inputs.costs.factor
        policy = self._policy.begin()
        left_s = (due_s - clock.now_s()) / factor(self._inputs.text.length)
        feasible = policy.feasible(left_s)
        with all_or_nothing(self._inputs.text.cache):
            walk = Walk(self._inputs, token, since_s=since_s)
            answer, reason = self._walk(walk, policy, due_s)
            # A head that has run here already is not run again.
            answer = walk.logits() if answer is None else answer
            found = walk.leave(answer, reason, feasible=feasible)
        if not walk.last:
            self.schedule.observe(walk.layer)
        policy.observe(walk.steps, met=clock.now_s() <= due_s, feasible=feasible)
        return found

    def _walk(self, walk: Walk, policy: Policy, due_s: float) -> tuple[Float32 | None, str]:
        """Go as far as the token goes; the answer there, if a head has run, and why."""
        active = self.schedule.active()
        stops = [p for p, k in enumerate(self._layers, 1) if p == self._draft or k in active]
        shift: Shift | None = None
        answer: Float32 | None = None
        while True:
            action = walk.decide(policy, due_s)
            # Text cannot go on without a token: even a hopeless one gets the first exit's.
            action = action if walk.position else max(action, 1)
            if action <= walk.position:
                return answer, policy.explain(walk.position - 1)
            walk.run(min([action, *(p for p in stops if p > walk.position)]))
            answer = None
            if walk.position == self._draft:
                answer = walk.logits()
                shift = Shift(self._inputs.text.decoder, self._predictor, top_candidates(answer))
            elif shift is not None and walk.layer in active:
                chance = shift.chance(walk.state[0], position=walk.position)
                if chance > self._threshold:
                    answer = walk.logits()
                    if shift.holds(int(answer.argmax())):
                        return answer, f"probabilities say with {chance:.2f} that it stands"


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
