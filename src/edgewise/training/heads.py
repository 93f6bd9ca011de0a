"""The training form of an exit head, and how it folds into the form that runs.

    conv    1x1 convolution → batch normalisation → ReLU → mean over positions → linear
    pool    mean over positions → linear → batch normalisation → ReLU → linear
    token   mean over tokens → as pool

Features are scaled to mean 0 and variance 1 per channel first, and what reaches the last map is
normalised once more: averages over positions hardly differ between images, and without that they
are learnt slowly. At inference all of this is affine and disappears in the two maps.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from edgewise.frontends.torch_module import import_torch
from edgewise.model.heads import ExitHead, HeadSpec
from edgewise.training.features import Float16

Float32 = npt.NDArray[np.float32]
_EPSILON = 1e-5
_MOMENTUM = 0.1
_STATISTICS = (
    "norm.mean", "norm.variance", "scale.mean", "scale.std", "pooled.mean", "pooled.variance",
)  # fmt: skip


class TrainableHead:
    """A head whose arrays torch may fit.

    Attributes:
        spec: Its shape.
        arrays: Torch tensors by name: ``hidden.weight`` [h, C], ``norm.weight`` and ``norm.bias``
            [h], ``linear.weight`` [classes, h], ``linear.bias`` [classes], and the statistics
            ``norm.mean``, ``norm.variance``, ``pooled.mean``, ``pooled.variance`` [h],
            ``scale.mean``, ``scale.std`` [C].
    """

    def __init__(self, spec: HeadSpec, arrays: dict[str, Any]) -> None:
        self._torch = import_torch()
        self.spec = spec
        self.arrays = arrays

    @classmethod
    def draw(cls, spec: HeadSpec, features: Float16, *, seed: int) -> TrainableHead:
        """A head to start from: the same seed draws the same weights.

        Args:
            spec: Its shape.
            features: [N, C], or [N, P, C] for a convolutional head: scales are measured on them.
            seed: Of the weights.
        """
        torch = import_torch()
        rng = np.random.default_rng(seed)
        mean, std = _moments(features)
        hidden = rng.standard_normal((spec.width, spec.channels)) * math.sqrt(2 / spec.channels)
        linear = rng.standard_normal((spec.num_classes, spec.width)) * math.sqrt(1 / spec.width)
        drawn = {
            "hidden.weight": hidden,
            "norm.weight": np.ones(spec.width),
            "norm.bias": np.zeros(spec.width),
            "linear.weight": linear,
            "linear.bias": np.zeros(spec.num_classes),
            "norm.mean": np.zeros(spec.width),
            "norm.variance": np.ones(spec.width),
            "pooled.mean": np.zeros(spec.width),
            "pooled.variance": np.ones(spec.width),
            "scale.mean": mean,
            "scale.std": std,
        }
        return cls(spec, {k: torch.from_numpy(v.astype(np.float32)) for k, v in drawn.items()})

    def parameters(self) -> dict[str, Any]:
        """The tensors that are fitted; the rest are statistics."""
        return {k: v for k, v in self.arrays.items() if k not in _STATISTICS}

    def logits(self, features: Any, *, training: bool) -> Any:
        """Answer.

        Args:
            features: Float32 [B, C] pooled vectors, or [B, P, C] positions for ``conv``.
            training: Normalise by the batch and update the running statistics.

        Returns:
            [B, classes].
        """
        a, functional = self.arrays, self._torch.nn.functional
        x = (features - a["scale.mean"]) / a["scale.std"]
        flat = functional.linear(x.reshape(-1, x.shape[-1]), a["hidden.weight"])  # [B·P, h]
        flat = functional.batch_norm(
            flat,
            a["norm.mean"],
            a["norm.variance"],
            a["norm.weight"],
            a["norm.bias"],
            training=training,
            momentum=_MOMENTUM,
            eps=_EPSILON,
        )
        hidden = flat.relu().reshape(*x.shape[:-1], self.spec.width)
        if hidden.ndim == 3:
            hidden = hidden.mean(1)
        hidden = functional.batch_norm(
            hidden,
            a["pooled.mean"],
            a["pooled.variance"],
            training=training,
            momentum=_MOMENTUM,
            eps=_EPSILON,
        )
        return functional.linear(hidden, a["linear.weight"], a["linear.bias"])

    def folded(self) -> ExitHead:
        """The same function in the form that backends run."""
        a = {k: v.detach().numpy().astype(np.float64) for k, v in self.arrays.items()}
        gain = a["norm.weight"] / np.sqrt(a["norm.variance"] + _EPSILON)  # [h]
        weight = gain[:, None] * a["hidden.weight"] / a["scale.std"]  # [h, C]
        bias = a["norm.bias"] - gain * a["norm.mean"] - weight @ a["scale.mean"]
        last = a["linear.weight"] / np.sqrt(a["pooled.variance"] + _EPSILON)  # [classes, h]
        arrays = {
            "hidden.weight": weight,
            "hidden.bias": bias,
            "linear.weight": last,
            "linear.bias": a["linear.bias"] - last @ a["pooled.mean"],
        }
        return ExitHead(
            spec=self.spec, weights={k: v.astype(np.float32) for k, v in arrays.items()}
        )


def _moments(features: Float16) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Mean and standard deviation of each channel; a channel that never changes gets 1."""
    channels = features.shape[-1]
    total, square, count = np.zeros(channels), np.zeros(channels), 0
    for start in range(0, len(features), 1024):
        part = features[start : start + 1024].reshape(-1, channels).astype(np.float64)
        total += part.sum(axis=0)
        square += (part**2).sum(axis=0)
        count += len(part)
    mean = total / count
    std = np.sqrt(np.maximum(square / count - mean**2, 0.0))
    return mean, np.where(std > 1e-4 * np.abs(mean) + 1e-6, std, 1.0)
