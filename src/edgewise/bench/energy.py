"""Joules from the processor's own counter, where one can be read."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from edgewise.clock import MonotonicClock
from edgewise.device.meters import find_meters
from edgewise.device.sensors.rapl import Zone

ReadEnergy = Callable[[], float]


def package_energy(root: Path = Path("/")) -> tuple[ReadEnergy | None, str]:
    """A reader of the energy that all processor packages have used.

    Args:
        root: Where the file tree starts. Tests pass a recorded tree.

    Returns:
        A function that returns joules since some instant, or ``None``; and what it counts, or why
        there is none. The function gives NaN where a counter cannot be read any more.
    """
    packages = [m for m in find_meters(root) if m.name.startswith("rapl package")]
    usable = [m for m in packages if m.quality == "ok" and m.name.count(" ") == 1]
    if not usable:
        reasons = [f"{m.name}: {m.reason}" for m in packages if m.reason]
        return None, "; ".join(reasons) or "no energy meter covers this machine"
    zones = [Zone(Path(m.path)) for m in usable]
    clock = MonotonicClock()

    def read_j() -> float:
        now_s = clock.now_s()
        values = [zone.read(now_s)[0].value for zone in zones]
        return math.nan if None in values else math.fsum(v for v in values if v is not None)

    for zone in zones:
        zone.read(clock.now_s())
    names = ", ".join(m.name for m in usable)
    return read_j, f"total of {names}: idle and other programs are in it"
