"""Read numpy's ``.npy`` and ``.npz`` files without trusting what they claim."""

from __future__ import annotations

import math
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from edgewise.data.limits import check_array_bytes
from edgewise.errors import DataError, ShapeError

_REPLACE_FILE = "write the file again with numpy.save or numpy.savez"
_DAMAGE = (OSError, ValueError, EOFError, zlib.error, zipfile.BadZipFile, NotImplementedError)


def read_npy(path: Path) -> npt.NDArray[Any]:
    """The array of a ``.npy`` file.

    Raises:
        DataError: The file is missing, damaged, truncated, enormous, or needs pickle.
        ShapeError: The array is empty.
    """
    try:
        with path.open("rb") as stream:
            return _read(stream, path.stat().st_size, where=str(path))
    except DataError:
        raise
    except _DAMAGE as error:
        raise _damaged(path, error) from error


def npz_names(path: Path) -> tuple[str, ...]:
    """Names of the arrays in a ``.npz`` file; nothing is read yet.

    Raises:
        DataError: The file is missing or damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return tuple(n.removesuffix(".npy") for n in archive.namelist() if n.endswith(".npy"))
    except _DAMAGE as error:
        raise _damaged(path, error) from error


def read_npz(path: Path, name: str) -> npt.NDArray[Any]:
    """One array of a ``.npz`` file.

    Args:
        path: The file.
        name: One of ``npz_names(path)``.

    Raises:
        DataError: The array is missing, damaged, truncated, enormous, or needs pickle.
        ShapeError: The array is empty.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            member = archive.getinfo(f"{name}.npy")
            with archive.open(member) as stream:
                return _read(stream, member.file_size, where=f"{name!r} in {path}")
    except DataError:
        raise
    except KeyError as error:
        raise DataError(f"{path} has no array {name!r}", help=_REPLACE_FILE) from error
    except (*_DAMAGE, RuntimeError) as error:  # RuntimeError: the member is encrypted
        raise _damaged(path, error) from error


def to_pixels(array: npt.NDArray[Any], *, where: str) -> npt.NDArray[np.uint8]:
    """Stored images as uint8 [N, H, W, C].

    Whole numbers must lie in 0..255; floating-point numbers in 0..1, which are scaled to 0..255
    and rounded.

    Args:
        array: [H, W], [N, H, W] or [N, H, W, C] with C = 1 or 3.
        where: The file, for messages.

    Raises:
        ShapeError: Another shape, or a dtype that is no number.
        DataError: NaN, or values outside the range.
    """
    if array.ndim not in {2, 3, 4} or (array.ndim == 4 and array.shape[-1] not in {1, 3}):
        first = array.ndim == 4 and array.shape[1] in {1, 3}
        raise ShapeError(
            f"{where}: expected images [H, W], [N, H, W] or [N, H, W, C] with C 1 or 3, found "
            f"{list(array.shape)}",
            help="move the channel last: images.transpose(0, 2, 3, 1)" if first else "reshape them",
        )
    if array.dtype.kind not in "uif":
        raise ShapeError(
            f"{where}: expected whole or floating-point numbers, found dtype {array.dtype}",
            help="store pixels as uint8 0..255",
        )
    if array.dtype != np.uint8:
        low, high = array.min(), array.max()
        limit = 1 if array.dtype.kind == "f" else 255
        if not (low >= 0 and high <= limit):  # also true for NaN, which min and max pass on
            raise DataError(
                f"{where}: expected pixels 0..{limit} in {array.dtype}, found {low} to {high}",
                help="store pixels as uint8 0..255, or as floats 0..1 without NaN",
            )
        scaled = np.rint(array.astype(np.float32) * 255) if limit == 1 else array
        array = scaled.astype(np.uint8)
    if array.ndim == 2:
        array = array[np.newaxis]
    return array if array.ndim == 4 else array[..., np.newaxis]


def _read(stream: IO[bytes], size_bytes: int, *, where: str) -> npt.NDArray[Any]:
    """Check the header against the bytes that are there, then read."""
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    elif version == (2, 0):
        shape, _, dtype = np.lib.format.read_array_header_2_0(stream)
    else:
        raise DataError(
            f"{where} has format version {version}, expected 1.0 or 2.0", help=_REPLACE_FILE
        )
    if dtype.hasobject:
        raise DataError(
            f"{where} holds Python objects (dtype {dtype}), which are never unpickled",
            help="store plain numbers, for example array.astype('uint8')",
        )
    found_bytes = size_bytes - stream.tell()
    expected_bytes = math.prod(shape) * dtype.itemsize
    check_array_bytes(expected_bytes, where=where)
    if found_bytes != expected_bytes:
        fault = "is truncated" if found_bytes < expected_bytes else "has bytes left over"
        raise DataError(
            f"{where} {fault}: its header {list(shape)} of {dtype} asks for {expected_bytes} "
            f"bytes, found {found_bytes}",
            help=_REPLACE_FILE,
        )
    if expected_bytes == 0:
        raise ShapeError(f"{where} is empty: its shape is {list(shape)}", help="store some data")
    stream.seek(0)
    array: npt.NDArray[Any] = np.lib.format.read_array(stream, allow_pickle=False)
    return array


def _damaged(path: Path, error: Exception) -> DataError:
    said = (error.strerror if isinstance(error, OSError) else None) or error
    return DataError(f"cannot read {path}: {said}", help=_REPLACE_FILE)
