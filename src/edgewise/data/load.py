"""Find a data set by its name or its path."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import cast, get_args

from edgewise.data import named
from edgewise.data.array_set import load_array_file
from edgewise.data.dataset import Dataset
from edgewise.data.idx_folder import holds_idx_files, load_idx_folder
from edgewise.data.image_file import IMAGE_SUFFIXES, is_image
from edgewise.data.image_folder import Damaged, load_image_folder, load_images
from edgewise.data.split import Split
from edgewise.errors import ConfigError, DataError, nearest_names

_ARRAY_SUFFIXES = frozenset({".npz", ".npy"})


def dataset_names() -> tuple[str, ...]:
    """Names that ``load_dataset`` knows: one per file in ``edgewise.data.named``.

    Example:
        >>> dataset_names()
        ('digits', 'fashion-mnist', 'fashion-mnist-sample', 'shapes')
    """
    modules = pkgutil.iter_modules(named.__path__)
    return tuple(sorted(module.name.replace("_", "-") for module in modules))


def load_dataset(  # noqa: PLR0913 - a data set has that many sides; all are optional
    name_or_path: str | Path,
    *,
    split: Split = "train",
    limit: int | None = None,
    seed: int = 0,
    cache_dir: Path | None = None,
    size: tuple[int, int] | None = None,
    damaged: Damaged = "stop",
) -> Dataset:
    """Read a data set and check it.

    A path may be a folder with the four IDX files of MNIST and its relatives, a folder of images
    in one folder per class (with ``train/`` and ``test/`` above, or not), a folder of images or
    one image without labels, or a ``.npz`` or ``.npy`` file. Labelled data without a split of its
    own is split here, a fifth of each class for test, the same way every time. Data without
    labels is returned whole for either split.

    Args:
        name_or_path: One of ``dataset_names()``, or a path. A name wins over a path of that name;
            write ``./name`` for the path.
        split: ``"train"`` or ``"test"``.
        limit: At most so many samples, each class keeping its share; ``None`` for all.
        seed: Decides which samples a limit keeps.
        cache_dir: Where downloads are kept; ``~/.cache/edgewise/data`` by default.
        size: Height and width to resize image files to; ``None`` demands that all have one size.
        damaged: ``"stop"`` at image files that cannot be read, or ``"skip"`` them; either way they
            are listed.

    Raises:
        ConfigError: An unknown name or split, a limit below one, or a missing extra.
        DataError: The data cannot be read or used.
        ShapeError: An array does not have the documented shape or dtype.

    Example:
        >>> load_dataset("shapes", split="test", limit=50).images.shape
        (50, 28, 28, 1)
    """
    if split not in get_args(Split):
        raise ConfigError(
            f"unknown split {split!r}", help=nearest_names(str(split), get_args(Split))
        )
    if damaged not in get_args(Damaged):
        raise ConfigError(
            f"expected damaged images to stop or skip, found {damaged!r}", help="damaged='skip'"
        )
    if size is not None and ([type(n) is int and n > 0 for n in size] != [True, True]):
        raise ConfigError(
            f"expected a size of height and width, found {size!r}",
            help="for example size=(224, 224)",
        )
    if isinstance(name_or_path, str) and name_or_path in dataset_names():
        dataset = _load_named(name_or_path, split=split, cache_dir=cache_dir)
    else:
        dataset = _load_path(name_or_path, split=split, size=size, damaged=damaged)
    if limit is None or limit >= len(dataset):
        return dataset
    return dataset.take(limit, seed=seed)


def _load_named(name: str, *, split: Split, cache_dir: Path | None) -> Dataset:
    module = importlib.import_module(f"{named.__name__}.{name.replace('-', '_')}")
    load = cast("Callable[..., Dataset]", module.load)
    return load(split=split, cache_dir=cache_dir)


def _load_path(
    name_or_path: str | Path, *, split: Split, size: tuple[int, int] | None, damaged: Damaged
) -> Dataset:
    path = Path(name_or_path)
    try:
        if path.is_dir():
            if holds_idx_files(path):
                return load_idx_folder(path, split=split)
            return load_image_folder(path, split=split, size=size, damaged=damaged)
        if path.is_file():
            if is_image(path):
                return load_images([path], where=path, size=size)
            if path.suffix in _ARRAY_SUFFIXES:
                return load_array_file(path, split=split)
            raise DataError(
                f"{path} is not a kind of file that holds images: its name ends in "
                f"{path.suffix or 'nothing'!r}",
                help=f"use one of {', '.join(sorted(IMAGE_SUFFIXES | _ARRAY_SUFFIXES))}",
            )
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror or error}", help="check the path and its rights"
        ) from error
    if path.name != str(name_or_path) or path.suffix in IMAGE_SUFFIXES | _ARRAY_SUFFIXES:
        raise DataError(f"{path} does not exist", help="check the path")
    raise ConfigError(
        f"unknown data set {str(name_or_path)!r}, and there is no file or folder of that name",
        help=nearest_names(str(name_or_path), dataset_names()),
    )
