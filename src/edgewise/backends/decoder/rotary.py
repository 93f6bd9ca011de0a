"""Rotary positions: the angles by which queries and keys are turned."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgewise.model.transformer import Architecture

Float32 = npt.NDArray[np.float32]


def rotary_tables(architecture: Architecture, length: int) -> tuple[Float32, Float32]:
    """Cosines and sines of every position.

    A head's first half pairs with its second: (x, y) becomes (x cos - y sin, y cos + x sin).

    Args:
        architecture: Tells the base of the angles and the width of a head.
        length: Positions, T.

    Returns:
        cos and sin, [T, head_dim / 2].

    Source:
        Su et al., RoFormer, arXiv 2104.09864, eq. 34, with the pairs as transformers lays them.
        Angles are rounded as transformers rounds them, to float32 before the cosine.
    """
    half = np.arange(0, architecture.head_dim, 2, dtype=np.float32) / architecture.head_dim
    inverse = np.float32(1.0) / np.float32(architecture.rope_theta) ** half
    angles = np.outer(np.arange(length, dtype=np.float32), inverse.astype(np.float32))
    return np.cos(angles), np.sin(angles)
