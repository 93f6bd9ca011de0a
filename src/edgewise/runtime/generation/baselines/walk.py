"""One token on its way through the layers, for ways to decide that look at states and answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edgewise.exits import Policy, Step
from edgewise.runtime.generation.speculation import exit_temperature
from edgewise.runtime.generation.stepping import Decoded

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
        steps: Units that ran.
    """

    def __init__(self, inputs: StepperInputs, token: int, *, since_s: float) -> None:
        self._inputs, self._text = inputs, inputs.text
        self._factor = inputs.costs.factor(self._text.length) * inputs.rows.ratio(
            1 + self._text.owed
        )
        self._since_s = since_s
        self._start_s = self._mark_s = inputs.setting.clock.now_s()
        self.position = 0
        self.state: Float32 = self._text.decoder.embed([token])
        self.steps: list[Step] = []

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
        start, table = self.position, self._inputs.setting.costs
        self.state = self._text.run(self.state, start=start, stop=stop)
        self.position = stop
        self._add(f"segment:{start}-{stop}", float(table.stage_s[start:stop].sum()))

    def logits(self) -> Float32:
        """Answer here: [V], divided by the exit's temperature."""
        decoder, kind = self._text.decoder, self._inputs.head
        found = decoder.logits(self.state, position=self.position, kind=kind)[0]
        table = self._inputs.setting.costs
        self._add(f"head:{self.position - 1}", float(table.head_s[self.position - 1]))
        return np.asarray(found / np.float32(exit_temperature(decoder, self.position, kind)))

    def leave(
        self, logits: Float32, reason: str, *, feasible: bool | None = None
    ) -> Sequence[Decoded]:
        """Take the answer, settle the deeper layers, and count the token."""
        token = self._inputs.drawing.choose(logits)
        self._text.leave(self.state, position=self.position)
        self._text.advance()
        return [
            Decoded(
                token=token,
                exit_layer=self.layer,
                feasible=feasible,
                predicted_s=sum(step.predicted_s for step in self.steps),
                wait_s=self._start_s - self._since_s,
                reason=reason,
                steps=tuple(self.steps),
            )
        ]

    def _add(self, unit: str, static_s: float) -> None:
        now_s = self._inputs.setting.clock.now_s()
        spent_s, self._mark_s = now_s - self._mark_s, now_s
        predicted_s = static_s * self._factor
        self.steps.append(Step(unit=unit, predicted_s=predicted_s, observed_s=spent_s))
