"""Joules from the processor's own counter, where one can be read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edgewise.device.files import read_number
from edgewise.device.meters import find_meters

ReadEnergy = Callable[[], float]


def package_energy(root: Path = Path("/")) -> tuple[ReadEnergy | None, str]:
    """A reader of the energy that all processor packages have used.

    Args:
        root: Where the file tree starts. Tests pass a recorded tree.

    Returns:
        A function that returns joules since some instant, or ``None``; and what it counts, or why
        there is none.

    Source:
        Linux kernel, Documentation/power/powercap/powercap.rst: energy_uj wraps at
        max_energy_range_uj.
    """
    packages = [m for m in find_meters(root) if m.name.startswith("rapl package")]
    usable = [m for m in packages if m.quality == "ok" and m.name.count(" ") == 1]
    if not usable:
        reasons = [f"{m.name}: {m.reason}" for m in packages if m.reason]
        return None, "; ".join(reasons) or "no energy meter covers this machine"
    zones = [_Zone(Path(m.path)) for m in usable]
    names = ", ".join(m.name for m in usable)
    return (
        lambda: sum(zone.read_j() for zone in zones),
        f"total of {names}: idle and other programs are in it",
    )


class _Zone:
    """A counter that wraps, made into one that does not."""

    def __init__(self, path: Path) -> None:
        self._path = path / "energy_uj"
        self._range_j = 1e-6 * (read_number(path / "max_energy_range_uj").value or 0.0)
        self._last_j = self._now_j()
        self._total_j = 0.0

    def _now_j(self) -> float:
        found = read_number(self._path).value
        return float("nan") if found is None else 1e-6 * found

    def read_j(self) -> float:
        """Joules since this zone was opened."""
        now_j = self._now_j()
        step_j = now_j - self._last_j
        self._total_j += step_j + self._range_j if step_j < 0 else step_j
        self._last_j = now_j
        return self._total_j
