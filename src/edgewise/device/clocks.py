"""At which frequency each core runs, and how finely this machine can tell time."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from pathlib import Path

from edgewise.device.files import (
    NumberReading,
    Quality,
    exists,
    parse_cpu_list,
    read_number,
    read_text,
)

_CPUS = "sys/devices/system/cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockReading:
    """Frequency of one core.

    Attributes:
        cpu: Its number.
        current_hz: What the driver last requested or measured; ``None`` unless ``quality`` is
            ``"ok"``.
        max_hz: What the silicon can do, not what the present power mode allows; ``None`` where the
            kernel does not say.
        governor: Name of the governor; ``None`` where the kernel does not say.
        quality: ``"ok"``, ``"denied"``, ``"masked"`` (core offline) or ``"unsupported"``.
        reason: Why there is no current frequency; empty where there is one.
    """

    cpu: int
    current_hz: float | None
    max_hz: float | None
    governor: str | None
    quality: Quality
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerQuality:
    """How finely the clock used for measurements can tell time.

    Attributes:
        resolution_s: What the clock promises.
        step_s: Smallest step seen between two readings, which includes the cost of reading.
        source: The kernel's clock source, such as ``"tsc"``; ``None`` where it does not say.
    """

    resolution_s: float
    step_s: float
    source: str | None


def read_clocks(root: Path = Path("/")) -> dict[int, ClockReading]:
    """Read the clock of every core the kernel lists.

    Args:
        root: Where the file tree starts. Tests pass a recorded tree.

    Returns:
        By CPU number, offline cores among them. Empty only where the kernel lists no CPU.

    Source:
        Linux kernel, Documentation/admin-guide/pm/cpufreq.rst: scaling_cur_freq and
        cpuinfo_max_freq are in kHz. cpuinfo_cur_freq is left alone: it is for root, and some
        drivers busy-wait half a millisecond to answer.
    """
    present = read_text(root / _CPUS / "present").value
    online = read_text(root / _CPUS / "online").value
    listed = parse_cpu_list(present or online or "")
    awake = parse_cpu_list(online or present or "")
    return {cpu: _read_clock(root, cpu, online=cpu in (awake or ())) for cpu in listed or ()}


def read_frequencies_hz(root: Path = Path("/")) -> dict[int, float]:
    """Current frequency of each core that reports one.

    Args:
        root: Where the file tree starts. Tests pass a recorded tree.

    Returns:
        CPU number to Hz. Empty where the kernel exposes no cpufreq (most virtual machines), so a
        caller can tell "unknown" from a frequency; :func:`read_clocks` has the reason.
    """
    return {
        cpu: reading.current_hz
        for cpu, reading in read_clocks(root).items()
        if reading.current_hz is not None
    }


def timer_quality(root: Path = Path("/"), *, readings: int = 2000) -> TimerQuality:
    """Ask how finely time can be told here; takes well under a millisecond.

    Args:
        root: Where the file tree starts. Tests pass a recorded tree.
        readings: How many times the clock is read to find its smallest step.
    """
    seen_ns = [time.perf_counter_ns() for _ in range(readings)]
    steps_ns = [after - before for before, after in itertools.pairwise(seen_ns)]
    resolution_s = time.get_clock_info("perf_counter").resolution
    path = root / "sys/devices/system/clocksource/clocksource0/current_clocksource"
    return TimerQuality(
        resolution_s=resolution_s,
        step_s=min((each for each in steps_ns if each > 0), default=1e9 * resolution_s) / 1e9,
        source=read_text(path).value,
    )


def _read_clock(root: Path, cpu: int, *, online: bool) -> ClockReading:
    directory = root / _CPUS / f"cpu{cpu}/cpufreq"
    if not online:
        current = NumberReading(value=None, quality="masked", reason="the core is offline")
    elif not exists(directory):
        current = NumberReading(
            value=None,
            quality="unsupported",
            reason="the kernel exposes no cpufreq (usual in virtual machines and containers)",
        )
    else:
        current = read_number(directory / "scaling_cur_freq")
    current_hz = _hz(current)
    if current.quality == "ok" and current_hz is None:
        current = NumberReading(
            value=None, quality="unsupported", reason=f"{directory}/scaling_cur_freq says 0"
        )
    return ClockReading(
        cpu=cpu,
        current_hz=current_hz,
        max_hz=_hz(read_number(directory / "cpuinfo_max_freq")),
        governor=read_text(directory / "scaling_governor").value,
        quality=current.quality,
        reason=current.reason,
    )


def _hz(frequency_khz: NumberReading) -> float | None:
    return frequency_khz.value * 1e3 if frequency_khz.value else None
