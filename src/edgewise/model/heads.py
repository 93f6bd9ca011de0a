"""Exit heads: small classifiers at a stage's end, described by their feature shape alone.

Inference form: the normalisation of a trained head is folded into its first linear map, so a head
is two linear maps with a ReLU between. `edgewise.training` fits them; every backend runs them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from edgewise.errors import ConfigError, ShapeError, nearest_names

Float32 = npt.NDArray[np.float32]
HeadKind = Literal["conv", "pool", "token"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """Shape of an exit head.

    Attributes:
        kind: ``"conv"``: 1x1 convolution to ``width``, normalisation, ReLU, global average
            pooling, linear. ``"pool"``: pooling first, then the same on one vector: tens to
            thousands of times cheaper. ``"token"``: mean over tokens, then the same.
        feature_shape: Shape of the boundary tensor for one sample, batch axis 1 first:
            [1, C, H, W] for ``conv`` and ``pool``, [1, N, C] for ``token``.
        width: Hidden width h.
        num_classes: Classes answered.
    """

    kind: HeadKind
    feature_shape: tuple[int, ...]
    width: int
    num_classes: int

    def __post_init__(self) -> None:
        if self.kind not in get_args(HeadKind):
            raise ConfigError(
                f"unknown head kind {self.kind!r}",
                help=nearest_names(self.kind, get_args(HeadKind)),
            )
        rank = 3 if self.kind == "token" else 4
        if len(self.feature_shape) != rank:
            raise ShapeError(
                f"a {self.kind!r} head needs features of rank {rank}, found shape"
                f" {self.feature_shape}"
            )
        if self.width < 1 or self.num_classes < 1:
            raise ConfigError(
                f"expected a head width and class count above zero, found {self.width} and"
                f" {self.num_classes}"
            )

    @property
    def channels(self) -> int:
        """Channels C of the features."""
        return self.feature_shape[-1] if self.kind == "token" else self.feature_shape[1]

    @property
    def positions(self) -> int:
        """Positions that are averaged: H·W, or the number of tokens."""
        return self.feature_shape[1] if self.kind == "token" else math.prod(self.feature_shape[2:])

    @property
    def flops(self) -> float:
        """Floating-point operations for one sample; a multiply-add counts two."""
        hidden = 2.0 * self.channels * self.width * (self.positions if self.kind == "conv" else 1)
        pooled = self.positions * (self.width if self.kind == "conv" else self.channels)
        return hidden + pooled + 2.0 * self.width * self.num_classes

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name to shape of the head's arrays."""
        return {
            "hidden.weight": (self.width, self.channels),
            "hidden.bias": (self.width,),
            "linear.weight": (self.num_classes, self.width),
            "linear.bias": (self.num_classes,),
        }


def default_head_spec(
    feature_shape: tuple[int, ...], num_classes: int, *, kind: str = "auto", width: int = 128
) -> HeadSpec:
    """Choose a head from the feature shape alone.

    Args:
        feature_shape: [1, C, H, W] or [1, N, C].
        num_classes: Classes to answer.
        kind: ``"auto"`` takes ``token`` for token features and ``pool`` for maps; or a kind.
        width: Hidden width.

    Raises:
        ShapeError: The features are neither maps nor tokens, or do not fit ``kind``.
        ConfigError: ``kind`` is unknown.
    """
    if len(feature_shape) not in (3, 4):
        raise ShapeError(
            f"an exit head needs features [1, C, H, W] or [1, N, C], found {feature_shape}",
            help="choose exits at other cuts: `edgewise stage MODEL --cuts` lists them",
        )
    if len(feature_shape) == 3:
        kind = "token"
    elif kind in ("auto", "token"):
        kind = "pool"
    return HeadSpec(
        kind=kind,  # type: ignore[arg-type]  # checked by HeadSpec
        feature_shape=feature_shape,
        width=width,
        num_classes=num_classes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitHead:
    """A fitted head.

    Attributes:
        spec: Its shape.
        weights: ``hidden.weight`` [h, C], ``hidden.bias`` [h], ``linear.weight`` [classes, h],
            ``linear.bias`` [classes], float32, normalisation folded in.
        temperature: Divides the logits before a softmax is read as a probability.

    Raises:
        ShapeError: An array is missing or has another shape than the spec says.
    """

    spec: HeadSpec
    weights: Mapping[str, Float32] = field(repr=False)
    temperature: float = 1.0

    def __post_init__(self) -> None:
        for name, shape in self.spec.weight_shapes().items():
            found = self.weights.get(name)
            if found is None or found.shape != shape:
                raise ShapeError(
                    f"head array {name!r} has shape {None if found is None else found.shape},"
                    f" expected {shape}"
                )

    def __call__(self, features: Float32) -> Float32:
        """Answer in plain numpy: the reference every backend is compared with.

        Args:
            features: [B, C, H, W] or [B, N, C].

        Returns:
            Logits [B, classes], not divided by the temperature.
        """
        w = self.weights
        if self.spec.kind == "conv":
            flat = features.reshape(features.shape[0], self.spec.channels, -1)  # [B, C, P]
            hidden = np.einsum("hc,bcp->bhp", w["hidden.weight"], flat, optimize=True)
            pooled = np.maximum(hidden + w["hidden.bias"][None, :, None], 0).mean(axis=2)  # [B, h]
        else:
            axes = 1 if self.spec.kind == "token" else (2, 3)
            mean = features.mean(axis=axes)  # [B, C]
            pooled = np.maximum(mean @ w["hidden.weight"].T + w["hidden.bias"], 0)  # [B, h]
        return np.asarray(pooled @ w["linear.weight"].T + w["linear.bias"], dtype=np.float32)


def random_head(spec: HeadSpec, rng: np.random.Generator) -> ExitHead:
    """An untrained head, for timing: its cost is real, its answers are not."""
    weights = {
        name: (rng.standard_normal(shape) / math.sqrt(shape[-1])).astype(np.float32)
        for name, shape in spec.weight_shapes().items()
    }
    return ExitHead(spec=spec, weights=weights)
