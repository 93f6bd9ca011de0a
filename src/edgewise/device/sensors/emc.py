"""The clock of the memory controller of Jetson boards, from whoever may tell it here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from edgewise.device.files import NumberReading, Quality
from edgewise.device.kept_file import KeptFile
from edgewise.device.publisher import PUBLISHED, EmcClock, read_boot_id, read_published
from edgewise.device.sensor import Sensor
from edgewise.device.state import Quantity

_BANDWIDTH_MANAGER = "sys/class/devfreq/bwmgr"
_RETRY_S = 1.0
_RANK: Mapping[Quality, int] = {"ok": 0, "stale": 1, "masked": 2, "denied": 3, "unsupported": 4}
_LOAD = Quantity.missing(
    "unsupported",
    "the kernel's memory activity (mc_all) has no scale that holds for all boards: on some it is"
    " always 0",
)


class MemoryClock(Sensor):
    """Reads ``emc.frequency_hz`` and ``emc.frequency_ratio``, of the highest one allowed.

    Asked in this order, and the first good answer counts: debugfs, for root only; the bandwidth
    manager of JetPack 7; the file of ``edgewise publish-emc``. Where none gives one, all are asked
    again after a second. ``emc.utilisation_ratio`` is left unsupported and says why.

    Args:
        root: Where the file tree starts. Tests pass a recorded tree.
        owners: Users whose published file is believed, by number.

    Source:
        L4T's BPMP debugfs; Linux kernel, Documentation/ABI/testing/sysfs-class-devfreq (Hz).
    """

    name = "emc"

    def __init__(self, root: Path, *, owners: frozenset[int] = frozenset({0})) -> None:
        self._root, self._owners = root, owners
        self._debugfs = EmcClock(root)
        self._current = KeptFile(root / _BANDWIDTH_MANAGER / "cur_freq")
        self._highest = KeptFile(root / _BANDWIDTH_MANAGER / "max_freq")
        self._boot_id: str | None = None
        self._nobody: Mapping[str, Quantity] | None = None
        self._asked_s = float("-inf")

    def read(self, now_s: float) -> Mapping[str, Quantity]:
        """Ask one after the other until one knows the clock."""
        if self._nobody is not None and self._asked_s <= now_s < self._asked_s + _RETRY_S:
            return self._nobody
        self._asked_s = now_s
        answers: list[tuple[Quantity, Quantity]] = []
        for ask in (self._debugfs.read, self._ask_manager, self._ask_publisher):
            answers.append(ask(now_s))
            if answers[-1][0].quality == "ok":
                break
        frequency_hz, max_hz = min(answers, key=lambda answer: _RANK[answer[0].quality])
        nobody = frequency_hz.quality in {"denied", "unsupported"}
        if nobody:  # only the last one says what would help
            reason = f"{frequency_hz.reason}; {answers[-1][0].reason}"
            frequency_hz = max_hz = Quantity.missing(frequency_hz.quality, reason)
        quantities = {
            "emc.frequency_hz": frequency_hz,
            "emc.frequency_ratio": _share(frequency_hz, max_hz),
            "emc.utilisation_ratio": _LOAD,
        }
        self._nobody = quantities if nobody else None
        return quantities

    def close(self) -> None:
        """Close all descriptors."""
        for each in (self._debugfs, self._current, self._highest):
            each.close()
        self._nobody = None

    def _ask_manager(self, now_s: float) -> tuple[Quantity, Quantity]:
        current_hz = self._current.number(now_s)
        if current_hz.value is None:
            missing = Quantity.missing(current_hz.quality, current_hz.reason)
            return missing, missing
        return _in_hz(current_hz, self._current), _in_hz(self._highest.number(now_s), self._highest)

    def _ask_publisher(self, now_s: float) -> tuple[Quantity, Quantity]:
        self._boot_id = self._boot_id or read_boot_id(self._root)
        return read_published(
            self._root / PUBLISHED, now_s=now_s, boot_id=self._boot_id, owners=self._owners
        )


def make(root: Path = Path("/")) -> Sensor:
    """The sensor of the memory clock under ``root``."""
    return MemoryClock(root)


def _in_hz(frequency_hz: NumberReading, file: KeptFile) -> Quantity:
    if frequency_hz.value is None:
        return Quantity.missing(frequency_hz.quality, frequency_hz.reason)
    if not frequency_hz.value:
        return Quantity.missing("masked", f"{file.path} says 0: switched off")
    return Quantity.ok(float(frequency_hz.value))


def _share(frequency_hz: Quantity, max_hz: Quantity) -> Quantity:
    for each in (frequency_hz, max_hz):
        if each.value is None:
            return each
    # A power mode may cap the highest clock before the present one has come down.
    ratio = min(1.0, (frequency_hz.value or 0.0) / (max_hz.value or math.inf))
    return Quantity(value=ratio, quality=frequency_hz.quality, reason=frequency_hz.reason)
