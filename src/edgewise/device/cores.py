"""How many cores this process may really use, which is often fewer than the machine has."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from edgewise.device.cgroups import limit_directories
from edgewise.device.files import parse_cpu_list, read_text


@dataclass(frozen=True, slots=True, kw_only=True)
class UsableCores:
    """The cores of the machine, and the share of them that this process gets.

    Attributes:
        host: Logical CPUs that are online; ``None`` where the kernel does not say.
        affinity: CPUs this process may be scheduled on; ``None`` where the kernel does not say.
        quota_cores: CPU time per wall time that the tightest control group allows; ``None`` where
            there is no such limit.
        usable: The smallest of the three; 1.0 where none is known.
        host_source: Where ``host`` was read, or why it is unknown.
        affinity_source: Where ``affinity`` was read, or why it is unknown.
        quota_source: Where ``quota_cores`` was read, or why there is none.
    """

    host: int | None
    affinity: int | None
    quota_cores: float | None
    usable: float
    host_source: str
    affinity_source: str
    quota_source: str

    @property
    def threads(self) -> int:
        """Threads that can run without being throttled: ``usable`` rounded down, at least 1."""
        return max(1, int(self.usable))


def usable_cores(root: Path = Path("/"), *, affinity: Collection[int] | None = None) -> UsableCores:
    """Count the cores that this process can use now.

    Args:
        root: Where the file tree starts. Tests pass a recorded tree.
        affinity: CPUs the scheduler may use; asked of the kernel by default.

    Returns:
        The three limits, where each was found, and the smallest.

    Source:
        Linux kernel, Documentation/admin-guide/cgroup-v2.rst (cpu.max) and
        Documentation/scheduler/sched-bwc.rst (cpu.cfs_quota_us); a limit of any ancestor holds too.
    """
    host, host_source = _host_cores(root)
    if affinity is not None:
        allowed, affinity_source = len(affinity), "given by the caller"
    elif hasattr(os, "sched_getaffinity"):
        allowed, affinity_source = len(os.sched_getaffinity(0)), "sched_getaffinity"
    else:
        allowed, affinity_source = None, "this system has no sched_getaffinity"
    quota, quota_source = _quota(root)
    known = [float(each) for each in (host, allowed, quota) if each]
    return UsableCores(
        host=host,
        affinity=allowed,
        quota_cores=quota,
        usable=min(known, default=1.0),
        host_source=host_source,
        affinity_source=affinity_source,
        quota_source=quota_source,
    )


def _host_cores(root: Path) -> tuple[int | None, str]:
    path = root / "sys/devices/system/cpu/online"
    reading = read_text(path)
    online = parse_cpu_list(reading.value) if reading.value is not None else None
    if online is not None:
        return len(online), str(path)
    if root == Path("/") and (count := os.cpu_count()):
        return count, "os.cpu_count"
    return None, reading.reason or f"{path} is not a list of CPUs"


def _quota(root: Path) -> tuple[float | None, str]:
    limits: list[tuple[float, str]] = []
    spoiled = ""
    for version, directory in limit_directories("cpu", root):
        path = directory / ("cpu.max" if version == 2 else "cpu.cfs_quota_us")
        reading = read_text(path)
        if reading.value is None:
            if reading.quality == "denied":
                spoiled = reading.reason
            continue
        if version == 2:
            quota_text, _, period_text = reading.value.partition(" ")
        else:
            quota_text = reading.value
            period_text = read_text(directory / "cpu.cfs_period_us").value or ""
        if quota_text in {"max", "-1"}:
            continue
        cores = _ratio(quota_text, period_text)
        if cores is None:
            spoiled = f"{path} says {reading.value[:40]!r}"
        else:
            limits.append((cores, str(path)))
    if limits:
        return min(limits)
    return None, spoiled or "no control group limits CPU time"


def _ratio(quota_us: str, period_us: str) -> float | None:
    try:
        quota, period = int(quota_us), int(period_us)
    except ValueError:
        return None
    # The kernel accepts periods of 1 ms to 1 s; a quota below zero means none in version 1.
    return quota / period if 0 < quota < 2**62 and period > 0 else None
