"""Why a board slows down: its power supply, its temperature, its current."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from edgewise.device.files import exists, matching, read_text
from edgewise.device.kept_file import KeptFile
from edgewise.device.sensor import Sensor
from edgewise.device.state import Quantity

_PI_FILES = (
    "sys/devices/platform/soc/soc:firmware/get_throttled",
    "sys/devices/platform/soc:firmware/get_throttled",
)
# Bits 0 to 3 are the present; bits 16 to 19 say the same of any time since boot.
_PI_BITS = {
    "throttle.under_voltage": 0,
    "throttle.frequency_capped": 1,
    "throttle.throttled": 2,
    "throttle.soft_temperature_limit": 3,
}
_MONITORS = "sys/class/hwmon"
_PI_LIMIT = 2**32  # it is one 32-bit word
_NO_PI = Quantity.missing("unsupported", "this board's firmware reports no throttling")
_RESCAN_S = 5.0


class Throttling(Sensor):
    """Reads why the board holds back: flags that are 0 or 1, and counts of events.

    On Raspberry Pi ``throttle.under_voltage``, ``throttle.frequency_capped``,
    ``throttle.throttled`` and ``throttle.soft_temperature_limit``, as they are now. On Jetson
    ``throttle.oc<N>_events``: over-current and under-voltage events since the last reading.

    Args:
        root: Where the file tree starts. Tests pass a recorded tree.

    Source:
        Raspberry Pi documentation, vcgencmd get_throttled (bits); Linux kernel,
        Documentation/hwmon/raspberrypi-hwmon.rst (in0_lcrit_alarm); L4T's soctherm_oc hwmon.
    """

    name = "throttle"
    period_s = 0.1

    def __init__(self, root: Path) -> None:
        self._root = root
        self._firmware: KeptFile | None = None
        self._alarm: KeptFile | None = None
        self._counters: dict[str, KeptFile] = {}
        self._counted: dict[str, int] = {}
        self._scanned_s = float("-inf")

    def read(self, now_s: float) -> Mapping[str, Quantity]:
        """Read all flags and counters once."""
        if not 0 <= now_s - self._scanned_s < _RESCAN_S:
            self._scanned_s = now_s
            self._look()
        quantities = dict.fromkeys(_PI_BITS, _NO_PI)
        if self._firmware is not None:
            quantities = _read_firmware(self._firmware, now_s)
        under_voltage = quantities["throttle.under_voltage"]
        if under_voltage.value is None and self._alarm is not None:
            quantities["throttle.under_voltage"] = _read_alarm(self._alarm, now_s)
        for name, file in self._counters.items():
            quantities[f"throttle.{name}_events"] = self._events(name, file, now_s)
        return quantities

    def close(self) -> None:
        """Close all descriptors and begin to count anew."""
        self._firmware = self._alarm = None  # these close themselves
        for file in self._counters.values():
            file.close()
        self._counted.clear()
        self._scanned_s = float("-inf")

    def _look(self) -> None:
        found = next((self._root / each for each in _PI_FILES if exists(self._root / each)), None)
        self._firmware = None if found is None else _kept(self._firmware, found)
        for monitor in matching(self._root, f"{_MONITORS}/hwmon*"):
            kind = read_text(monitor / "name").value
            if kind == "rpi_volt":
                self._alarm = _kept(self._alarm, monitor / "in0_lcrit_alarm")
            elif kind == "soctherm_oc":
                for counter in matching(self._root, f"{_MONITORS}/{monitor.name}/oc*_event_cnt"):
                    name = counter.name.removesuffix("_event_cnt")
                    self._counters[name] = _kept(self._counters.get(name), counter)

    def _events(self, name: str, file: KeptFile, now_s: float) -> Quantity:
        count = file.number(now_s)
        if count.value is None:
            return Quantity.missing(count.quality, count.reason)
        before = self._counted.get(name)
        self._counted[name] = count.value
        if before is None:
            return Quantity.missing("masked", f"{file.path} was read for the first time")
        if count.value < before:
            return Quantity.missing("masked", f"{file.path} began to count anew")
        return Quantity.ok(float(count.value - before))


def make(root: Path = Path("/")) -> Sensor:
    """The sensor of throttling under ``root``."""
    return Throttling(root)


def _kept(file: KeptFile | None, path: Path) -> KeptFile:
    """The same file, unless it has another path now: hwmon numbers change."""
    return file if file is not None and file.path == str(path) else KeptFile(path)


def _read_firmware(file: KeptFile, now_s: float) -> dict[str, Quantity]:
    reading = file.text(now_s)
    if reading.value is None:
        return dict.fromkeys(_PI_BITS, Quantity.missing(reading.quality, reading.reason))
    try:
        bits = int(reading.value, 16)  # "50005", without 0x
    except ValueError:
        bits = -1
    if not 0 <= bits < _PI_LIMIT:
        reason = f"{file.path} says {reading.value[:40]!r}"
        return dict.fromkeys(_PI_BITS, Quantity.missing("unsupported", reason))
    return {name: Quantity.ok(float(bits >> bit & 1)) for name, bit in _PI_BITS.items()}


def _read_alarm(file: KeptFile, now_s: float) -> Quantity:
    alarm = file.number(now_s)
    if alarm.value is None:
        return Quantity.missing(alarm.quality, alarm.reason)
    if alarm.value > 1:
        return Quantity.missing("unsupported", f"{file.path} says {alarm.value}, expected 0 or 1")
    return Quantity.ok(float(alarm.value))
