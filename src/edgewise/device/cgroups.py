"""Finds the control groups that limit this process, in versions 1 and 2.

It answers where the limits are written, not what they say.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from edgewise.device.files import read_text


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mount:
    version: int
    controllers: frozenset[str]
    group_root: PurePosixPath
    at: Path


def limit_directories(controller: str, root: Path = Path("/")) -> Iterator[tuple[int, Path]]:
    """Directories whose limits hold for this process: its own control group and all above it.

    Args:
        controller: ``"cpu"`` or ``"memory"``.
        root: Where the file tree starts. Tests pass a recorded tree.

    Yields:
        Version (1 or 2) and directory, the process's own group first.

    Source:
        Linux kernel, Documentation/admin-guide/cgroup-v2.rst and cgroups(7), /proc/PID/cgroup;
        proc_pid_mountinfo(5) for which part of the hierarchy is mounted where.
    """
    membership = read_text(root / "proc/self/cgroup").value
    if membership is None:
        return
    mounts = list(_mounts(root))
    for line in membership.splitlines():
        number, _, rest = line.partition(":")
        names, _, group = rest.partition(":")
        version = 2 if number == "0" and not names else 1
        if version == 1 and controller not in names.split(","):
            continue
        for mount in mounts:
            if mount.version != version:
                continue
            if version == 1 and controller not in mount.controllers:
                continue
            yield from ((version, each) for each in _upwards(mount, group))


def _upwards(mount: _Mount, group: str) -> Iterator[Path]:
    path = PurePosixPath(group)
    try:
        inside = path.relative_to(mount.group_root)
    except ValueError:
        # The mount shows another part of the hierarchy: a container without its own view.
        inside = PurePosixPath()
    if ".." in inside.parts:
        inside = PurePosixPath()
    for each in (inside, *inside.parents):
        yield mount.at / each


def _mounts(root: Path) -> Iterator[_Mount]:
    table = read_text(root / "proc/self/mountinfo").value or ""
    for line in table.splitlines():
        left, separator, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if not separator or len(fields) < 5 or not kind or kind[0] not in {"cgroup", "cgroup2"}:
            continue
        at = fields[4].replace("\\040", " ").lstrip("/")
        yield _Mount(
            version=2 if kind[0] == "cgroup2" else 1,
            controllers=frozenset(kind[-1].split(",")),
            group_root=PurePosixPath(fields[3]),
            at=root / at,
        )
