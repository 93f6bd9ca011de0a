"""Ways to the next tokens, by name: what Edgewise does and what others do.

Each makes a stepper of one text: pass it to `LanguageSession.generate` as ``stepper``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from edgewise.errors import ConfigError, nearest_names
from edgewise.runtime.generation.baselines.confident import Calm, LayerWise
from edgewise.runtime.generation.baselines.gated import Gated
from edgewise.runtime.generation.baselines.probability_shift import edgewise_psf, specee
from edgewise.runtime.generation.baselines.routed import edgewise, fixed_exit, full_depth
from edgewise.runtime.generation.baselines.speculative import (
    EdgewiseSpeculation,
    LayerSkip,
    speculation,
)

if TYPE_CHECKING:
    from edgewise.runtime.generation.stepping import MakeStepper, Stepper, StepperInputs

BASELINES: Mapping[str, Callable[..., Stepper]] = {
    "full-depth": full_depth,
    "fixed-exit": fixed_exit,
    "layer-wise": LayerWise,
    "calm": Calm,
    "layerskip": LayerSkip,
    "specee": specee,
    "speculation": speculation,
    "edgewise": edgewise,
    "edgewise+speculation": EdgewiseSpeculation,
    "edgewise+psf": edgewise_psf,
    "edgewise+gate": Gated,
}


def make_baseline(name: str, **options: Any) -> MakeStepper:
    """A way to the next tokens.

    Args:
        name: One of `BASELINES`.
        options: Its own arguments; checked when the first text begins.

    Returns:
        What makes a stepper of a text. It raises ConfigError for an argument that the way does not
        have or accept.

    Raises:
        ConfigError: No such name.
    """
    if name not in BASELINES:
        raise ConfigError(f"unknown baseline {name!r}", help=nearest_names(name, BASELINES))

    def make(inputs: StepperInputs) -> Stepper:
        try:
            return BASELINES[name](inputs, **options)
        except TypeError as error:
            raise ConfigError(f"baseline {name!r} does not take these options: {error}") from error

    return make


__all__ = ["BASELINES", "make_baseline"]
