"""Energy of Intel and AMD processors, from the counters of the kernel's powercap zones (RAPL)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from edgewise.device.files import NumberReading, matching, read_text
from edgewise.device.kept_file import KeptFile
from edgewise.device.sensor import Sensor
from edgewise.device.state import Quantity

_ZONES = "sys/class/powercap"
_ABSENT = "the kernel exposes no RAPL (usual in virtual machines and containers)"
_RESCAN_S = 5.0
# Far above what any package draws: a counter that seems to say so was set back to zero, as it is
# when the machine was asleep.
_IMPOSSIBLE_W = 1e4


class Zone:
    """One counter that wraps, made into one that does not.

    Wraps are noticed one at a time: it must be read before the counter has gone round once, which
    takes a package of 200 W about 20 minutes.

    Args:
        path: The zone's directory.

    Source:
        Linux kernel, Documentation/power/powercap/powercap.rst: energy_uj goes back to zero at
        max_energy_range_uj.
    """

    def __init__(self, path: Path) -> None:
        self._counter = KeptFile(path / "energy_uj")
        self._range = KeptFile(path / "max_energy_range_uj")
        self._help = f"sudo chmod a+r {path}/energy_uj"
        self._last: tuple[float, int] | None = None  # instant and count
        self._total_uj = 0

    def read(self, now_s: float) -> tuple[Quantity, Quantity]:
        """Read once.

        Returns:
            Joules since the first reading that was good, and mean watts since the last.
        """
        count, limit = self._counter.number(now_s), self._range.number(now_s)
        if count.value is None:
            return self._none(count)
        if not limit.value:
            # Without it a wrap cannot be told, and a sum that misses one is wrong.
            why = limit.reason or f"{self._range.path} says 0"
            return _twice(Quantity.missing("unsupported", why))
        before, self._last = self._last, (now_s, count.value)
        if before is None:
            first = Quantity.missing("unsupported", "power is known from the second reading on")
            return Quantity.ok(0.0), first
        duration_s = now_s - before[0]
        step_uj = _step_uj(before[1], count.value, range_uj=limit.value, duration_s=duration_s)
        self._total_uj += step_uj
        if not self._total_uj:
            still = f"{self._counter.path} has not moved since it was first read"
            return _twice(Quantity.missing("unsupported", still))
        if duration_s <= 0:
            power = Quantity.missing("unsupported", "no time has passed since the last reading")
        else:
            power = Quantity.ok(step_uj * 1e-6 / duration_s)
        return Quantity.ok(self._total_uj * 1e-6), power

    def close(self) -> None:
        """Close the files; what was counted is kept."""
        self._counter.close()
        self._range.close()

    def _none(self, reading: NumberReading) -> tuple[Quantity, Quantity]:
        why = reading.reason
        if reading.quality == "denied":
            why = f"energy_uj is for root only (Linux 5.10 and newer): {self._help}"
        return _twice(Quantity.missing(reading.quality, why))


class Rapl(Sensor):
    """Reads ``energy.<zone>_j``, since the first reading, and ``power.<zone>_w`` of each zone.

    Zones are ``package-0``, ``psys`` and, inside a package, ``package-0.core``, ``package-0.dram``
    and so on: these are parts of the package's sum, and ``psys`` holds all packages. What
    intel-rapl-mmio counts is a package once more and is left out where the package itself is
    there. Energy is that of the whole machine: idle and other programs are in it. The counters
    move about once in a millisecond, hence the period.

    Args:
        root: Where the file tree starts. Tests pass a recorded tree.
    """

    name = "rapl"
    period_s = 0.1

    def __init__(self, root: Path) -> None:
        self._root = root
        self._zones: dict[str, Zone] = {}
        self._scanned_s = -math.inf

    def read(self, now_s: float) -> Mapping[str, Quantity]:  # noqa: D102 - see the class above it
        if not 0 <= now_s - self._scanned_s < _RESCAN_S:
            self._scanned_s = now_s
            self._scan()
        quantities: dict[str, Quantity] = {}
        for name, zone in self._zones.items():
            quantities[f"energy.{name}_j"], quantities[f"power.{name}_w"] = zone.read(now_s)
        if "package-0" not in self._zones:
            absent = Quantity.missing("unsupported", _ABSENT)
            quantities |= {"energy.package-0_j": absent, "power.package-0_w": absent}
        return quantities

    def close(self) -> None:  # noqa: D102
        for zone in self._zones.values():
            zone.close()

    def _scan(self) -> None:
        for control in ("intel-rapl", "intel-rapl-mmio"):  # the duplicate comes last
            for path in matching(self._root, f"{_ZONES}/{control}:*"):
                name = _zone_name(path)
                if name is not None and name not in self._zones:
                    self._zones[name] = Zone(path)


def make(root: Path = Path("/")) -> Sensor:
    """The sensor of the powercap zones under ``root``."""
    return Rapl(root)


def _zone_name(path: Path) -> str | None:
    """Its label, after that of the zone it is a part of; ``None`` where that cannot be read."""
    parent, colon, _ = path.name.rpartition(":")
    label = read_text(path / "name").value
    if label is None or not colon or ":" not in parent:
        return label
    outer = read_text(path.parent / parent / "name").value
    return None if outer is None else f"{outer}.{label}"


def _step_uj(before_uj: int, now_uj: int, *, range_uj: int, duration_s: float) -> int:
    step_uj = now_uj - before_uj
    if step_uj >= 0:
        return step_uj
    wrapped_uj = step_uj + range_uj
    possible = 0 <= wrapped_uj <= _IMPOSSIBLE_W * 1e6 * max(duration_s, 1e-3)
    return wrapped_uj if possible else now_uj


def _twice(quantity: Quantity) -> tuple[Quantity, Quantity]:
    return quantity, quantity
