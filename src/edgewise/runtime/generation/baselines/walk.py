"""One token on its way through the layers, for ways to decide that look at states and answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edgewise.exits import Policy, Step
from edgewise.runtime.generation.speculation import all_or_nothing, exit_temperature
from edgewise.runtime.generation.stepping import Decoded
from edgewise.runtime.request import Request

if TYPE_CHECKING:
    from edgewise.runtime.generation.stepping import StepperInputs

Float32 = npt.NDArray[np.float32]


class Walk:
    """Runs one token as far as it is told, and accounts for what ran.

    Args:
        inputs: Of the text.
        token: The text's last.
        since_s: When the token before it came.

    Attributes:
        position: Groups finished.
        state: [1, H] there.
    """

    def __init__(self, inputs: StepperInputs, token: int, *, since_s: float) -> None:
        self._inputs, self._text = inputs, inputs.text
        self._factor = inputs.costs.factor(self._text.length) * inputs.rows.ratio(
            1 + self._text.owed
        )
        self._since_s = since_s
        self._start_s = inputs.setting.clock.now_s()
        # Units are accounted for as those of any request; who decides says what is feasible.
        self._request = Request(
            policy=inputs.setting.policy,
            budget_s=math.inf,
            arrival_s=since_s,
            start_s=self._start_s,
            feasible=None,
        )
        self.position = 0
        self.state: Float32 = self._text.decoder.embed([token])

    @property
    def steps(self) -> tuple[Step, ...]:
        """Units that ran."""
        return self._request.steps()

    @property
    def last(self) -> bool:
        """Whether all layers have run."""
        return self.position == len(self._text.decoder.exit_layers)

    @property
    def layer(self) -> int:
        """How many layers have run."""
        return self._text.decoder.layers_at(self.position)

    def past(self, due_s: float) -> bool:
        """Whether an instant is over."""
        return self._inputs.setting.clock.now_s() >= due_s

    def decide(self, policy: Policy, due_s: float) -> int:
        """What a policy says here; one shown a clock that runs slower where units cost more."""
        start_s, factor = self._start_s, self._factor
        now_s = self._inputs.setting.clock.now_s()
        now_s = start_s + (now_s - start_s) / factor
        return policy.decide(self.position, now_s, start_s, start_s + (due_s - start_s) / factor)

    def run(self, stop: int) -> None:
        """Go on to a position."""
        start, setting = self.position, self._inputs.setting
        self.state = self._text.run(self.state, start=start, stop=stop)
        self.position = stop
        self._add(setting.segments[start, stop])

    def logits(self) -> Float32:
        """Answer here: [V], divided by the exit's temperature."""
        decoder, kind = self._text.decoder, self._inputs.head
        found = decoder.logits(self.state, position=self.position, kind=kind)[0]
        self._add(self._inputs.setting.heads[self.position - 1])
        return np.asarray(found / np.float32(exit_temperature(decoder, self.position, kind)))

    def leave(
        self, logits: Float32, reason: str, *, feasible: bool | None = None
    ) -> Sequence[Decoded]:
        """Take the answer, settle the deeper layers, and count the token."""
        token = self._inputs.drawing.choose(logits)
        if self._text.leave(self.state, position=self.position):
            self._request.extend(self._inputs.setting.clock.now_s())
        self._text.advance()
        predicted_s = sum(step.predicted_s for step in self.steps)
        return [
            Decoded(
                token=token,
                exit_layer=self.layer,
                feasible=feasible,
                predicted_s=self._inputs.setting.policy.expected_s(predicted_s),
                wait_s=self._start_s - self._since_s,
                reason=reason,
                steps=self.steps,
            )
        ]

    def _add(self, unit: tuple[str, float]) -> None:
        self._request.add(unit, self._inputs.setting.clock.now_s(), factor=self._factor)


# The answer, if a head has run there, and why to leave with it: empty to go on.
Look = Callable[[Walk], tuple[Float32 | None, str]]


def walk_until(  # noqa: PLR0913 - a step's own, and what decides
    inputs: StepperInputs, policy: Policy, token: int, *, since_s: float, due_s: float, look: Look
) -> tuple[Walk, Sequence[Decoded]]:
    """Run one token as deep as a policy says, or less where a look at its state says so.

    Args:
        inputs: Of the text.
        policy: Of the depth; it learns from what ran.
        token: The text's last.
        since_s: When the token before it came.
        due_s: When the answer is due.
        look: Asked after each group.
    """
    clock = inputs.setting.clock
    policy = policy.begin()
    feasible = policy.feasible((due_s - clock.now_s()) / inputs.costs.factor(inputs.text.length))
    answer, reason = None, ""
    with all_or_nothing(inputs.text.cache):
        walk = Walk(inputs, token, since_s=since_s)
        while not reason:
            action = walk.decide(policy, due_s)
            # Text cannot go on without a token: even a hopeless one gets the first exit's.
            if walk.position and action <= walk.position:
                reason = policy.explain(walk.position - 1)
            else:
                walk.run(walk.position + 1)
                answer, reason = look(walk)
        # A head that has run here already is not run again.
        answer = walk.logits() if answer is None else answer
        found = walk.leave(answer, reason, feasible=feasible)
    policy.observe(walk.steps, met=clock.now_s() <= due_s, feasible=feasible)
    return walk, found
