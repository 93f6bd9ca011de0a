from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

WriteImage = Callable[..., Path]
Pixels = npt.NDArray[np.uint8]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture
def write_image() -> WriteImage:
    """Write a small image of one colour, or the given pixels."""
    image_module = pytest.importorskip("PIL.Image", reason="image files need Pillow")

    def write(path: Path, *, size: tuple[int, int] = (6, 5), grey: bool = False) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        height, width = size
        if grey:
            image_module.new("L", (width, height), 100).save(path)
        else:
            image_module.new("RGB", (width, height), (200, 100, 50)).save(path)
        return path

    return write


def idx_bytes(array: npt.NDArray[np.uint8]) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.tobytes()


@pytest.fixture
def idx_folder(tmp_path: Path, rng: np.random.Generator) -> Path:
    """Twenty training and ten test images in the layout of MNIST, half of them compressed."""
    for prefix, n in (("train", 20), ("t10k", 10)):
        images = rng.integers(0, 256, size=(n, 4, 3), dtype=np.uint8)
        labels = np.arange(n, dtype=np.uint8) % 10
        (tmp_path / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx_bytes(images)))
        (tmp_path / f"{prefix}-labels-idx1-ubyte").write_bytes(idx_bytes(labels))
    return tmp_path
