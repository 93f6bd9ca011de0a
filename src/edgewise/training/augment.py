"""Random crops and flips of a batch of images, as CIFAR networks are trained with."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]


def crop_and_flip(images: Pixels, *, padding: int, flip: bool, rng: np.random.Generator) -> Pixels:
    """Move each image by up to ``padding`` pixels each way, black outside, and mirror every other.

    Args:
        images: [B, H, W, C].
        padding: Pixels; 0 moves nothing.
        flip: Whether to mirror left and right with probability one half.
        rng: Decides which and how far.

    Returns:
        [B, H, W, C], new.
    """
    count, height, width, _ = images.shape
    rows = np.arange(height)[None, :] + rng.integers(0, 2 * padding + 1, (count, 1))  # [B, H]
    columns = np.arange(width)[None, :] + rng.integers(0, 2 * padding + 1, (count, 1))  # [B, W]
    mirrored = rng.random(count) < 0.5 if flip else np.zeros(count, dtype=bool)
    columns[mirrored] = columns[mirrored, ::-1]
    padded = np.pad(images, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    moved = padded[np.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]
    return np.ascontiguousarray(moved)
