"""How much CPU time the control groups of this process allow it, and how often they stop it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from edgewise.device.cgroups import limit_directories
from edgewise.device.cores import usable_cores
from edgewise.device.files import exists
from edgewise.device.kept_file import KeptFile
from edgewise.device.sensor import Sensor
from edgewise.device.state import Quantity

_NAMES = ("cpu.quota_cores", "cpu.quota_ratio", "cpu.throttled_ratio")
_QUOTA_FILES = {1: "cpu.cfs_quota_us", 2: "cpu.max"}
_RESCAN_S = 2.0
_COUNT_S = 0.1


class CpuQuota(Sensor):
    """Reads ``cpu.quota_cores``, ``cpu.quota_ratio`` and ``cpu.throttled_ratio``.

    The first is the CPU time per wall time that this process may use: that of the tightest of its
    groups, and not more than the cores it may run on. The second is the same for one thread, at
    most 1. The third is the share of a quota's periods, since the last reading, in which the group
    had used it up; the largest of all groups.

    Args:
        root: Where the file tree starts. Tests pass a recorded tree.
        affinity: CPUs the scheduler may use; asked of the kernel by default.

    Source:
        As :func:`edgewise.device.cores.usable_cores`; nr_periods and nr_throttled of cpu.stat.
    """

    name = "quota"
    period_s = 0.05  # a step of the quota changes every cost

    def __init__(self, root: Path, *, affinity: Collection[int] | None = None) -> None:
        self._root, self._affinity = root, affinity
        self._membership = KeptFile(root / "proc/self/cgroup")
        self._belongs_to: str | None = None
        self._groups: dict[Path, _Group] = {}
        self._cores = 1.0
        self._most = Quantity.ok(0.0)
        self._scanned_s = self._counted_s = float("-inf")

    def read(self, now_s: float) -> Mapping[str, Quantity]:
        """Read every group once."""
        membership = self._membership.text(now_s)
        if membership.quality == "denied":
            return dict.fromkeys(_NAMES, Quantity.missing("denied", membership.reason))
        belongs_to = membership.value
        moved = belongs_to != self._belongs_to
        if moved or not 0 <= now_s - self._scanned_s < _RESCAN_S:
            self._belongs_to, self._scanned_s = belongs_to, now_s
            self._look()
        # Shares of periods need some periods to be shares of.
        count = moved or not 0 <= now_s - self._counted_s < _COUNT_S
        limits: list[float] = []
        unknown: list[Quantity] = []
        throttled: list[Quantity] = []
        for group in self._groups.values():
            limit = group.read_limit(now_s)
            if limit is None:
                continue
            if limit.value is None:
                unknown.append(limit)
                continue
            limits.append(limit.value)
            if count:
                throttled.append(group.read_throttled(now_s))
        if not limits and unknown:
            return dict.fromkeys(_NAMES, unknown[0])
        quota_cores = min([self._cores, *limits])
        if count:
            self._counted_s = now_s
            known = [each for each in throttled if each.quality == "ok"] or throttled
            # Where there is no quota, nothing can use it up.
            self._most = max(known, key=lambda each: each.value or 0.0, default=Quantity.ok(0.0))
        of_one_thread = min(1.0, quota_cores)
        found = (Quantity.ok(quota_cores), Quantity.ok(of_one_thread), self._most)
        return dict(zip(_NAMES, found, strict=True))

    def close(self) -> None:
        """Close all descriptors and begin to count anew."""
        self._membership.close()
        self._groups.clear()  # their files close themselves
        self._scanned_s = self._counted_s = float("-inf")

    def _look(self) -> None:
        cores = usable_cores(self._root, affinity=self._affinity)
        self._cores = float(min((n for n in (cores.host, cores.affinity) if n), default=1))
        self._groups = {
            directory: self._groups.get(directory) or _Group(version, directory)
            for version, directory in limit_directories("cpu", self._root)
            if exists(directory / _QUOTA_FILES[version])  # the uppermost group has none
        }


class _Group:
    """One control group."""

    def __init__(self, version: int, directory: Path) -> None:
        self._quota = KeptFile(directory / _QUOTA_FILES[version])
        self._period = None if version == 2 else KeptFile(directory / "cpu.cfs_period_us")
        self._unlimited = "max" if version == 2 else "-1"
        self._stat = KeptFile(directory / "cpu.stat")
        self._counted: tuple[int, int] | None = None
        self._last: float | None = None

    def read_limit(self, now_s: float) -> Quantity | None:
        """Cores that it allows; ``None`` for no limit."""
        reading = self._quota.text(now_s)
        if reading.value is None:
            return Quantity.missing(reading.quality, reading.reason)
        quota_us, _, period_us = reading.value.partition(" ")
        if self._period is not None:
            period_us = self._period.text(now_s).value or ""
        if quota_us == self._unlimited:
            return None
        try:
            quota, period = int(quota_us), int(period_us)
        except ValueError:
            quota = period = 0
        if not (0 < quota < 2**62 and period > 0):
            said = f"{self._quota.path} says {reading.value[:40]!r}"
            return Quantity.missing("unsupported", f"{said} of a period of {period_us[:20]!r}")
        return Quantity.ok(quota / period)

    def read_throttled(self, now_s: float) -> Quantity:
        """Share of the periods since the last reading in which the quota was used up."""
        reading = self._stat.text(now_s)
        if reading.value is None:
            return Quantity.missing(reading.quality, reading.reason)
        lines = (line.split() for line in reading.value.splitlines())
        said = {line[0]: line[1] for line in lines if len(line) == 2}
        try:
            counted = int(said["nr_periods"]), int(said["nr_throttled"])
        except (KeyError, ValueError):
            return Quantity.missing("unsupported", f"{self._stat.path} counts no periods")
        before = self._counted or counted
        periods, throttled = counted[0] - before[0], counted[1] - before[1]
        self._counted = counted
        if periods > 0 and throttled >= 0:
            self._last = min(1.0, throttled / periods)
            return Quantity.ok(self._last)
        reason = "no period of the quota has ended since the last reading"
        if self._last is None:
            return Quantity.missing("masked", reason)
        return Quantity(value=self._last, quality="stale", reason=reason)


def make(root: Path = Path("/")) -> Sensor:
    """The sensor of CPU quotas under ``root``."""
    return CpuQuota(root)
