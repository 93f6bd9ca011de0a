"""A thousand test images of Fashion-MNIST that come with the package, for demos and checks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from edgewise.data.array_set import load_array_file
from edgewise.data.dataset import Dataset
from edgewise.data.split import Split
from edgewise.errors import ConfigError

_FILE = Path(__file__).parents[2] / "shipped" / "fashion-mnist-sample" / "sample.npz"


def load(*, split: Split, cache_dir: Path | None = None) -> Dataset:
    """Read it; all of it is test data.

    Args:
        split: ``"test"``.
        cache_dir: Not used: the data comes with the package.

    Raises:
        ConfigError: Another split was asked for.
    """
    del cache_dir
    if split != "test":
        raise ConfigError(
            f"'fashion-mnist-sample' is test data only, found split={split!r}",
            help="use 'fashion-mnist' to fit something",
        )
    return replace(
        load_array_file(_FILE, split="test"),
        name="fashion-mnist-sample",
        split="test",
        source="1,000 of the 10,000 test images of Fashion-MNIST, 100 of each class",
        licence="MIT",
    )
