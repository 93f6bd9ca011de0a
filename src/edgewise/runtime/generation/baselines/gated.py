"""Leave where a gate on the hidden state says that the answer stands, within the router's depth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edgewise.errors import ConfigError
from edgewise.runtime.generation.baselines.walk import Walk, walk_until

if TYPE_CHECKING:
    from edgewise.runtime.generation.stepping import Decoded, StepperInputs

Float32 = npt.NDArray[np.float32]


class Gated:
    """The session's policy decides how deep a token may go; fitted gates let it leave sooner.

    A gate is a dot product with the state, so a head runs only where the token leaves.

    Args:
        inputs: Of the text.
        threshold: Least chance, as the gate tells it, that the exit answers what full depth would.

    Raises:
        ConfigError: A threshold outside 0 to 1, no gate at any exit, or heads that gates say
            nothing of.
    """

    def __init__(self, inputs: StepperInputs, *, threshold: float = 0.9) -> None:
        if not 0 <= threshold <= 1:
            raise ConfigError(f"expected a threshold from 0 to 1, found {threshold}")
        decoder = inputs.text.decoder
        gates = () if decoder.exits is None else decoder.exits.gates
        layers = decoder.exit_layers[:-1]
        if not any(layer in gates for layer in layers):
            raise ConfigError(
                f"no gate was fitted for an exit after {', '.join(map(str, layers)) or 'fewer'}"
                " layers",
                help="edgewise fit-exits MODEL --text FILE",
            )
        if inputs.head == "raw":
            raise ConfigError("gates were fitted for affine heads, found raw ones")
        self._inputs, self._threshold = inputs, threshold

    def step(self, token: int, *, since_s: float, due_s: float) -> Sequence[Decoded]:
        """One token."""
        policy = self._inputs.setting.policy
        _, found = walk_until(
            self._inputs, policy, token, since_s=since_s, due_s=due_s, look=self._look
        )
        return found

    def _look(self, walk: Walk) -> tuple[Float32 | None, str]:
        chance = None
        if not walk.last:
            chance = self._inputs.text.decoder.gate(walk.state, position=walk.position)
        if chance is None or chance < self._threshold:
            return None, ""
        return None, f"the gate says with {chance:.2f} that it stands"
