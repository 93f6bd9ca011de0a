"""A CPU quota on a running process: makes a machine slower in steps, as lower clocks do.

The process is put into a control group of its own below the one it is in, and taken out again when
the quota ends, however that happens; a group that a killed process left is removed at the next use.

A quota is not a lower clock: within each period a thread runs at full speed until its share is used
up and then stands still. With short periods computations see the average, with the kernel's usual
100 ms they see stalls. The kernel accepts no quota below 1 ms, and notices that one is used up at
its own ticks (4 ms at 250 Hz), so periods that are not whole ticks, or allow less than one, give
less than was asked. `quota_effect` measures it. A computation of 10 ms at 25 % on Linux 6.18, 250
ticks per second, two virtual cores shared with other programs but first in line (nice -19): the
share of the core that was got, and the 5th, 50th and 95th percentile of the computation's time:

    period    share   5 %    50 %   95 %
      4 ms    0.22    34 ms  51 ms  60 ms
      5 ms    0.22    35 ms  47 ms  55 ms
      8 ms    0.25    18 ms  32 ms  47 ms
     12 ms    0.25    15 ms  28 ms  37 ms
     20 ms    0.25    14 ms  31 ms  51 ms
    100 ms    0.26     6 ms  19 ms  74 ms

Hence 8 ms, two ticks, is the default here: the shortest that gives what it promises.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from edgewise.bench.background import process_family
from edgewise.clock import Clock, MonotonicClock
from edgewise.device.cgroups import limit_directories
from edgewise.device.files import exists, read_text
from edgewise.errors import ConfigError, EdgeError
from edgewise.units import format_duration

PERIOD_S = 0.008
PREFIX = "edgewise-"

_LEAST_US = 1000
_REMOVING_S = 1.0

_log = logging.getLogger(__name__)
_active: set[CpuQuota] = set()


class QuotaUnavailable(EdgeError):
    """This process may not limit its own CPU time here; the message says why."""


class GroupFiles:
    """What is done to the kernel's tree of control groups; tests pass one that pretends."""

    def make(self, group: Path) -> None:
        """Make a group."""
        group.mkdir()

    def remove(self, group: Path) -> None:
        """Remove a group without processes."""
        group.rmdir()

    def write(self, path: Path, text: str) -> None:
        """Write one of a group's files; never makes one."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)


class CpuQuota:
    """Limits the CPU time of this process, all threads together, while its ``with`` block runs.

    It begins without a limit. What the process starts meanwhile is limited with it, until `exempt`
    takes it out.

    Args:
        pid: Another process than this one, in the same control group as this one.
        period_s: Within which the share holds; longer where the share of it would be below 1 ms,
            which no kernel accepts.
        root: Where the file tree starts. Tests pass a recorded tree.
        files: Acts on control groups.

    Raises:
        ConfigError: The period is out of range.

    Source:
        Linux kernel, Documentation/scheduler/sched-bwc.rst (cpu.cfs_quota_us, cpu.cfs_period_us;
        1 ms to 1 s) and Documentation/admin-guide/cgroup-v2.rst (cpu.max, delegation, and why
        processes stand in leaves only).
    """

    def __init__(
        self,
        *,
        pid: int | None = None,
        period_s: float = PERIOD_S,
        root: Path = Path("/"),
        files: GroupFiles | None = None,
    ) -> None:
        if not 1e-3 <= period_s <= 1.0:
            raise ConfigError(
                f"expected a period of a quota from 1 ms to 1 s, found {format_duration(period_s)}"
            )
        self.pid = os.getpid() if pid is None else pid
        self.period_s = period_s
        self.ratio: float | None = None
        self._root = root
        self._files = files if files is not None else GroupFiles()
        self._home: Path | None = None
        self._group: Path | None = None
        self._version = 1
        self._lent = False
        self._owner_pid = 0
        self._lock = threading.RLock()

    @property
    def group(self) -> Path | None:
        """The group's directory; ``None`` unless the quota is at work."""
        return self._group

    def start(self) -> None:
        """Make the group and move the process into it.

        Raises:
            ConfigError: It was started already.
            QuotaUnavailable: There is no such group, or no permission.
        """
        with self._lock:
            if self._group is not None:
                raise ConfigError("this quota was started already", help="stop it first")
            self._version, home = self._find_home()
            remove_stale_groups(home, root=self._root, files=self._files)
            group = home / _group_name(self.pid, self._root)
            try:
                self._files.make(group)
            except OSError as error:
                raise self._refused(f"a group below {home} cannot be made", error) from error
            self._home, self._group, self._owner_pid = home, group, os.getpid()
            _active.add(self)
            try:
                self._enter(home, group)
            except BaseException:
                self.stop()
                raise

    def set_ratio(self, ratio: float | None) -> None:
        """Change the limit at once.

        Args:
            ratio: CPU time per wall time as a share of one core, in (0, 1]. ``None`` and 1.0 lift
                the limit, so that several threads may use several cores again.

        Raises:
            ConfigError: The share is out of range, or the quota is not at work.
            QuotaUnavailable: The kernel refused, as where a group above allows less.
        """
        if ratio is not None and not 0.0 < ratio <= 1.0:
            raise ConfigError(f"expected a quota above 0 and up to 1, found {ratio!r}")
        with self._lock:
            if self._group is None:
                raise ConfigError("this quota is not at work", help="with CpuQuota() as quota: …")
            try:
                self._write_limit(self._group, ratio)
            except OSError as error:
                raise self._refused(f"a quota of {ratio} was refused", error) from error
            self.ratio = ratio

    def exempt(self, pids: Iterable[int]) -> None:
        """Take processes, and what they have started, out of the group: they are not limited."""
        with self._lock:
            if self._group is None or self._home is None:
                return
            proc = self._root / "proc"
            for each in [member for pid in pids for member in process_family(pid, proc)]:
                self._move(each, self._home)

    def exempt_thread(self) -> bool:
        """Take the calling thread out, and what it will start.

        Returns:
            Whether the kernel can: version 1 only.
        """
        with self._lock:
            if self._group is None or self._home is None or self._version != 1:
                return False
            try:
                self._files.write(self._home / "tasks", str(threading.get_native_id()))
            except OSError:
                return False
            return True

    def stop(self) -> None:
        """Move the process back and remove the group. Does nothing where none is at work."""
        with self._lock:
            home, group = self._home, self._group
            if home is None or group is None or self._owner_pid != os.getpid():
                return  # a forked copy of this object does not own the group
            self._home = self._group = self.ratio = None
            _active.discard(self)
            if self._lent:
                self._lent = False
                with contextlib.suppress(OSError):
                    self._files.write(home / "cgroup.subtree_control", "-cpu")
            self._move(self.pid, home)
            _clear(group, home, files=self._files)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _find_home(self) -> tuple[int, Path]:
        proc = self._root / "proc"
        own, other = (read_text(proc / str(p) / "cgroup").value for p in ("self", self.pid))
        if self.pid != os.getpid() and own != other:
            raise QuotaUnavailable(
                f"process {self.pid} has ended, or is in another control group than this one",
                help="start it from this process",
            )
        seen: set[int] = set()
        for version, directory in limit_directories("cpu", self._root):
            if version in seen:
                continue  # a group above
            seen.add(version)
            controllers = read_text(directory / "cgroup.controllers").value or ""
            if version == 2 and "cpu" not in controllers.split():
                continue
            if version == 2 or exists(directory / "cgroup.procs"):
                return version, directory
        raise QuotaUnavailable(
            "this process has no control group with a cpu controller",
            help="systemd-run --user --scope -p Delegate=cpu edgewise …",
        )

    def _enter(self, home: Path, group: Path) -> None:
        try:
            self._files.write(group / "cgroup.procs", str(self.pid))
            if self._version == 2 and not exists(group / "cpu.max"):
                self._files.write(home / "cgroup.subtree_control", "+cpu")
                self._lent = True
            self._write_limit(group, None)
        except OSError as error:
            why = f"the group {group} cannot be used"
            if error.errno == errno.EBUSY:
                why += ", since other processes are in the group above it"
            raise self._refused(why, error) from error

    def _write_limit(self, group: Path, ratio: float | None) -> None:
        period_us = round(self.period_s * 1e6)
        if ratio is not None:
            period_us = max(period_us, math.ceil(_LEAST_US / ratio))
        free = ratio is None or ratio >= 1.0
        quota_us = 0 if ratio is None else max(_LEAST_US, round(ratio * period_us))
        if self._version == 2:
            self._files.write(group / "cpu.max", f"{'max' if free else quota_us} {period_us}")
            return
        quota, period = group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us"
        if read_text(period).value != str(period_us):
            self._files.write(quota, "-1")  # what stands there may not go with the new period
            self._files.write(period, str(period_us))
        self._files.write(quota, "-1" if free else str(quota_us))

    def _move(self, pid: int, group: Path) -> None:
        try:
            self._files.write(group / "cgroup.procs", str(pid))
        except ProcessLookupError:
            pass  # it has ended
        except OSError as error:
            _log.warning("process %d could not be moved to %s: %s", pid, group, error)

    def _refused(self, what: str, error: OSError) -> QuotaUnavailable:
        said = errno.errorcode.get(error.errno or 0, type(error).__name__)
        return QuotaUnavailable(
            f"{what}: {said}, {error.strerror}",
            help="run as root, or: systemd-run --user --scope -p Delegate=cpu edgewise …",
        )


def remove_stale_groups(
    home: Path, *, root: Path = Path("/"), files: GroupFiles | None = None
) -> list[str]:
    """Remove groups whose process is gone, as after ``kill -9``.

    Args:
        home: The group below which they stand.
        root: Where the file tree starts.
        files: Acts on control groups.

    Returns:
        Names of those that were removed.
    """
    files = files if files is not None else GroupFiles()
    removed = []
    for group in sorted(home.glob(f"{PREFIX}*")):
        pid_text = group.name.removeprefix(PREFIX).partition("-")[0]
        if not pid_text.isdecimal() or group.name == _group_name(int(pid_text), root):
            continue
        if "0" in _members(group):
            continue  # a live process of another container, whose number cannot be seen from here
        if _clear(group, home, files=files):
            removed.append(group.name)
            _log.info("removed the control group of a process that was killed: %s", group)
    return removed


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedQuota:
    """When a step of a schedule really came.

    Attributes:
        at_s: Since the schedule's start, seconds.
        ratio: The quota from then on; 1.0 for none.
    """

    at_s: float
    ratio: float


class QuotaSchedule:
    """Steps a quota as a DVFS trace steps clocks, on a thread of its own.

    Leaving the ``with`` block ends the thread and lifts the limit. The thread itself is not limited
    where the kernel can tell threads apart (control groups version 1), so steps come in time.

    Args:
        quota: At work while the schedule plays.
        steps: (seconds since the schedule's start, share of one core), in order.
        clock: What ``played`` is stamped with; it must move with real time.

    Raises:
        ConfigError: Steps are not in order, or a share is out of range.
    """

    def __init__(
        self,
        quota: CpuQuota,
        steps: Sequence[tuple[float, float]],
        *,
        clock: Clock | None = None,
    ) -> None:
        times_s = [at_s for at_s, _ in steps]
        if times_s != sorted(times_s) or not all(0.0 <= t < math.inf for t in times_s):
            raise ConfigError(f"expected steps of a quota in order of time, found {times_s}")
        wrong = [ratio for _, ratio in steps if not 0.0 < ratio <= 1.0]
        if wrong:
            raise ConfigError(f"expected quotas above 0 and up to 1, found {wrong}")
        self.steps = tuple(steps)
        self._quota = quota
        self._clock: Clock = MonotonicClock() if clock is None else clock
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._origin_s = 0.0
        self._played: list[PlayedQuota] = []
        self._error: BaseException | None = None

    @property
    def is_playing(self) -> bool:
        """Whether steps are still to come."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def played(self) -> tuple[PlayedQuota, ...]:
        """The steps that have come so far."""
        return tuple(self._played)

    def start(self) -> None:
        """Begin to play; the present instant is second zero.

        Raises:
            ConfigError: It was started before.
        """
        if self._thread is not None:
            raise ConfigError("this schedule was started before", help="make a new QuotaSchedule")
        self._origin_s = self._clock.now_s()
        self._thread = threading.Thread(target=self._play, name="edgewise-quota", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and lift the limit.

        Raises:
            EdgeError: A step had failed while the schedule played.
        """
        self._end.set()
        try:
            if self._thread is not None:
                self._thread.join()
        finally:
            if self._quota.group is not None:
                self._quota.set_ratio(None)
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.stop()
        except EdgeError:
            if kind is None:
                raise
            _log.warning("a step of a quota had failed as well", exc_info=True)

    def _play(self) -> None:
        self._quota.exempt_thread()
        try:
            for due_s, ratio in self.steps:
                if self._end.wait(max(0.0, due_s - self._since_start_s())):
                    return
                self._quota.set_ratio(ratio)
                self._played.append(PlayedQuota(at_s=self._since_start_s(), ratio=ratio))
        except BaseException as error:  # noqa: BLE001 - handed to the thread that calls stop()
            self._error = error

    def _since_start_s(self) -> float:
        return self._clock.now_s() - self._origin_s


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaEffect:
    """What a quota does to a computation.

    Attributes:
        period_s: Of the quota, seconds.
        ratio: The share asked for.
        got_ratio: CPU time per wall time that was got.
        p05_s: 5th percentile of the computation's time, seconds.
        p50_s: Median.
        p95_s: 95th percentile.
        runs: How many computations.
    """

    period_s: float
    ratio: float
    got_ratio: float
    p05_s: float
    p50_s: float
    p95_s: float
    runs: int


def quota_effect(
    periods_s: Sequence[float],
    *,
    ratio: float = 0.25,
    work_s: float = 0.01,
    seconds: float = 1.0,
) -> list[QuotaEffect]:
    """Measure what a quota does to a computation, for several periods.

    Args:
        periods_s: Periods to try, seconds.
        ratio: Share of one core.
        work_s: How long the computation takes without a limit, seconds.
        seconds: How long to try each period.

    Raises:
        QuotaUnavailable: This process may not limit its CPU time.
    """
    compute = _computation(work_s)
    effects = []
    for period_s in periods_s:
        with CpuQuota(period_s=period_s) as quota:
            quota.set_ratio(ratio)
            times_s: list[float] = []
            start_s, cpu_start_s = time.perf_counter(), time.process_time()
            while time.perf_counter() - start_s < seconds or len(times_s) < 3:
                times_s.append(compute())
            got_ratio = (time.process_time() - cpu_start_s) / (time.perf_counter() - start_s)
        times_s.sort()
        p05_s, p50_s, p95_s = (times_s[int(q * (len(times_s) - 1))] for q in (0.05, 0.5, 0.95))
        effects.append(
            QuotaEffect(
                period_s=period_s,
                ratio=ratio,
                got_ratio=got_ratio,
                p05_s=p05_s,
                p50_s=p50_s,
                p95_s=p95_s,
                runs=len(times_s),
            )
        )
    return effects


def _computation(work_s: float) -> Callable[[], float]:
    """Arithmetic that takes so long when undisturbed, by the best of some short runs.

    Returns:
        What computes, and tells how long it took, seconds.
    """

    def spin(steps: int) -> float:
        start_s, value = time.perf_counter(), 1
        for _ in range(steps):
            value = (value * 1664525 + 1013904223) & 0xFFFFFFFF
        return time.perf_counter() - start_s

    step_s = min(spin(5000) for _ in range(20)) / 5000
    return functools.partial(spin, max(1, round(work_s / step_s)))


def _group_name(pid: int, root: Path) -> str:
    """Names the process for good: its number comes again, its number and start time do not."""
    proc = root / "proc"
    # The name before it may hold blanks; field 22 is the start in ticks since boot.
    fields = (read_text(proc / str(pid) / "stat").value or "").rpartition(")")[2].split()
    started = fields[19] if len(fields) > 19 and fields[0] not in "ZX" else "gone"
    boot = (read_text(proc / "sys/kernel/random/boot_id").value or "unknown")[:8]
    return f"{PREFIX}{pid}-{started}-{boot}"


def _clear(group: Path, home: Path, *, files: GroupFiles) -> bool:
    """Move what is left in a group up, and remove it; whether that worked."""
    until_s = time.monotonic() + _REMOVING_S
    while True:
        for pid in _members(group):
            with contextlib.suppress(OSError):
                files.write(home / "cgroup.procs", pid)
        try:
            files.remove(group)
        except FileNotFoundError:
            return True
        except OSError as error:
            # A process that is just ending keeps its group busy for a moment.
            if error.errno != errno.EBUSY or time.monotonic() > until_s:
                _log.warning("the control group %s could not be removed: %s", group, error)
                return False
            time.sleep(0.005)
        else:
            return True


def _members(group: Path) -> list[str]:
    return (read_text(group / "cgroup.procs").value or "").split()


def _stop_all() -> None:
    for quota in list(_active):
        quota.stop()


atexit.register(_stop_all)
