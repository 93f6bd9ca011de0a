"""How a few candidates' probabilities shift from layer to layer: a hint that the answer stands.

Pure: features, the small network that reads them, and at which layers it is asked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgewise.errors import ShapeError
from edgewise.scores import softmax

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]

CANDIDATES = 4
_RECENT = 5  # exits whose neighbourhood is watched
_AROUND = (-2, 0, 2)


def top_candidates(logits: Float32, count: int = CANDIDATES) -> Int64:
    """Ids of the largest logits [V], largest first."""
    count = min(count, len(logits))
    best = np.argpartition(logits, len(logits) - count)[len(logits) - count :]
    return best[np.argsort(-logits[best], kind="stable")]


def shift_features(logits: Float32, before: Float32 | None) -> tuple[Float32, Float32]:
    """Features of one layer from the candidates' logits there.

    Args:
        logits: l, [..., K].
        before: q at the active layer before, the same; ``None`` at the first.

    Returns:
        [l, q, g], [..., 3 K], with q = softmax(l) and g = q - ``before`` (q itself at the first);
        and q.

    Source:
        Xu et al., SpecEE (2025), section 4, as its published code computes it.
    """
    q = softmax(logits).astype(np.float32)
    shift = q if before is None else q - before
    return np.concatenate([logits, q, shift], axis=-1).astype(np.float32), q


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShiftPredictor:
    """Networks of one hidden layer, one for each layer of the model, and when they are asked.

    Attributes:
        first: By layer: [3 K, N], standardisation folded in.
        first_bias: By layer: [N].
        second: By layer: [N].
        second_bias: By layer.
        draft_layer: The exit whose top answers are the candidates.
        scheduled: Layers asked for every token, rising.
    """

    first: Mapping[int, Float32]
    first_bias: Mapping[int, Float32]
    second: Mapping[int, Float32]
    second_bias: Mapping[int, float]
    draft_layer: int
    scheduled: tuple[int, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers that have a network, rising."""
        return tuple(sorted(self.first))

    def chance(self, layer: int, features: Float32) -> float:
        """Chance that leaving here gives the full depth's answer.

        Args:
            layer: How many layers have run, one of `layers`.
            features: [3 K].

        Raises:
            ShapeError: Features of another length.
        """
        weight = self.first[layer]
        if features.shape != weight.shape[:1]:
            raise ShapeError(f"expected features ({len(weight)},), found {features.shape}")
        hidden = np.maximum(features @ weight + self.first_bias[layer], 0.0)
        score = float(hidden @ self.second[layer]) + self.second_bias[layer]
        return float(1.0 / (1.0 + np.exp(-np.clip(score, -60.0, 60.0))))


class LayerSchedule:
    """Layers that are worth asking: a fixed set, and neighbours of the last exits; of one request.

    Args:
        scheduled: Asked for every token.
        possible: Layers that can be asked at all.

    Source:
        Xu et al., SpecEE (2025): from five exits on, layers two before and behind each of the last
        five exits are active too.
    """

    def __init__(self, scheduled: Sequence[int], possible: Sequence[int]) -> None:
        self._scheduled = frozenset(scheduled)
        self._possible = frozenset(possible)
        self._recent: deque[int] = deque(maxlen=_RECENT)

    def active(self) -> frozenset[int]:
        """For the next token."""
        chosen = set(self._scheduled)
        if len(self._recent) == _RECENT:
            chosen |= {layer + step for layer in self._recent for step in _AROUND}
        return frozenset(chosen & self._possible)

    def observe(self, layer: int) -> None:
        """Learn where a token left."""
        self._recent.append(layer)


def covering_layers(exits: Mapping[int, int], *, share: float = 0.9) -> tuple[int, ...]:
    """The fewest layers at which a share of all tokens left, rising.

    Args:
        exits: By layer, how many tokens left there; the full depth is not one of them.
        share: To be covered, above 0 to 1.

    Example:
        >>> covering_layers({12: 5, 18: 50, 24: 41, 27: 4})
        (18, 24)
    """
    wanted, covered, chosen = share * sum(exits.values()), 0.0, []
    for layer in sorted(exits, key=lambda k: (-exits[k], k)):
        if covered >= wanted or not exits[layer]:
            break
        chosen.append(layer)
        covered += exits[layer]
    return tuple(sorted(chosen))
