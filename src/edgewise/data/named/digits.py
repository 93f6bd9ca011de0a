"""Handwritten digits from scikit-learn: 1797 grey images, 8 x 8, ten classes, no download."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np

from edgewise.data.dataset import Dataset
from edgewise.data.split import Split
from edgewise.errors import ConfigError

_MAX_STORED = 16  # scikit-learn keeps the counts of 4 x 4 blocks, 0..16


def load(*, split: Split, cache_dir: Path | None = None) -> Dataset:
    """Read one split; a fifth of each class is the test split, the same on every machine.

    Args:
        split: ``"train"`` or ``"test"``.
        cache_dir: Not used: the data comes with scikit-learn.

    Raises:
        ConfigError: scikit-learn is not installed.
    """
    del cache_dir
    try:
        datasets = importlib.import_module("sklearn.datasets")
    except ImportError as error:
        raise ConfigError(
            "the data set 'digits' comes with scikit-learn, which is not installed",
            help="pip install 'edgewise[data]'",
        ) from error
    digits = datasets.load_digits()
    pixels = np.rint(digits.images * (255 / _MAX_STORED)).astype(np.uint8)
    whole = Dataset(
        name="digits",
        images=pixels[..., np.newaxis],  # [N, 8, 8, 1]
        labels=digits.target.astype(np.int64),
        class_names=tuple(str(digit) for digit in range(10)),
        split="all",
        source="Optical Recognition of Handwritten Digits by E. Alpaydin and C. Kaynak (UCI "
        "Machine Learning Repository), the copy in scikit-learn",
        licence="CC BY 4.0",
    )
    return whole.hold_out(split)
