"""From a request's temperature and top-p to how its tokens are drawn."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from edgewise.errors import ConfigError
from edgewise.runtime.generation.speculation import GREEDY, Drawing
from edgewise.scores import softmax

Float64 = npt.NDArray[np.float64]


def make_drawing(*, temperature: float, top_p: float, rng: np.random.Generator) -> Drawing:
    """How tokens are drawn.

    Args:
        temperature: 0 takes the most likely token; above, logits are divided by it.
        top_p: Only the most likely tokens that together reach this chance.
        rng: Chance.

    Raises:
        ConfigError: A temperature that is negative or not finite, or a chance outside 0 to 1.
    """
    for name, value in (("temperature", temperature), ("top-p", top_p)):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"expected a number as {name}, found {value!r}")
    if not 0 <= temperature < math.inf:
        raise ConfigError(
            f"expected a temperature of at least 0, found {temperature}",
            help="0 takes the most likely token, 1 draws as the model says",
        )
    if not 0 < top_p <= 1:
        raise ConfigError(f"expected a top-p above 0 and up to 1, found {top_p}")
    if temperature == 0:
        return GREEDY

    def distribution(logits: npt.NDArray[np.float32]) -> Float64:
        return nucleus(softmax(logits, temperature=temperature), top_p)

    return Drawing(distribution, rng)


def nucleus(chances: Float64, top_p: float) -> Float64:
    """Keep the fewest most likely tokens that reach a chance, each row summing to one again.

    Args:
        chances: [M, V].
        top_p: Above 0, up to 1.

    Source:
        Holtzman et al., The Curious Case of Neural Text Degeneration (2020), section 3.1.

    Example:
        >>> nucleus(np.array([[0.5, 0.3, 0.2]]), 0.6).round(3).tolist()
        [[0.625, 0.375, 0.0]]
    """
    if top_p >= 1:
        return chances
    order = np.argsort(-chances, axis=-1, kind="stable")
    ranked = np.take_along_axis(chances, order, axis=-1)
    before = np.cumsum(ranked, axis=-1) - ranked
    kept = np.zeros_like(chances)
    np.put_along_axis(kept, order, np.where(before < top_p, ranked, 0.0), axis=-1)
    return np.asarray(kept / kept.sum(axis=-1, keepdims=True))
