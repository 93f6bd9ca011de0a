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
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, get_args

from edgewise.clock import Clock, MonotonicClock
from edgewise.errors import ConfigError, EdgeError, nearest_names

Engine = Literal["auto", "builtin", "stress-ng"]

LOAD_KINDS = ("cpu", "memory", "periodic", "map", "audio")
PROC = Path("/proc")

_log = logging.getLogger(__name__)
_WORKER = Path(__file__).with_name("_load_worker.py")
_START_TIMEOUT_S = 20.0
# What kinds do, and how much of it: work, share of time, period in seconds.
_WORK = {
    "cpu": ("cpu", 1.0, 0.02),
    "memory": ("memory", 1.0, 0.02),
    "periodic": ("periodic", 1.0, 0.02),
    "map": ("memory", 0.5, 0.02),
    "audio": ("periodic", 0.1, 0.01),
}

_running: set[Load] = set()
_registry_lock = threading.Lock()


class Load:
    """Processes that keep the machine busy in one way.

    ``cpu`` computes for a share of every 20 ms, ``memory`` copies within 64 MiB, ``periodic`` does
    a fixed burst of work every period. ``map`` and ``audio`` stand for the co-runners of that name
    in UniExit (section 7), whose parameters it does not give; ours are ``memory`` for half of the
    time, and ``periodic`` every 10 ms for a tenth of it, as for 480 samples at 48 kHz. Starting
    waits until every worker is at work. A load may be started again after it was stopped.

    Args:
        kind: One of ``cpu``, ``memory``, ``periodic``, ``map``, ``audio``.
        duty_ratio: Share of time each worker is busy, in (0, 1]; the kind's own by default, which
            is all the time for the first three.
        processes: How many workers.
        nice: Niceness of each worker; below zero needs a privilege.
        cpus: CPU numbers the workers may run on; ``None`` leaves them those of this process.
        period_s: Time from burst to burst of ``periodic`` and ``audio``, seconds; the kind's own by
            default: 20 ms and 10 ms.
        grace_s: How long a worker may take to end before it is killed, seconds.
        engine: Who does the work: ``"stress-ng"``, ``"builtin"``, or ``"auto"``, which is stress-ng
            where it is installed and knows the load: ``cpu`` (``--cpu-load``) and ``memory`` all
            the time (``--stream``).

    Attributes:
        engine: ``"stress-ng"`` or ``"builtin"``.

    Raises:
        ConfigError: An argument is out of its range, the kind is unknown, or stress-ng was asked
            for and is not installed or does not know the load.

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
        duty_ratio: float | None = None,
        processes: int = 1,
        nice: int = 0,
        cpus: Collection[int] | None = None,
        period_s: float | None = None,
        grace_s: float = 1.0,
        engine: Engine = "auto",
    ) -> None:
        if kind not in LOAD_KINDS:
            raise ConfigError(
                f"unknown kind of load {kind!r}", help=nearest_names(str(kind), LOAD_KINDS)
            )
        self._work, own_ratio, own_period_s = _WORK[kind]
        duty_ratio = own_ratio if duty_ratio is None else duty_ratio
        period_s = own_period_s if period_s is None else period_s
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
        self.engine, self._program = _choose_engine(engine, self._work, kind, duty_ratio)
        self.kind = kind
        self.duty_ratio = duty_ratio
        self.processes = processes
        self.nice = nice
        self.cpus = None if cpus is None else tuple(sorted(set(cpus)))
        self.period_s = period_s
        self.grace_s = grace_s
        self._workers: list[subprocess.Popen[bytes]] = []
        self._spent_s: float | None = None
        self._problem = ""
        self._owner_pid = 0
        self._lock = threading.RLock()

    @property
    def label(self) -> str:
        """What a person reads on a chart, for example ``"2 × cpu at 50 %"``."""
        count = f"{self.processes} × " if self.processes > 1 else ""
        is_own = self.duty_ratio == _WORK[self.kind][1]
        share = "" if is_own else f" at {self.duty_ratio:.0%}".replace("%", " %")
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
    def problem(self) -> str:
        """How a worker of this start, or of the last one, ended by itself; empty if none did."""
        with self._lock:
            codes = [code for w in self._workers if (code := w.poll()) is not None]
            if codes:
                self._problem = (
                    f"{len(codes)} of {self.processes} load processes ended by themselves, with"
                    f" code {', '.join(map(str, codes))}"
                )
            return self._problem

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
            self._problem = ""
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
            if self.problem:
                _log.warning("load %s: %s", self.label, self.problem)
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
            *(sys.executable, "-I", "-S", str(_WORKER), self._work),
            *(repr(self.duty_ratio), repr(self.period_s), str(self.nice)),
            ",".join(map(str, self.cpus or ())),
            str(os.getpid()),
            *self._program,
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
        problem: How it ended by itself before it was stopped; empty where it did not.
    """

    start_s: float
    stop_s: float
    label: str
    problem: str = ""


class LoadSchedule:
    """Loads that start and stop at given times, played on a thread of their own.

    Leaving the ``with`` block stops what still runs, whatever the reason for leaving.

    Args:
        entries: (start, stop, load): seconds since the schedule's start. The spans of one load
            must not overlap.
        clock: What ``played`` is stamped with; it must move with real time.
        on_start: Called with each load when all its workers are at work, on the schedule's thread.

    Raises:
        ConfigError: A span is empty, negative or not finite, or overlaps one of the same load.

    Example:
        >>> with LoadSchedule([(0.0, 60.0, Load("cpu", duty_ratio=0.1))]) as schedule:
        ...     pass
        >>> schedule.is_playing
        False
    """

    def __init__(
        self,
        entries: Sequence[tuple[float, float, Load]],
        *,
        clock: Clock | None = None,
        on_start: Callable[[Load], object] | None = None,
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
        self._on_start = on_start
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
                    if self._on_start is not None:
                        self._on_start(load)
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
            PlayedLoad(
                start_s=began_s.pop(load),
                stop_s=self._since_start_s(),
                label=load.label,
                problem=load.problem,
            )
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


def _choose_engine(
    engine: Engine, work: str, kind: str, duty_ratio: float
) -> tuple[str, tuple[str, ...]]:
    """Who does the work, and the command where it is stress-ng.

    Source:
        stress-ng(1): --cpu-load in percent, --cpu-load-slice in milliseconds busy per turn,
        --stream copies within several buffers of --stream-l3-size.
    """
    if engine not in get_args(Engine):
        raise ConfigError(
            f"unknown engine of loads {engine!r}",
            help=nearest_names(str(engine), get_args(Engine)),
        )
    options: tuple[str, ...] = ()
    if work == "cpu":
        busy_ms = max(1, round(20 * duty_ratio))
        load = ("--cpu-load", str(max(1, round(100 * duty_ratio))))
        options = ("--cpu", "1", *load, "--cpu-load-slice", str(busy_ms))
    elif work == "memory" and duty_ratio >= 1.0:
        options = ("--stream", "1", "--stream-l3-size", "16m")
    found = shutil.which("stress-ng") if options and engine != "builtin" else None
    if found is not None:
        return "stress-ng", (found, "--quiet", "--timeout", "0", *options)
    if engine == "stress-ng":
        raise ConfigError(
            "stress-ng is not installed"
            if options
            else f"stress-ng has no load like {kind!r} at {duty_ratio:.0%} of the time",
            help="engine='builtin', or install stress-ng" if options else "engine='builtin'",
        )
    return "builtin", ()


def process_family(pid: int, root: Path) -> list[int]:
    """A process and all it has started."""
    try:
        children = (root / str(pid) / "task" / str(pid) / "children").read_text().split()
    except OSError:
        children = []
    return [pid, *(each for child in children for each in process_family(int(child), root))]


def _cpu_time_s(pids: Sequence[int], *, root: Path = PROC) -> float | None:
    """Processor time of some processes, seconds; ``None`` where the kernel has no such file.

    Source:
        proc(5): fields 14 (utime) and 15 (stime) of /proc/PID/stat, in clock ticks.
    """
    ticks = 0
    for each in [member for pid in pids for member in process_family(pid, root)]:
        try:
            stat = (root / str(each) / "stat").read_text()
        except OSError:
            return None
        fields = stat.rpartition(")")[2].split()  # the name before it may hold spaces
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _allowed_cpus() -> str:
    return ", ".join(map(str, sorted(os.sched_getaffinity(0))))
