"""A tiny set drawn by numpy for tests: ten shapes, 28 x 28, with noise; no file, no download."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgewise.data.dataset import Dataset
from edgewise.data.split import Split

CLASS_NAMES = (
    "disc",
    "ring",
    "square",
    "frame",
    "triangle",
    "plus",
    "cross",
    "rows",
    "columns",
    "checkers",
)
SIZE = 28
_PER_CLASS: dict[Split, int] = {"train": 60, "test": 20}
_SEED: dict[Split, int] = {"train": 20, "test": 21}
_NOISE = 12.0  # standard deviation in pixel units; contrast below is at least 90


def load(*, split: Split, cache_dir: Path | None = None) -> Dataset:
    """Draw one split: 60 (train) or 20 (test) images per class, the same every time.

    Args:
        split: ``"train"`` or ``"test"``; different seeds, so no image is in both.
        cache_dir: Not used: nothing is stored.
    """
    del cache_dir
    rng = np.random.default_rng(_SEED[split])
    labels = np.tile(np.arange(len(CLASS_NAMES), dtype=np.int64), _PER_CLASS[split])
    return Dataset(
        name="shapes",
        images=_draw(labels, rng=rng),
        labels=labels,
        class_names=CLASS_NAMES,
        split=split,
        source=f"drawn by Edgewise, numpy generator seed {_SEED[split]}",
        licence="Apache-2.0",
    )


def _draw(labels: npt.NDArray[np.int64], *, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Images uint8 [N, 28, 28, 1]: a shape of random place, size and contrast for each label."""

    def draw(low: float, high: float) -> npt.NDArray[np.float64]:
        return rng.uniform(low, high, size=(labels.size, 1, 1))

    radius, middle = draw(7.0, 10.0), (SIZE - 1) / 2
    grid = np.arange(SIZE, dtype=np.float64)
    y = (grid[:, np.newaxis] - middle - draw(-3.0, 3.0)) / radius  # [N, 28, 1], shape in -1..1
    x = (grid[np.newaxis, :] - middle - draw(-3.0, 3.0)) / radius  # [N, 1, 28]
    round_ = np.hypot(y, x)
    square = np.maximum(np.abs(y), np.abs(x))
    inside, thin = square <= 1.0, 0.25
    row, column = (np.floor((axis + 1.0) * 2.5).astype(int) % 2 == 0 for axis in (y, x))
    masks = (
        round_ <= 1.0,
        (round_ <= 1.0) & (round_ >= 0.6),
        inside,
        inside & (square >= 0.6),
        inside & (2.0 * np.abs(x) <= y + 1.0),
        inside & (np.minimum(np.abs(y), np.abs(x)) <= thin),
        inside & (np.abs(np.abs(y) - np.abs(x)) <= thin),
        inside & row,
        inside & column,
        inside & (row == column),
    )
    picked = np.select([(labels == k)[:, np.newaxis, np.newaxis] for k in range(10)], masks)
    background, contrast = draw(0.0, 60.0), draw(90.0, 180.0)
    pixels = background + contrast * picked + rng.normal(0.0, _NOISE, size=picked.shape)
    drawn: npt.NDArray[np.uint8] = np.clip(np.rint(pixels), 0, 255).astype(np.uint8)
    return drawn[..., np.newaxis]
