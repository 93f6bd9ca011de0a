"""How busy the cores are, as the kernel's counters in /proc tell."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from edgewise.device.kept_file import KeptFile
from edgewise.device.load import CpuCounters, load_between
from edgewise.device.sensor import Sensor
from edgewise.device.state import Quantity

WINDOW_S = 0.1
"""Utilisation is that of the last 0.1 s or a little more: the kernel counts in steps of 10 ms, so a
shorter window would show each core as 0 or 1 and nothing between."""

_OTHERS = "cpu.utilisation_ratio"
_TOTAL = "cpu.total_utilisation_ratio"
_PRESSURE = "cpu.pressure_ratio"
_PRESSURE_PERIOD_S = 1.0  # the kernel brings its average up to date every 2 s
_Ticks = tuple[int, int, int]
"""What a core did since boot or in a window, in the kernel's ticks: busy, idle, stolen."""
_NO_TICKS = CpuCounters(busy_ticks=0, steal_ticks=0, total_ticks=0, own_ticks=0, cores=0)
_OFFLINE = Quantity.missing("masked", "the core is offline")
_NO_TICK = Quantity.missing("masked", "no tick of the kernel's counters passed in the window")
_NEW = Quantity.missing("masked", "the core came online less than a window ago")


@dataclass(frozen=True, slots=True)
class _Sample:
    """Counters at one instant; never differences, which would lose what came before."""

    at_s: float
    cores: Mapping[int, _Ticks]
    own: int | None


class CpuUtilisation(Sensor):
    """Reads ``cpu.utilisation_ratio``: the share of all cores' time that other processes use.

    Beside it ``cpu.total_utilisation_ratio`` and ``cpu<N>.utilisation_ratio``, which include this
    process, and ``cpu.pressure_ratio``, the share of the last 10 s in which some task waited for a
    core. Cores count that were online at both ends of the window.

    Args:
        root: Where the file tree starts. Tests pass a recorded tree.
        window_s: Least length of the window, seconds.

    Source:
        proc_stat(5) and proc_pid_stat(5), as in :mod:`edgewise.device.load`; Linux kernel,
        Documentation/accounting/psi.rst (avg10 is in percent).
    """

    name = "procfs"
    period_s = 0.05  # the window moves on in steps of half its length

    def __init__(self, root: Path, *, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        # The lines of the cores come first; those of 600 cores fit.
        self._machine = KeptFile(root / "proc/stat", max_bytes=1 << 16)
        self._process = KeptFile(root / "proc/self/stat")
        self._stalls = KeptFile(root / "proc/pressure/cpu")
        self._samples: deque[_Sample] = deque()
        self._known: set[int] = set()
        self._pressure = (float("-inf"), Quantity.missing("unsupported", "not read yet"))

    def read(self, now_s: float) -> Mapping[str, Quantity]:
        """Read the counters and compare them with those of a window ago."""
        quantities = {_PRESSURE: self._read_pressure(now_s)}
        machine = self._machine.text(now_s)
        cores = _parse_cores(machine.value or "")
        if not cores:
            self._samples.clear()
            reason = machine.reason or f"{self._machine.path} lists no core"
            quality = "unsupported" if machine.quality == "ok" else machine.quality
            return quantities | self._everywhere(Quantity.missing(quality, reason))
        self._known |= cores.keys()
        process = self._process.text(now_s)
        now = _Sample(now_s, cores, _parse_own(process.value or ""))
        before = self._a_window_before(now)
        if before is None:
            reason = f"the first window of {self._window_s:g} s is not over yet"
            return quantities | self._everywhere(Quantity.missing("masked", reason))
        spent = _spent(before, now)
        for core in self._known:
            quantities[f"cpu{core}.utilisation_ratio"] = (
                _busy(*spent[core]) if core in spent else _NEW if core in cores else _OFFLINE
            )
        # The kernel's own sums jump where a core goes or comes.
        busy, idle, steal = map(sum, zip(*spent.values(), strict=True)) if spent else (0, 0, 0)
        quantities[_TOTAL] = _busy(busy, idle, steal)
        if now.own is None:
            quality = "unsupported" if process.quality == "ok" else process.quality
            reason = process.reason or f"{self._process.path} does not say what this process used"
            quantities[_OTHERS] = Quantity.missing(quality, reason)
        elif before.own is None:
            reason = "what this process used is known for less than a window"
            quantities[_OTHERS] = Quantity.missing("masked", reason)
        else:
            own = now.own - before.own
            quantities[_OTHERS] = _busy_with_others(busy, idle, steal, own, len(spent))
        return quantities

    def close(self) -> None:
        """Close all descriptors and begin a new window."""
        for each in (self._machine, self._process, self._stalls):
            each.close()
        self._samples.clear()

    def _everywhere(self, why: Quantity) -> dict[str, Quantity]:
        names = [f"cpu{core}.utilisation_ratio" for core in self._known]
        return dict.fromkeys([*names, _OTHERS, _TOTAL], why)

    def _a_window_before(self, now: _Sample) -> _Sample | None:
        samples = self._samples
        if samples and now.at_s < samples[-1].at_s:
            samples.clear()  # the clock was set back
        samples.append(now)
        until_s = now.at_s - self._window_s + 1e-6  # rounding must not cost one more period
        while len(samples) > 1 and samples[1].at_s <= until_s:
            samples.popleft()
        return samples[0] if samples[0].at_s <= until_s else None

    def _read_pressure(self, now_s: float) -> Quantity:
        read_s, found = self._pressure
        if not 0 <= now_s - read_s < _PRESSURE_PERIOD_S:
            reading = self._stalls.text(now_s)
            if reading.value is None:
                found = Quantity.missing(reading.quality, reading.reason)
            else:
                found = _parse_pressure(reading.value, self._stalls.path)
            self._pressure = (now_s, found)
        return found


def make(root: Path = Path("/")) -> Sensor:
    """The sensor of CPU utilisation under ``root``."""
    return CpuUtilisation(root)


def _parse_cores(text: str) -> dict[int, _Ticks]:
    cores: dict[int, _Ticks] = {}
    # A list of cores that was cut off ends in half a line.
    for line in text.partition("\nintr")[0].splitlines():
        fields = line.split()
        if not fields or not fields[0].startswith("cpu"):
            break
        if fields[0] == "cpu":
            continue
        try:
            user, nice, system, idle, iowait, irq, softirq, steal = map(int, fields[1:9])
            cores[int(fields[0][3:])] = (user + nice + system + irq + softirq, idle + iowait, steal)
        except ValueError:
            continue
    return cores


def _parse_own(text: str) -> int | None:
    # A program's name may hold blanks and parentheses; the fields start after the last one.
    fields = text.rpartition(")")[2].split()
    try:
        return int(fields[11]) + int(fields[12])
    except (IndexError, ValueError):
        return None


def _parse_pressure(text: str, path: str) -> Quantity:
    for line in text.splitlines():
        kind, _, rest = line.partition(" avg10=")
        if kind != "some":
            continue
        try:
            percent = float(rest.split()[0])
        except (IndexError, ValueError):
            break
        if 0 <= percent <= 100:
            return Quantity.ok(percent / 100)
    return Quantity.missing("unsupported", f"{path} says {text[:40]!r}")


def _spent(before: _Sample, now: _Sample) -> dict[int, _Ticks]:
    """Ticks that passed, of each core that both list; a counter that stepped back counts as 0."""
    spent: dict[int, _Ticks] = {}
    for core, (busy, idle, steal) in now.cores.items():
        then = before.cores.get(core)
        if then is not None:
            spent[core] = (max(0, busy - then[0]), max(0, idle - then[1]), max(0, steal - then[2]))
    return spent


def _busy(busy: int, idle: int, steal: int) -> Quantity:
    total = busy + idle + steal
    return Quantity.ok(busy / total) if total else _NO_TICK


def _busy_with_others(busy: int, idle: int, steal: int, own: int, cores: int) -> Quantity:
    total = busy + idle + steal
    counted = CpuCounters(
        busy_ticks=busy, steal_ticks=steal, total_ticks=total, own_ticks=own, cores=cores
    )
    load = load_between(_NO_TICKS, counted, window_s=0.0)
    return _NO_TICK if load.other_ratio is None else Quantity.ok(load.other_ratio)
