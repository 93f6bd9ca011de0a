"""Partition profiles that ship with Edgewise: nine networks of the kind that SwapLess uses."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from edgewise.errors import ProfileError, nearest_names
from edgewise.profiles.partition import (
    PartitionProfile,
    parse_partition_profile,
    read_partition_profile,
)

_FOLDER = "edgewise.profiles.partitions"


def partition_profile_names() -> tuple[str, ...]:
    """Names of the profiles that ship, sorted."""
    files = (file.name for file in resources.files(_FOLDER).iterdir())
    return tuple(sorted(n.removesuffix(".json") for n in files if n.endswith(".json")))


def load_partition_profile(name_or_path: str | Path) -> PartitionProfile:
    """Read a profile.

    Args:
        name_or_path: A shipped name, or a file that `write_partition_profile` wrote.

    Raises:
        ProfileError: No such name or file, or the file is no such profile.
    """
    name = str(name_or_path)
    if name in partition_profile_names():
        file = resources.files(_FOLDER) / f"{name}.json"
        return parse_partition_profile(file.read_text(encoding="utf-8"), where=name)
    if not Path(name_or_path).exists():
        raise ProfileError(
            f"no partition profile ships under the name {name!r}, and there is no such file",
            help=nearest_names(name, partition_profile_names()),
        )
    return read_partition_profile(name_or_path)
