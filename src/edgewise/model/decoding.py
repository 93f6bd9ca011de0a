"""What decoding a language model needs beside its weights: a cache of keys and values, exits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from edgewise.errors import ConfigError, ModelError, ShapeError

Float32 = npt.NDArray[np.float32]
# What becomes of the deeper layers' keys and values when a token leaves early.
KvPolicy = Literal["propagate", "mask", "defer", "verify"]
KV_POLICIES: tuple[KvPolicy, ...] = ("propagate", "mask", "defer", "verify")


class KvCache:
    """Keys and values of one request; owned by it alone, so nothing is shared between requests.

    All layers report one length after any sequence of exits. A layer's cell is *present* once it
    holds keys and values; an absent cell is not attended to.

    Args:
        layers: L.
        kv_heads: Of keys and values.
        head_dim: Width of a head.
        capacity: C, the most tokens it can hold; memory is allocated once.

    Attributes:
        keys: [L, kv_heads, C, head_dim] float32, RoPE applied.
        values: The same.
        present: [L, C] bool.
        length: Tokens it holds, the same for every layer.

    Raises:
        ConfigError: A size below 1.
    """

    def __init__(self, *, layers: int, kv_heads: int, head_dim: int, capacity: int) -> None:
        if min(layers, kv_heads, head_dim, capacity) < 1:
            raise ConfigError(
                f"expected sizes of at least 1, found {layers} layers, {kv_heads} heads of"
                f" {head_dim}, capacity {capacity}"
            )
        shape = (layers, kv_heads, capacity, head_dim)
        self.keys: Float32 = np.zeros(shape, dtype=np.float32)
        self.values: Float32 = np.zeros(shape, dtype=np.float32)
        self.present = np.zeros((layers, capacity), dtype=bool)
        self.length = 0

    @property
    def capacity(self) -> int:
        """C."""
        return int(self.keys.shape[2])

    @property
    def left(self) -> int:
        """Tokens that still fit."""
        return self.capacity - self.length

    def whole(self, layer: int, length: int) -> bool:
        """Whether a layer's first ``length`` cells are all present, so that no mask is needed."""
        return bool(self.present[layer, :length].all())

    def crop(self, length: int) -> None:
        """Forget all tokens from a position on, in every layer.

        Raises:
            ConfigError: The position is beyond the length.
        """
        if not 0 <= length <= self.length:
            raise ConfigError(f"cannot crop {self.length} tokens to {length}")
        self.present[:, length : self.length] = False
        self.length = length


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AffineExit:
    """A closed-form exit: normed hidden state → affine map → the model's own head.

    Attributes:
        layer: How many layers have run, 1 to L - 1.
        weight: [H, H], [out, in]: the head reads weight @ normed + bias.
        bias: [H].
        temperature: Divides its logits, so that the top answer's probability is the chance that
            full depth answers the same.
        agreement: Share of held-out tokens whose top answer is the full depth's; ``None`` unknown.

    Raises:
        ShapeError: The arrays do not fit each other.
        ConfigError: The temperature is not above 0.
    """

    layer: int
    weight: Float32
    bias: Float32
    temperature: float = 1.0
    agreement: float | None = None

    def __post_init__(self) -> None:
        if self.bias.ndim != 1 or self.weight.shape != (len(self.bias),) * 2:
            raise ShapeError(
                f"expected a map [H, H] and [H] after layer {self.layer}, found"
                f" {list(self.weight.shape)} and {list(self.bias.shape)}"
            )
        if not self.temperature > 0:
            raise ConfigError(f"expected a temperature above 0, found {self.temperature}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gate:
    """A cheap guess, from the hidden state alone, whether an exit would agree with full depth.

    Attributes:
        layer: Where it looks.
        weight: [H] on the normed hidden state.
        bias: Added.
    """

    layer: int
    weight: Float32
    bias: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LanguageExits:
    """Exits that were fitted for one language model.

    Attributes:
        model: Name of the model.
        digest: Of its weights; exits of other weights are refused.
        affine: By layer.
        gates: By layer; empty where none were fitted.
        shortlist: Token ids of the short-list head, [S], most frequent first; ``None`` without.
        fitted_on: What text, and how many tokens.
        notes: Facts for people: calibration, versions.
    """

    model: str
    digest: str
    affine: Mapping[int, AffineExit]
    gates: Mapping[int, Gate] = field(default_factory=dict)
    shortlist: npt.NDArray[np.int64] | None = None
    fitted_on: str = ""
    notes: Mapping[str, Any] = field(default_factory=dict)

    def check(self, digest: str) -> None:
        """Refuse exits of other weights.

        Raises:
            ModelError: The digest differs.
        """
        if digest != self.digest:
            raise ModelError(
                f"these exits were fitted for {self.model!r} with weights {self.digest[:12]},"
                f" found {digest[:12]}",
                help="edgewise fit-exits MODEL --text FILE",
            )


def check_exit_layers(layers: tuple[int, ...], *, depth: int) -> tuple[int, ...]:
    """Check where one may leave: rising, at least 1, and the last is the whole depth.

    Args:
        layers: How many layers have run at each exit; the depth itself is added where missing.
        depth: L.

    Raises:
        ConfigError: A layer is below 1, beyond the depth, or named twice.
    """
    chosen = tuple(sorted({*layers, depth}))
    wrong = [k for k in layers if isinstance(k, bool) or not 1 <= k <= depth]
    if wrong or len(set(layers)) != len(layers):
        raise ConfigError(
            f"expected exits after 1 to {depth} layers, each once, found {list(layers)}",
            help="an exit after k layers is named k; the whole depth is always one",
        )
    return chosen
