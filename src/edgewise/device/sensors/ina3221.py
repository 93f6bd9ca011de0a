"""Power of the supply rails that a board's INA3221 chips watch, as on Jetson."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from edgewise.device.files import matching, read_text
from edgewise.device.kept_file import KeptFile
from edgewise.device.sensor import Sensor
from edgewise.device.state import Quantity

# Bus, address and hwmon number differ between boards and kernels: rails are found by their label.
_LABELS = "sys/bus/i2c/drivers/ina3221*/*/hwmon/hwmon*/in*_label"
_NOT_A_RAIL = {"sum of shunt voltages", "NC"}  # the chip's own sum, and channels left unconnected
_ABSENT = {"power.VDD_IN_w": Quantity.missing("unsupported", "no INA3221 watches a rail here")}
_GONE = Quantity.missing("unsupported", "the INA3221 that watched this rail is gone")
_RESCAN_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rail:
    """One channel of a chip."""

    voltage_mv: KeptFile
    current_ma: KeptFile

    def read_w(self, now_s: float) -> Quantity:
        """Power, or why there is none."""
        voltage_mv = self.voltage_mv.number(now_s)
        current_ma = self.current_ma.number(now_s)
        if voltage_mv.value is not None and current_ma.value is not None:
            return Quantity.ok(voltage_mv.value * current_ma.value * 1e-6)
        bad = voltage_mv if voltage_mv.value is None else current_ma
        why = bad.reason
        if bad.quality == "denied":
            why += f": sudo chmod a+r {Path(self.voltage_mv.path).parent}/*_input"
        return Quantity.missing(bad.quality, why)

    def close(self) -> None:
        """Close both files."""
        self.voltage_mv.close()
        self.current_ma.close()


class RailPower(Sensor):
    """Reads ``power.<label>_w`` of each rail: voltage times current.

    The chip is asked over a slow bus and averages by itself, hence the period.

    Args:
        root: Where the file tree starts. Tests pass a recorded tree.

    Source:
        Linux kernel, Documentation/hwmon/ina3221.rst: in[123]_input in mV, curr[123]_input in mA,
        in[123]_label.
    """

    name = "ina3221"
    period_s = 0.1

    def __init__(self, root: Path) -> None:
        self._root = root
        self._rails: dict[str, _Rail] = {}
        self._found: dict[Path, str] = {}
        self._known: dict[str, Quantity] = dict(_ABSENT)
        self._scanned_s = -math.inf

    def read(self, now_s: float) -> Mapping[str, Quantity]:  # noqa: D102 - see the class above it
        if not 0 <= now_s - self._scanned_s < _RESCAN_S:
            self._scanned_s = now_s
            self._scan()
        return self._known | {name: rail.read_w(now_s) for name, rail in self._rails.items()}

    def close(self) -> None:  # noqa: D102
        for rail in self._rails.values():
            rail.close()

    def _scan(self) -> None:
        labels = {path: read_text(path).value for path in matching(self._root, _LABELS)}
        found = {p: label for p, label in labels.items() if label and label not in _NOT_A_RAIL}
        if found == self._found:
            return
        self.close()
        self._found, self._rails = found, {}
        for path, label in found.items():
            channel = path.name.removeprefix("in").removesuffix("_label")
            name = f"power.{'-'.join(label.split())}_w"
            if name not in self._rails:
                self._rails[name] = _Rail(
                    voltage_mv=KeptFile(path.parent / f"in{channel}_input"),
                    current_ma=KeptFile(path.parent / f"curr{channel}_input"),
                )
        if found:
            self._known = dict.fromkeys([*self._known, *self._rails], _GONE)


def make(root: Path = Path("/")) -> Sensor:
    """The sensor of supply rails under ``root``."""
    return RailPower(root)
