"""A data set in one ``.npz`` or ``.npy`` file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgewise.data.array_file import npz_names, read_npy, read_npz, to_pixels
from edgewise.data.dataset import Dataset
from edgewise.data.split import Split
from edgewise.errors import DataError, ShapeError

IMAGE_NAMES = ("images", "x")
LABEL_NAMES = ("labels", "y")
_MAX_CLASSES = 65_536  # more is a mistake: each class gets a name


def load_array_file(path: Path, *, split: Split) -> Dataset:
    """Read images, and labels where the file has them.

    A ``.npz`` file holds ``x_train``, ``y_train``, ``x_test`` and ``y_test``, or ``images`` and
    ``labels``, or ``x`` and ``y``; ``class_names`` may be added. A ``.npy`` file holds images
    only. See ``to_pixels`` for shapes and values.

    Args:
        path: The file.
        split: Which part. Where the file has labels but no split of its own, a fifth of each
            class is the test split; without labels there is no split and all is returned.

    Raises:
        DataError: The file cannot be read or used, or a label has no class.
        ShapeError: An array has another shape or dtype than documented.
    """
    if path.suffix == ".npy":
        return _unlabelled(path, read_npy(path))
    names = npz_names(path)
    image_name = find_name(names, (f"x_{split}", *IMAGE_NAMES), where=path)
    images = read_npz(path, image_name)
    own_split = image_name == f"x_{split}"
    wanted = (f"y_{split}",) if own_split else LABEL_NAMES
    label_name = next((name for name in wanted if name in names), None)
    if label_name is None:
        return _unlabelled(path, images)
    where = f"{label_name!r} in {path}"
    labels = _whole_numbers(read_npz(path, label_name), where=where)
    class_names = _class_names(path, names, labels, where=where)
    pixels = to_pixels(images, where=f"{image_name!r} in {path}")
    dataset = Dataset(
        name=path.stem,
        images=pixels,
        labels=labels,
        class_names=class_names,
        split=split if own_split else "all",
        source=f"arrays {image_name!r} and {label_name!r} in {path}",
        licence=None,
    )
    return dataset if own_split else dataset.hold_out(split)


def find_name(names: tuple[str, ...], wanted: tuple[str, ...], *, where: Path) -> str:
    """The first wanted array that the file has.

    Raises:
        DataError: The file has none of them.
    """
    for name in wanted:
        if name in names:
            return name
    raise DataError(
        f"{where} has no array {' or '.join(map(repr, wanted))}; it has "
        f"{', '.join(map(repr, names)) or 'none'}",
        help="write it with numpy.savez(path, images=..., labels=...)",
    )


def _unlabelled(path: Path, images: npt.NDArray[Any]) -> Dataset:
    return Dataset(
        name=path.stem,
        images=to_pixels(images, where=str(path)),
        labels=None,
        class_names=(),
        split="all",
        source=f"images without labels in {path}",
        licence=None,
    )


def _whole_numbers(labels: npt.NDArray[Any], *, where: str) -> npt.NDArray[np.int64]:
    if labels.dtype.kind not in "ui" or labels.ndim != 1:
        raise ShapeError(
            f"{where}: expected whole numbers [N], found {labels.dtype} {list(labels.shape)}",
            help="store one class number per image, for example labels.astype('int64').ravel()",
        )
    return labels.astype(np.int64)


def _class_names(
    path: Path, names: tuple[str, ...], labels: npt.NDArray[np.int64], *, where: str
) -> tuple[str, ...]:
    if "class_names" in names:
        stored = read_npz(path, "class_names")
        if stored.dtype.kind != "U" or stored.ndim != 1:
            raise ShapeError(
                f"'class_names' in {path}: expected a list of strings, found {stored.dtype} "
                f"{list(stored.shape)}",
                help="write class_names=np.array(['cat', 'dog'])",
            )
        return tuple(str(name) for name in stored)
    high = int(labels.max())
    if high >= _MAX_CLASSES:
        raise DataError(
            f"{where}: expected class numbers below {_MAX_CLASSES}, found {high}",
            help="number the classes from 0 without gaps",
        )
    return tuple(str(label) for label in range(high + 1))
