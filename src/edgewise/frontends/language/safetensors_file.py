"""Weights in the safetensors format, read without a copy and written one array at a time.

The format's own package gives no float32 of bfloat16 without torch, maps no file for numpy, and
wants all arrays at once when it writes.

Source:
    https://huggingface.co/docs/safetensors: eight bytes with the length of a JSON header, the
    header, then the arrays in the host order of little-endian machines.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgewise.errors import ModelError

Float32 = npt.NDArray[np.float32]
Shape = tuple[int, ...]

_DTYPES: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
_MAX_HEADER_BYTES = 100 * 1024**2  # the limit of the format's own package
_COPY_AGAIN = "copy the file again from where it came"


@dataclass(frozen=True, slots=True)
class Stored:
    """Where one array lies.

    Attributes:
        dtype: ``"F32"``, ``"F16"`` or ``"BF16"``.
        shape: Of the array.
        start: First byte in the file.
        stop: One past the last.
    """

    dtype: str
    shape: Shape
    start: int
    stop: int


class SafetensorsFile:
    """A file of weights, mapped into memory.

    Args:
        path: The file.

    Attributes:
        path: The file.
        stored: Every array by name.

    Raises:
        ModelError: Not such a file, truncated, damaged, or with numbers of another kind.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = mapped_bytes(path)
        size = self._bytes.size
        length = int.from_bytes(self._bytes[:8].tobytes(), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise self._damaged("it is truncated, or no safetensors file")
        try:
            header = json.loads(self._bytes[8 : 8 + length].tobytes())
        except ValueError:
            raise self._damaged("its header is no JSON") from None
        if not isinstance(header, dict):
            raise self._damaged("its header is no JSON object")
        header.pop("__metadata__", None)
        self.stored = {n: self._entry(n, facts, 8 + length) for n, facts in header.items()}
        end = max((s.stop for s in self.stored.values()), default=8 + length)
        if end != size:
            raise self._damaged(f"its arrays end at byte {end}, the file at {size}")

    def shapes(self) -> dict[str, Shape]:
        """Shape of every array."""
        return {name: stored.shape for name, stored in self.stored.items()}

    def read(self, name: str) -> Float32:
        """One array as float32: a view of the file where it is stored so, else a copy."""
        stored = self.stored[name]
        array: npt.NDArray[Any] = self._bytes[stored.start : stored.stop]
        array = array.view(_DTYPES[stored.dtype]).reshape(stored.shape)
        if stored.dtype == "BF16":  # the upper half of a float32
            return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
        if stored.dtype == "F32" and array.flags.aligned:
            return array
        return array.astype(np.float32)

    def _entry(self, name: str, facts: Any, data: int) -> Stored:
        try:
            dtype, shape = facts["dtype"], tuple(int(n) for n in facts["shape"])
            start, stop = (data + int(n) for n in facts["data_offsets"])
        except (TypeError, KeyError, ValueError):
            raise self._damaged(f"its header says nothing usable of {name!r}") from None
        if dtype not in _DTYPES:
            raise ModelError(
                f"{self.path}: {name!r} holds numbers of type {dtype}, which is not supported",
                help="supported are F32, F16 and BF16",
            )
        size = math.prod(shape) * _DTYPES[dtype].itemsize
        if min(shape, default=1) < 0 or not data <= start <= stop or stop - start != size:
            raise self._damaged(f"{name!r} of {list(shape)} does not fit its place")
        return Stored(dtype, shape, start, stop)

    def _damaged(self, why: str) -> ModelError:
        return ModelError(f"{self.path} is damaged: {why}", help=_COPY_AGAIN)


def write_float32(
    path: Path,
    shapes: Mapping[str, Shape],
    read: Callable[[str], Float32],
    *,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> str:
    """Write a file, one array in memory at a time, down to the disk.

    Args:
        path: The file to make.
        shapes: Of every array.
        read: Gives an array of that shape by its name; asked in the order of ``shapes``.
        on_bytes: Told the size of each array when it is written.

    Returns:
        SHA-256 of the file, in hexadecimal.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # what transformers asks for
    offset = 0
    for name, shape in shapes.items():
        end = offset + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as sink:

        def put(data: bytes | memoryview) -> None:
            sink.write(data)
            digest.update(data)

        put(len(text).to_bytes(8, "little"))
        put(text)
        for name in shapes:
            array = np.ascontiguousarray(read(name), dtype="<f4")
            put(array.reshape(-1).view(np.uint8).data)
            on_bytes(array.nbytes)
        sink.flush()
        os.fsync(sink.fileno())
    return digest.hexdigest()


def mapped_bytes(path: Path) -> npt.NDArray[np.uint8]:
    """Map a file into memory, read-only; an empty one is an empty array.

    Raises:
        ModelError: It cannot be read.
        MemoryError: The process may not map so much.
    """
    try:
        if not path.stat().st_size:
            return np.zeros(0, dtype=np.uint8)
        return np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise MemoryError from error
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
