"""A policy decides how deep each token runs: full depth, a fixed exit, or the deadline router."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from edgewise.errors import ConfigError
from edgewise.exits import Policy, PolicyInputs, make_policy
from edgewise.runtime.generation.stepping import RouterStepper

if TYPE_CHECKING:
    from edgewise.runtime.generation.stepping import StepperInputs


def full_depth(inputs: StepperInputs) -> RouterStepper:
    """All layers for every token."""
    return with_policy(inputs, policy_of(inputs, "full_depth"))


def fixed_exit(inputs: StepperInputs, *, layer: int) -> RouterStepper:
    """Always the same exit."""
    position = position_of(inputs, layer)
    return with_policy(inputs, policy_of(inputs, "fixed", exit_index=position - 1))


def edgewise(inputs: StepperInputs) -> RouterStepper:
    """The session's own router alone."""
    return RouterStepper(inputs)


def with_policy(inputs: StepperInputs, policy: Policy) -> RouterStepper:
    """One token is one request, decided by another policy than the session's."""
    setting = dataclasses.replace(inputs.setting, policy=policy)
    return RouterStepper(dataclasses.replace(inputs, setting=setting))


def policy_of(inputs: StepperInputs, name: str, **options: Any) -> Policy:
    """A policy that needs to know the costs alone."""
    known = PolicyInputs(costs=inputs.setting.costs, segments=inputs.setting.program.segments)
    return make_policy(name, known, **options)


def position_of(inputs: StepperInputs, layer: int, *, before_last: bool = False) -> int:
    """The position of the exit after some layers.

    Args:
        inputs: Of the text.
        layer: How many layers.
        before_last: The whole depth will not do.

    Raises:
        ConfigError: There is no such exit.
    """
    layers = inputs.text.decoder.exit_layers[: -1 if before_last else None]
    if layer not in layers:
        raise ConfigError(
            f"expected an exit after {', '.join(map(str, layers)) or 'no'} layers, found {layer}",
            help="name the exit when the decoder is loaded",
        )
    return layers.index(layer) + 1
