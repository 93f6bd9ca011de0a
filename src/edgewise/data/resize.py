"""Bilinear resizing in numpy, the same as torch's, with nothing but two small matrix products."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt


def resize_bilinear(images: npt.NDArray[Any], *, size: tuple[int, int]) -> npt.NDArray[np.float32]:
    """Resize the last two axes with half-pixel centres, without anti-aliasing.

    A bilinear resize is linear in the rows and in the columns, so each is one matrix with at most
    two numbers per output line. Only the input lines that those numbers touch are read, so that
    shrinking a photo costs no more than the output is worth. Strong shrinking aliases, as it does
    in torch: scale photos down beforehand where that matters.

    Args:
        images: [..., H, W], any real dtype, H and W at least 1.
        size: Height and width to resize to.

    Returns:
        [..., h, w]; a copy even where the size stays the same.

    Source:
        ``torch.nn.functional.interpolate(mode="bilinear", align_corners=False)``, against which
        the tests compare.

    Example:
        >>> resize_bilinear(np.array([[0.0, 4.0]]), size=(1, 4))
        array([[0., 1., 3., 4.]], dtype=float32)
    """
    height, width = images.shape[-2:]
    rows, row_weights = _taps(height, size[0])
    columns, column_weights = _taps(width, size[1])
    # Lines are picked before the cast: in uint8 that moves a quarter of the bytes.
    picked = images if rows.size == height else np.take(images, rows, axis=-2)
    picked = picked if columns.size == width else np.take(picked, columns, axis=-1)
    resized = picked.astype(np.float32)  # [..., used rows, used columns]
    if width != size[1]:
        resized = resized @ column_weights.T  # [..., used rows, w]
    if height != size[0]:
        resized = row_weights @ resized  # [..., h, w]
    return resized


@lru_cache(maxsize=64)
def _taps(size_in: int, size_out: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float32]]:
    """The input lines one axis needs, [used], and the weight of each, [out, used]."""
    centre = (np.arange(size_out) + 0.5) * (size_in / size_out) - 0.5
    centre = np.maximum(centre, 0.0)  # outside the first centre the edge is repeated
    low = np.minimum(np.floor(centre).astype(np.intp), size_in - 1)
    high = np.minimum(low + 1, size_in - 1)
    used, position = np.unique(np.concatenate([low, high]), return_inverse=True)
    weights = np.zeros((size_out, used.size))
    line = np.arange(size_out)
    np.add.at(weights, (line, position[:size_out]), 1.0 - (centre - low))
    np.add.at(weights, (line, position[size_out:]), centre - low)
    return used, weights.astype(np.float32)
