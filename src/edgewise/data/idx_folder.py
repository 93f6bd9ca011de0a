"""A folder that holds images and labels as MNIST and Fashion-MNIST do."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from edgewise.data.dataset import Dataset
from edgewise.data.idx import parse_idx, read_bytes
from edgewise.data.split import Split
from edgewise.errors import DataError, ShapeError

NUM_CLASSES = 10
_PREFIX: dict[Split, str] = {"train": "train", "test": "t10k"}


def idx_file_names(split: Split) -> tuple[str, str]:
    """Names of the image and label file of a split, without ``.gz``."""
    prefix = _PREFIX[split]
    return f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"


def find_idx_file(folder: Path, name: str) -> Path | None:
    """The file of that name, plain or with ``.gz``; ``None`` where there is neither."""
    candidates = (folder / name, folder / f"{name}.gz")
    return next((path for path in candidates if path.is_file()), None)


def holds_idx_files(folder: Path) -> bool:
    """Whether any file of the layout is in the folder."""
    names = (*idx_file_names("train"), *idx_file_names("test"))
    return any(find_idx_file(folder, name) is not None for name in names)


def load_idx_folder(
    folder: Path, *, split: Split, content_sha256: Mapping[str, str] | None = None
) -> Dataset:
    """Read one split. The files hold class numbers only, so the classes are named 0 to 9.

    Args:
        folder: Where the four files are.
        split: ``"test"`` reads the files that start with ``t10k``.
        content_sha256: Expected SHA-256 of the uncompressed files by name without ``.gz``;
            ``None`` accepts any content.

    Raises:
        DataError: A file is missing, damaged or not the expected one, or a label has no class.
        ShapeError: A file does not hold images or labels, or the counts differ.
    """
    arrays = []
    for file_name in idx_file_names(split):
        path = find_idx_file(folder, file_name)
        if path is None:
            raise DataError(
                f"{folder} has no {file_name} and no {file_name}.gz",
                help="put both the image and the label file of the split there",
            )
        raw = read_bytes(path)
        if content_sha256 is not None:
            found = hashlib.sha256(raw).hexdigest()
            if found != content_sha256[file_name]:
                raise DataError(
                    f"{path} does not have the published content: expected SHA-256 "
                    f"{content_sha256[file_name]} uncompressed, found {found}",
                    help=f"replace the file, or load your own data by its path: {folder}",
                )
        arrays.append(parse_idx(raw, where=str(path)))
    images, labels = arrays
    if images.dtype != np.uint8 or images.ndim != 3:
        raise ShapeError(
            f"images in {folder}: expected uint8 [N, H, W], found {images.dtype} "
            f"{list(images.shape)}",
            help="the image file must be of the idx3-ubyte kind",
        )
    if labels.shape != images.shape[:1] or labels.dtype != np.uint8:
        raise ShapeError(
            f"labels in {folder}: expected uint8 [{images.shape[0]}], one per image, found "
            f"{labels.dtype} {list(labels.shape)}",
            help="use the image and the label file of the same split",
        )
    return Dataset(
        name=folder.name,
        images=images[..., np.newaxis],  # [N, H, W, 1]
        labels=labels.astype(np.int64),
        class_names=tuple(str(label) for label in range(NUM_CLASSES)),
        split=split,
        source=f"IDX files in {folder}",
        licence=None,
    )
