"""Temperatures of the kernel's thermal zones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from edgewise.device.files import Quality, matching, read_text
from edgewise.device.kept_file import KeptFile
from edgewise.device.sensor import Sensor
from edgewise.device.state import Quantity

_NO_ZONE = Quantity.missing("unsupported", "the kernel lists no thermal zone")
# Tegra says -256 degrees for a zone whose rail is gated; nothing is below absolute zero.
_GATED_MILLICELSIUS = -256_000
_HIGHEST_MILLICELSIUS = 250_000
_RESCAN_S = 5.0


class Temperatures(Sensor):
    """Reads ``thermal.<type>_celsius`` of each zone; further zones of one type get a number.

    Some boards ask a second processor for a temperature, and heat is slow, hence the period.

    Args:
        root: Where the file tree starts. Tests pass a recorded tree.

    Source:
        Linux kernel, Documentation/driver-api/thermal/sysfs-api.rst: temp is in millidegrees.
    """

    name = "thermal"
    period_s = 0.5

    def __init__(self, root: Path) -> None:
        self._root = root
        self._zones: dict[Path, tuple[str, KeptFile]] = {}
        self._of_type: Counter[str] = Counter()
        self._scanned_s = float("-inf")

    def read(self, now_s: float) -> Mapping[str, Quantity]:
        """Read every zone once."""
        if not 0 <= now_s - self._scanned_s < _RESCAN_S:
            self._scanned_s = now_s
            self._find_zones()
        if not self._zones:
            return {"thermal.zone_celsius": _NO_ZONE}
        return {name: _read_zone(file, now_s) for name, file in self._zones.values()}

    def close(self) -> None:
        """Close all descriptors."""
        for _, file in self._zones.values():
            file.close()

    def _find_zones(self) -> None:
        for zone in matching(self._root, "sys/class/thermal/thermal_zone*"):
            kind = read_text(zone / "type").value
            if zone in self._zones or kind is None:
                continue
            kind = "-".join(kind.split())
            self._of_type[kind] += 1
            number = self._of_type[kind]
            label = kind if number == 1 else f"{kind}-{number}"
            self._zones[zone] = (f"thermal.{label}_celsius", KeptFile(zone / "temp"))


def make(root: Path = Path("/")) -> Sensor:
    """The sensor of temperatures under ``root``."""
    return Temperatures(root)


def _read_zone(file: KeptFile, now_s: float) -> Quantity:
    reading = file.text(now_s)
    if reading.value is None:
        # A gated zone is listed and fails to read.
        quality: Quality = "denied" if reading.quality == "denied" else "masked"
        return Quantity.missing(quality, reading.reason)
    try:
        temperature_millicelsius = int(reading.value)
    except ValueError:
        return Quantity.missing("unsupported", f"{file.path} says {reading.value[:40]!r}")
    if temperature_millicelsius <= _GATED_MILLICELSIUS:
        return Quantity.missing("masked", f"{file.path} says {reading.value[:40]}: switched off")
    if temperature_millicelsius > _HIGHEST_MILLICELSIUS:
        return Quantity.missing("unsupported", f"{file.path} says {reading.value[:40]!r}")
    return Quantity.ok(temperature_millicelsius / 1000)
