"""Named arrays and a JSON header in one ``.npz`` file: no pickle, written whole or not at all."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgewise.data.array_file import npz_names, read_npz
from edgewise.errors import DataError, ProfileError
from edgewise.profiles.exchange import write_whole

_HEADER = "header"


def write_stored(
    path: Path,
    arrays: Mapping[str, npt.NDArray[Any]],
    header: Mapping[str, Any],
    *,
    format_name: str,
    version: int,
) -> None:
    """Write a file; one that is there already is replaced when all is on disk.

    Args:
        path: Where to.
        arrays: By name; none empty.
        header: What JSON can say, without NaN.
        format_name: What the file is, for whoever reads it.
        version: Of that format.

    Raises:
        ProfileError: It cannot be written; what was there before is unharmed.
    """
    document = {"format": format_name, "format_version": version, **header}
    text = json.dumps(document, allow_nan=False).encode()
    stream = io.BytesIO()
    named: dict[str, Any] = {_HEADER: np.frombuffer(text, dtype=np.uint8), **arrays}
    np.savez_compressed(stream, **named)
    write_whole(path, stream.getvalue(), what=format_name)


def read_stored(
    path: Path, *, format_name: str, version: int
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """Read a file that `write_stored` wrote.

    Returns:
        The arrays and the header.

    Raises:
        ProfileError: The file is missing, damaged, of another kind or of a newer version.
    """
    try:
        names = npz_names(path)
        if _HEADER not in names:
            raise ProfileError(f"{path} is not a file of format {format_name!r}: it has no header")
        header = json.loads(read_npz(path, _HEADER).tobytes())
        found = header.get("format") if isinstance(header, dict) else None
        if found != format_name:
            raise ProfileError(f"{path} is of format {found!r}, expected {format_name!r}")
        if header.get("format_version") != version:
            raise ProfileError(
                f"{path} has version {header.get('format_version')!r} of its format; this Edgewise"
                f" reads {version}",
                help="pip install --upgrade edgewise",
            )
        return {name: read_npz(path, name) for name in names if name != _HEADER}, header
    except DataError as error:
        raise ProfileError(error.message, help="write the file again") from error
    except (ValueError, RecursionError) as error:
        raise ProfileError(
            f"{path} is damaged: its header is not JSON", help="write the file again"
        ) from error
