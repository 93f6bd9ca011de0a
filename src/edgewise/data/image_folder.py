"""A folder of images, one subfolder per class, or images without classes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from edgewise.data.dataset import Dataset
from edgewise.data.image_file import IMAGE_SUFFIXES, find_images, is_image, read_image
from edgewise.data.limits import check_array_bytes
from edgewise.data.split import Split
from edgewise.errors import DataError, ShapeError

_MAX_LISTED = 5

Damaged = Literal["stop", "skip"]

_log = logging.getLogger(__name__)


def load_image_folder(
    folder: Path,
    *,
    split: Split,
    size: tuple[int, int] | None = None,
    damaged: Damaged = "stop",
) -> Dataset:
    """Read ``class_name/*.png`` and alike; with ``train/`` and ``test/`` above, one of the two.

    Classes are numbered by name. A folder without subfolders is a set without labels, which has
    no split: all of it is returned, whichever split is asked for.

    Args:
        folder: The folder.
        split: Which part; without ``train/`` and ``test/`` a fifth of each class is the test split.
        size: Height and width to resize to; ``None`` demands that all images have one size.
        damaged: What to do about images that cannot be read: stop and list them, or go on without
            them and list them in the log and, by number, in ``source``.

    Raises:
        DataError: No images, damaged ones (counted, five named), images beside class
            folders, or a test class that is not in ``train/``.
        ShapeError: Sizes differ and no ``size`` is given.
    """
    own_split = (folder / "train").is_dir() and (folder / "test").is_dir()
    class_names = _class_names(folder / "train" if own_split else folder)
    if not class_names:
        files = find_images(folder.iterdir())
        return load_images(files, where=folder, size=size, damaged=damaged)
    part = folder / split if own_split else folder
    files, labels = _labelled_files(part, class_names)
    images, kept = read_images(files, size=size, damaged=damaged)
    dataset = Dataset(
        name=folder.name,
        images=images,
        labels=labels[kept],
        class_names=class_names,
        split=split if own_split else "all",
        source=f"image files in {part}" + _left_out(len(files) - len(kept)),
        licence=None,
    )
    return dataset if own_split else dataset.hold_out(split)


def load_images(
    files: Sequence[Path],
    *,
    where: Path,
    size: tuple[int, int] | None = None,
    damaged: Damaged = "stop",
) -> Dataset:
    """Read image files that nobody labelled.

    Args:
        files: The images.
        where: The folder or file that the user named.
        size: Height and width to resize to; ``None`` demands that all images have one size.
        damaged: As for `load_image_folder`.

    Raises:
        DataError: There is no image, or a damaged one.
        ShapeError: Sizes differ and no ``size`` is given.
    """
    if not files:
        raise _no_images(where)
    images, kept = read_images(files, size=size, damaged=damaged)
    return Dataset(
        name=where.name,
        images=images,
        labels=None,
        class_names=(),
        split="all",
        source=f"image files without labels at {where}" + _left_out(len(files) - len(kept)),
        licence=None,
    )


def _left_out(count: int) -> str:
    return f", {count} damaged ones left out" if count else ""


def read_images(
    files: Sequence[Path], *, size: tuple[int, int] | None = None, damaged: Damaged = "stop"
) -> tuple[npt.NDArray[np.uint8], list[int]]:
    """Decode files into one array; grey ones are repeated to RGB where any is in colour.

    Args:
        files: At least one image.
        size: Height and width to resize to; ``None`` demands one size.
        damaged: ``"skip"`` goes on without files that cannot be read.

    Returns:
        uint8 [N, H, W, C], and the positions in ``files`` of those N.

    Raises:
        DataError: Files are damaged and were to stop this, all are, or the array would be
            enormous.
        ShapeError: Sizes differ and no ``size`` is given.
    """
    images: list[npt.NDArray[np.uint8]] = []
    faults: list[str] = []
    kept: list[int] = []
    first = files[0]
    for position, path in enumerate(files):
        try:
            image = read_image(path, size=size)
        except DataError as error:
            faults.append(error.message)
            continue
        if images and image.shape[:2] != images[0].shape[:2]:
            raise ShapeError(
                f"images differ in size: {first} is {images[0].shape[0]} x {images[0].shape[1]} "
                f"pixels, {path} is {image.shape[0]} x {image.shape[1]}",
                help="give one size to resize to: size=(height, width)",
            )
        first = first if images else path
        check_array_bytes(len(files) * image.size, where=f"the images beside {path}")
        images.append(image)
        kept.append(position)
    if faults:
        more = f"\n  and {len(faults) - _MAX_LISTED} more" if len(faults) > _MAX_LISTED else ""
        listing = f"{len(faults)} of {len(files)} images cannot be read:\n  "
        listing += "\n  ".join(faults[:_MAX_LISTED]) + more
        if damaged == "stop" or not images:
            raise DataError(
                listing, help="replace or remove these files, or go on without: --damaged skip"
            )
        _log.warning("%s", listing)
    channels = max(image.shape[2] for image in images)
    stacked = np.stack([np.broadcast_to(i, (*i.shape[:2], channels)) for i in images])
    return stacked, kept


def _class_names(folder: Path) -> tuple[str, ...]:
    """Subfolders that are not hidden, by name."""
    names = (p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    return tuple(sorted(names))


def _labelled_files(
    folder: Path, class_names: tuple[str, ...]
) -> tuple[list[Path], npt.NDArray[np.int64]]:
    loose = [path.name for path in folder.iterdir() if path.is_file() and is_image(path)]
    if loose:
        raise DataError(
            f"{folder} holds class folders and {len(loose)} images beside them, such as {loose[0]}",
            help="move every image into the folder of its class",
        )
    unknown = set(_class_names(folder)) - set(class_names)
    if unknown:
        raise DataError(
            f"{folder} has a class that the train folder has not: {', '.join(sorted(unknown))}",
            help=f"known classes: {', '.join(class_names)}",
        )
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(class_names):
        members = find_images((folder / name).iterdir()) if (folder / name).is_dir() else []
        files += members
        labels += [label] * len(members)
    if not files:
        raise _no_images(folder)
    return files, np.array(labels, dtype=np.int64)


def _no_images(where: Path) -> DataError:
    return DataError(
        f"{where} holds no images ({', '.join(sorted(IMAGE_SUFFIXES))})",
        help="name a folder of images, or of one folder per class",
    )
