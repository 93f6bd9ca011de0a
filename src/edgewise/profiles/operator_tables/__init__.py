"""Tables of operators' costs, one file each: those that ship, and the user's own."""

from __future__ import annotations

import dataclasses
import gzip
from importlib import resources
from pathlib import Path

from edgewise.device import device_fingerprint
from edgewise.errors import ProfileError, nearest_names
from edgewise.profiles.operator_file import parse_operator_table, read_operator_table
from edgewise.profiles.operators import OperatorTable
from edgewise.profiles.store import default_store_path

SHIPPED = "epyc-2core-measured"  # what plans are made with where nothing was measured

_ENDINGS = (".json", ".json.gz")


def operator_table_names() -> tuple[str, ...]:
    """Names of the tables that ship, sorted."""
    return tuple(sorted(_files()))


def load_operator_table(name_or_path: str | Path) -> OperatorTable:
    """Read a table.

    Args:
        name_or_path: A shipped name, or a file that ``edgewise dispatch measure`` wrote.

    Raises:
        ProfileError: No such name or file, or the file is no such table.
    """
    name = str(name_or_path)
    if name in (shipped := _files()):
        data = (resources.files(__name__) / shipped[name]).read_bytes()
        if shipped[name].endswith(".gz"):
            data = gzip.decompress(data)
        return parse_operator_table(data.decode(), where=name)
    if not Path(name_or_path).exists():
        raise ProfileError(
            f"no table of operators ships under the name {name!r}, and there is no such file;"
            f" {nearest_names(name, operator_table_names())}",
            help="edgewise dispatch measure",
        )
    return read_operator_table(name_or_path)


def operator_table_path(
    device_id: str | None = None, *, state: str = "calm", folder: Path | None = None
) -> Path:
    """Where a device's own table is kept: beside the store of profiles. Nothing is created.

    Args:
        device_id: Fingerprint; this device's by default.
        state: What the table is of; ``"calm"`` is not named.
        folder: Where instead.

    Example:
        >>> operator_table_path("0123", state="beside cpu", folder=Path("."))
        PosixPath('operators-0123-beside-cpu.json')
    """
    words = [device_id or device_fingerprint().id]
    words += [] if state == "calm" else "".join(c if c.isalnum() else " " for c in state).split()
    return (folder or default_store_path().parent) / f"operators-{'-'.join(words)}.json"


def default_operator_table(
    device_id: str | None = None, *, folder: Path | None = None
) -> OperatorTable:
    """The table to plan with unless the user names one: measured here, else one that ships.

    Args:
        device_id: Fingerprint; this device's by default.
        folder: Where own tables are kept.

    Returns:
        The table. A shipped one of another device says so in its note ``"device"``.

    Raises:
        ProfileError: The device's own table cannot be read, or none ships.
    """
    device_id = device_id or device_fingerprint().id
    own = operator_table_path(device_id, folder=folder)
    if own.exists():
        return read_operator_table(own)
    shipped = load_operator_table(SHIPPED)
    if shipped.device_id == device_id:
        return shipped
    cpu = shipped.device.get("cpu_model") or "unknown CPU"
    foreign = f"measured on another machine ({cpu}): edgewise dispatch measure measures this one"
    return dataclasses.replace(shipped, notes={**shipped.notes, "device": foreign})


def _files() -> dict[str, str]:
    """File of each table by its name."""
    found = {}
    for file in resources.files(__name__).iterdir():
        for ending in _ENDINGS:
            if file.name.endswith(ending):
                found[file.name.removesuffix(ending)] = file.name
    return found
