"""Read the IDX format of MNIST and its relatives, compressed or not."""

from __future__ import annotations

import gzip
import io
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgewise.data.limits import MAX_ARRAY_BYTES, check_array_bytes
from edgewise.errors import DataError

_GZIP_MAGIC = b"\x1f\x8b"
_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_REPLACE_FILE = "copy or download the file again"


def read_bytes(path: Path) -> bytes:
    """The uncompressed content of a file; gzip is recognised by its content.

    Args:
        path: The file.

    Raises:
        DataError: The file cannot be read, is a damaged gzip file, or is enormous.
    """
    try:
        check_array_bytes(path.stat().st_size, where=str(path))
        raw = path.read_bytes()
        if not raw.startswith(_GZIP_MAGIC):
            return raw
        with gzip.open(io.BytesIO(raw)) as stream:
            content = stream.read(MAX_ARRAY_BYTES + 1)  # a few bytes can unpack to terabytes
    except EOFError as error:
        raise DataError(
            f"{path} is a truncated gzip file: it ends after {len(raw)} bytes, before its end mark",
            help=_REPLACE_FILE,
        ) from error
    except zlib.error as error:
        raise DataError(f"{path} is a damaged gzip file: {error}", help=_REPLACE_FILE) from error
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror or error}", help="check the path and its rights"
        ) from error
    check_array_bytes(len(content), where=str(path))
    return content


def parse_idx(raw: bytes, *, where: str) -> npt.NDArray[Any]:
    """The array in the bytes of an IDX file.

    Args:
        raw: Uncompressed content of the file.
        where: The file's name, for messages.

    Returns:
        A writable array in the machine's byte order, with the dtype and shape the file declares.

    Raises:
        DataError: The magic number is wrong, or bytes are missing or left over.

    Source:
        Y. LeCun, C. Cortes, C. Burges, The MNIST Database, "The IDX file format": two zero bytes,
        a type code, the number of dimensions, then each dimension and the data, big-endian.

    Example:
        >>> parse_idx(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9]), where="labels")
        array([7, 9], dtype=uint8)
    """
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in _DTYPES or raw[3] == 0:
        raise DataError(
            f"{where} is not an IDX file: expected the magic number 0000 08 01 or alike, "
            f"found {raw[:4].hex() or 'an empty file'}",
            help=_REPLACE_FILE,
        )
    dtype, num_dimensions = np.dtype(_DTYPES[raw[2]]), raw[3]
    header_bytes = 4 + 4 * num_dimensions
    if len(raw) < header_bytes:
        raise DataError(
            f"{where} is truncated: expected a header of {header_bytes} bytes, found {len(raw)}",
            help=_REPLACE_FILE,
        )
    shape = tuple(int(n) for n in np.frombuffer(raw, dtype=">u4", count=num_dimensions, offset=4))
    expected_bytes = header_bytes + math.prod(shape) * dtype.itemsize
    if len(raw) != expected_bytes:
        fault = "is truncated" if len(raw) < expected_bytes else "has bytes left over"
        raise DataError(
            f"{where} {fault}: its header {list(shape)} of {dtype.name} asks for {expected_bytes} "
            f"bytes, found {len(raw)}",
            help=_REPLACE_FILE,
        )
    values = np.frombuffer(raw, dtype=dtype, offset=header_bytes).reshape(shape)
    return values.astype(dtype.newbyteorder("="))
