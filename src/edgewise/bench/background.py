"""Background loads: real processes that compete with the measured one, and surely end.

A load ends by its own handle when it is stopped, when its ``with`` block is left for any reason,
when this process exits, and when this process is killed. It does not measure anything.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from edgewise.clock import Clock, MonotonicClock
from edgewise.errors import ConfigError, EdgeError, nearest_names

LOAD_KINDS = ("cpu", "memory", "periodic")
PROC = Path("/proc")

_log = logging.getLogger(__name__)
_WORKER = Path(__file__).with_name("_load_worker.py")
_START_TIMEOUT_S = 20.0

_running: set[Load] = set()
_registry_lock = threading.Lock()


class Load:
    """Processes that keep the machine busy in one way.

    ``cpu`` computes for a share of every 20 ms, ``memory`` copies within 64 MiB, ``periodic`` does
    a fixed burst of work every period, as audio does. Starting waits until every worker is at
    work. A load may be started again after it was stopped.

    Args:
        kind: One of ``cpu``, ``memory``, ``periodic``.
        duty_ratio: Share of time each worker is busy, in (0, 1].
        processes: How many workers.
        nice: Niceness of each worker; below zero needs a privilege.
        cpus: CPU numbers the workers may run on; ``None`` leaves them those of this process.
        period_s: Time from burst to burst of ``periodic``, seconds.
        grace_s: How long a worker may take to end before it is killed, seconds.

    Raises:
        ConfigError: An argument is out of its range, or the kind is unknown.

    Example:
        >>> with Load("cpu", duty_ratio=0.1) as load:
        ...     load.is_running
        True
        >>> load.is_running
        False
    """

    def __init__(  # noqa: PLR0913 - each is one property of the load
        self,
        kind: str,
        *,
        duty_ratio: float = 1.0,
        processes: int = 1,
        nice: int = 0,
        cpus: Collection[int] | None = None,
        period_s: float = 0.02,
        grace_s: float = 1.0,
    ) -> None:
        if kind not in LOAD_KINDS:
            raise ConfigError(
                f"unknown kind of load {kind!r}", help=nearest_names(str(kind), LOAD_KINDS)
            )
        if not 0.0 < duty_ratio <= 1.0:
            raise ConfigError(f"expected a duty ratio above 0 and up to 1, found {duty_ratio!r}")
        if processes < 1:
            raise ConfigError(f"expected at least one load process, found {processes!r}")
        if not -20 <= nice <= 19:
            raise ConfigError(f"expected a niceness from -20 to 19, found {nice!r}")
        if cpus is not None and (not cpus or min(cpus) < 0):
            raise ConfigError(f"expected CPU numbers for the load, found {list(cpus)!r}")
        for name, value in (("period_s", period_s), ("grace_s", grace_s)):
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"expected {name} to be a finite time above zero, found {value}")
        self.kind = kind
        self.duty_ratio = duty_ratio
        self.processes = processes
        self.nice = nice
        self.cpus = None if cpus is None else tuple(sorted(set(cpus)))
        self.period_s = period_s
        self.grace_s = grace_s
        self._workers: list[subprocess.Popen[bytes]] = []
        self._spent_s: float | None = None
        self._owner_pid = 0
        self._lock = threading.RLock()

    @property
    def label(self) -> str:
        """What a person reads on a chart, for example ``"2 × cpu at 50 %"``."""
        count = f"{self.processes} × " if self.processes > 1 else ""
        share = f" at {self.duty_ratio:.0%}".replace("%", " %") if self.duty_ratio < 1 else ""
        return f"{count}{self.kind}{share}"

    @property
    def pids(self) -> tuple[int, ...]:
        """Process numbers of the workers that have not been reaped."""
        return tuple(worker.pid for worker in self._workers)

    @property
    def is_running(self) -> bool:
        """Whether the load was started and every worker is still alive."""
        with self._lock:
            return bool(self._workers) and all(w.poll() is None for w in self._workers)

    @property
    def cpu_time_s(self) -> float | None:
        """Processor time of all workers of this start, or of the last one, seconds.

        ``None`` before the first start and where there is no ``/proc``.
        """
        with self._lock:
            return _cpu_time_s(self.pids) if self._workers else self._spent_s

    def start(self) -> None:
        """Start the workers and return when all are at work.

        Raises:
            ConfigError: It runs already, or the system refused the niceness or the processors.
            EdgeError: A worker did not come up.
        """
        with self._lock:
            if self._workers:
                raise ConfigError(f"the load {self.label!r} runs already", help="stop it first")
            self._owner_pid = os.getpid()
            with _registry_lock:
                _running.add(self)
            try:
                for _ in range(self.processes):
                    self._workers.append(self._spawn())
                for worker in self._workers:
                    self._await_ready(worker)
            except BaseException:
                self.stop()
                raise
        _log.debug("load %s started as %s", self.label, self.pids)

    def stop(self) -> None:
        """End every worker: ask, wait for the grace, kill, reap. Does nothing if none runs."""
        with self._lock:
            workers = self._workers
            if not workers or self._owner_pid != os.getpid():
                return  # a forked copy of this object does not own the workers
            self._spent_s = _cpu_time_s(self.pids)
            try:
                for worker in workers:
                    worker.terminate()
                until_s = time.monotonic() + self.grace_s
                for worker in workers:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        worker.wait(max(0.0, until_s - time.monotonic()))
            finally:
                for worker in workers:
                    if worker.poll() is None:
                        _log.debug("load worker %d outlived its grace; killing it", worker.pid)
                        worker.kill()
                for worker in workers:
                    worker.wait()
                    for pipe in (worker.stdin, worker.stdout):
                        if pipe is not None:
                            pipe.close()
                self._workers = []
                with _registry_lock:
                    _running.discard(self)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _spawn(self) -> subprocess.Popen[bytes]:
        command = [
            *(sys.executable, "-I", "-S", str(_WORKER), self.kind),
            *(repr(self.duty_ratio), repr(self.period_s), str(self.nice)),
            ",".join(map(str, self.cpus or ())),
            str(os.getpid()),
        ]
        try:
            # Standard input is the life line: it closes with this process, however that ends.
            return subprocess.Popen(  # noqa: S603 - our own file, arguments checked above
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                process_group=0,
            )
        except OSError as error:
            raise EdgeError(f"a load process could not be started: {error}") from error

    def _await_ready(self, worker: subprocess.Popen[bytes]) -> None:
        assert worker.stdout is not None  # noqa: S101 - opened as a pipe in _spawn
        until_s = time.monotonic() + _START_TIMEOUT_S
        said = b""
        while not said.endswith(b"\n"):
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not select.select([worker.stdout], [], [], left_s)[0]:
                raise EdgeError(f"a load process said nothing for {_START_TIMEOUT_S:g} s")
            part = worker.stdout.read(256)
            if not part:
                raise EdgeError(f"a load process ended at its start with code {worker.wait()}")
            said += part
        if said != b"ready\n":
            reason = said.decode(errors="replace").strip().removeprefix("error: ")
            raise ConfigError(
                f"the system refused the load {self.label!r} with nice={self.nice}, "
                f"cpus={self.cpus}: {reason}",
                help=f"CPUs this process may use: {_allowed_cpus()}",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedLoad:
    """When a load of a schedule really ran.

    Attributes:
        start_s: All its workers were at work, seconds since the schedule's start.
        stop_s: All its workers had ended, seconds since the schedule's start.
        label: What the load was.
    """

    start_s: float
    stop_s: float
    label: str


class LoadSchedule:
    """Loads that start and stop at given times, played on a thread of their own.

    Leaving the ``with`` block stops what still runs, whatever the reason for leaving.

    Args:
        entries: (start, stop, load): seconds since the schedule's start. The spans of one load
            must not overlap.
        clock: What ``played`` is stamped with; it must move with real time.

    Raises:
        ConfigError: A span is empty, negative or not finite, or overlaps one of the same load.

    Example:
        >>> with LoadSchedule([(0.0, 60.0, Load("cpu", duty_ratio=0.1))]) as schedule:
        ...     pass
        >>> schedule.is_playing
        False
    """

    def __init__(
        self, entries: Sequence[tuple[float, float, Load]], *, clock: Clock | None = None
    ) -> None:
        last_stop_s: dict[int, float] = {}
        for start_s, stop_s, load in sorted(entries, key=lambda e: e[0]):
            if not 0.0 <= start_s < stop_s < math.inf:
                raise ConfigError(
                    f"the load {load.label!r} is to run from {start_s} s to {stop_s} s; "
                    "expected 0 <= start < stop"
                )
            if start_s < last_stop_s.get(id(load), 0.0):
                raise ConfigError(
                    f"the load {load.label!r} is to start at {start_s} s, before it was stopped",
                    help="use one Load object for each of two spans that overlap",
                )
            last_stop_s[id(load)] = stop_s
        self.entries = tuple(entries)
        self._clock: Clock = MonotonicClock() if clock is None else clock
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._origin_s = 0.0
        self._played: list[PlayedLoad] = []
        self._error: BaseException | None = None

    @property
    def is_playing(self) -> bool:
        """Whether the thread is at work: loads run or are still to come."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def played(self) -> tuple[PlayedLoad, ...]:
        """The loads that have run and ended so far, in the order of their ends."""
        return tuple(self._played)

    def start(self) -> None:
        """Begin to play; the present instant is second zero.

        Raises:
            ConfigError: It was started before.
        """
        if self._thread is not None:
            raise ConfigError("this schedule was started before", help="make a new LoadSchedule")
        self._origin_s = self._clock.now_s()
        self._thread = threading.Thread(target=self._play, name="edgewise-load", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and every load that still runs.

        Raises:
            EdgeError: A load could not be started while the schedule played.
        """
        self._end.set()
        try:
            if self._thread is not None:
                self._thread.join()
        finally:
            for _, _, load in self.entries:
                load.stop()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.stop()
        except EdgeError:
            if error is None:
                raise
            _log.warning("a scheduled load had failed as well", exc_info=True)

    def _play(self) -> None:
        # A stop comes before a start of the same instant, so that one load can run back to back.
        events = sorted(
            [(start_s, 1, load) for start_s, _, load in self.entries]
            + [(stop_s, 0, load) for _, stop_s, load in self.entries],
            key=lambda event: event[:2],
        )
        began_s: dict[Load, float] = {}
        try:
            for due_s, is_start, load in events:
                if self._end.wait(max(0.0, due_s - self._since_start_s())):
                    break
                if is_start:
                    load.start()
                    began_s[load] = self._since_start_s()
                else:
                    self._finish(load, began_s)
        except BaseException as error:  # noqa: BLE001 - handed to the thread that calls stop()
            self._error = error
        finally:
            for load in list(began_s):
                self._finish(load, began_s)

    def _finish(self, load: Load, began_s: dict[Load, float]) -> None:
        load.stop()
        self._played.append(
            PlayedLoad(start_s=began_s.pop(load), stop_s=self._since_start_s(), label=load.label)
        )

    def _since_start_s(self) -> float:
        return self._clock.now_s() - self._origin_s


def stop_all_loads() -> None:
    """End every load that this process started and that still runs."""
    with _registry_lock:
        loads = list(_running)
    for load in loads:
        load.stop()


atexit.register(stop_all_loads)


def _cpu_time_s(pids: Sequence[int], *, root: Path = PROC) -> float | None:
    """Processor time of some processes, seconds; ``None`` where the kernel has no such file.

    Source:
        proc(5): fields 14 (utime) and 15 (stime) of /proc/PID/stat, in clock ticks.
    """
    ticks = 0
    for pid in pids:
        try:
            stat = (root / str(pid) / "stat").read_text()
        except OSError:
            return None
        fields = stat.rpartition(")")[2].split()  # the name before it may hold spaces
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _allowed_cpus() -> str:
    return ", ".join(map(str, sorted(os.sched_getaffinity(0))))
