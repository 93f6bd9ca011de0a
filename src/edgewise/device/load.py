"""How busy the machine is with other work, so that a measurement can say how quiet it was."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgewise.clock import Clock, MonotonicClock
from edgewise.device.files import read_text


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuCounters:
    """CPU time since boot, summed over all cores, in the kernel's ticks.

    Attributes:
        busy_ticks: Time in user, nice, system and interrupt code.
        steal_ticks: Time that the hypervisor gave to other machines.
        total_ticks: Busy, stolen, idle and waiting time together.
        own_ticks: What this process used of ``busy_ticks``; its children are other processes.
        cores: Cores the counters cover.
    """

    busy_ticks: int
    steal_ticks: int
    total_ticks: int
    own_ticks: int
    cores: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherLoad:
    """Who used the CPU during a window.

    Attributes:
        other_ratio: Share of all cores' time used by other processes, 0 to 1; ``None`` if unknown.
        own_ratio: Share used by this process; ``None`` if unknown.
        steal_ratio: Share the hypervisor gave to other machines; ``None`` if unknown.
        other_cores: ``other_ratio`` as a number of cores; ``None`` if unknown.
        window_s: How long was watched, seconds.
        reason: Why it is unknown; empty where it is known.
    """

    other_ratio: float | None
    own_ratio: float | None
    steal_ratio: float | None
    other_cores: float | None
    window_s: float
    reason: str = ""


def read_cpu_counters(root: Path = Path("/")) -> CpuCounters | None:
    """Read the counters once.

    Args:
        root: Where the file tree starts. Tests pass a recorded tree.

    Returns:
        The counters, or ``None`` where the kernel shows none.

    Source:
        proc_stat(5): user nice system idle iowait irq softirq steal; guest time is part of user.
        proc_pid_stat(5): fields 14 and 15 are utime and stime.
    """
    machine = read_text(root / "proc/stat").value
    process = read_text(root / "proc/self/stat").value
    if machine is None or process is None:
        return None
    lines = machine.splitlines()
    try:
        ticks = [int(each) for each in lines[0].split()[1:9]]
        if len(ticks) < 4:
            return None
        user, nice, system, idle, iowait, irq, softirq, steal = (*ticks, *[0] * (8 - len(ticks)))
        # A program's name may hold blanks and parentheses; the fields start after the last one.
        after_name = process.rpartition(")")[2].split()
        own = int(after_name[11]) + int(after_name[12])
    except (IndexError, ValueError):
        return None
    busy = user + nice + system + irq + softirq
    return CpuCounters(
        busy_ticks=busy,
        steal_ticks=steal,
        total_ticks=busy + steal + idle + iowait,
        own_ticks=own,
        cores=sum(1 for line in lines if line.startswith("cpu") and line[3:4].isdigit()),
    )


def load_between(
    before: CpuCounters | None, after: CpuCounters | None, *, window_s: float
) -> OtherLoad:
    """Compare two readings.

    Args:
        before: The earlier reading, or ``None`` where it failed.
        after: The later reading, or ``None`` where it failed.
        window_s: Time between them, seconds; only reported.

    Returns:
        Shares of all cores' time in the window, or the reason why they are unknown.
    """
    if before is None or after is None:
        return _unknown("the kernel shows no CPU counters in /proc/stat", window_s)
    total = after.total_ticks - before.total_ticks
    if total <= 0:
        return _unknown("no tick passed: the window is too short", window_s)
    own = max(0, after.own_ticks - before.own_ticks)
    # Counters of iowait and of cores that go offline may step back, hence the clamps.
    busy = max(0, after.busy_ticks - before.busy_ticks)
    other_ratio = min(1.0, max(0, busy - own) / total)
    return OtherLoad(
        other_ratio=other_ratio,
        own_ratio=min(1.0, own / total),
        steal_ratio=min(1.0, max(0, after.steal_ticks - before.steal_ticks) / total),
        other_cores=other_ratio * after.cores if after.cores else None,
        window_s=window_s,
    )


def other_load(
    window_s: float = 0.2, *, root: Path = Path("/"), clock: Clock | None = None
) -> OtherLoad:
    """Watch for a while how much CPU time other processes use.

    Args:
        window_s: How long to watch, seconds. The kernel counts in steps of about 10 ms per core,
            so a window of 0.2 s resolves 5 % of one core.
        root: Where the file tree starts. Tests pass a recorded tree.
        clock: Sleeps through the window; the machine's clock by default.

    Returns:
        The load of the whole machine, outside a container too.
    """
    clock = clock or MonotonicClock()
    before, start_s = read_cpu_counters(root), clock.now_s()
    clock.sleep_s(window_s)
    after = read_cpu_counters(root)
    return load_between(before, after, window_s=clock.now_s() - start_s)


def _unknown(reason: str, window_s: float) -> OtherLoad:
    return OtherLoad(
        other_ratio=None,
        own_ratio=None,
        steal_ratio=None,
        other_cores=None,
        window_s=window_s,
        reason=reason,
    )
