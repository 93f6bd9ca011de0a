"""Watches the device from one background thread and keeps its newest state."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from edgewise.clock import Clock, MonotonicClock
from edgewise.device.sensor import Sensor
from edgewise.device.state import DeviceState, Quantity
from edgewise.errors import ConfigError, EdgeError
from edgewise.units import format_duration

_log = logging.getLogger(__name__)

OnState = Callable[[DeviceState], object]

THREAD_NAME = "edgewise-monitor"

_RANK = {"ok": 0, "stale": 1, "masked": 2, "denied": 3, "unsupported": 4}
_KEPT_TIMES = 512
_FIRST_RETRY_S = 1.0
_LAST_RETRY_S = 30.0
_FIRST_STATE_WITHIN_S = 1.0
# A busy machine runs the thread late now and then; a value that is a tenth of a second old still
# says more than none.
_LEAST_STALE_S = 0.1
_LEAST_JUMP_S = 1.0
# What this machine lacks is looked for once a second, so that a late node is soon found.
_SILENT_READINGS = 10
_SILENT_PERIOD_S = 1.0
_LONGEST_IDLE_S = 0.05
_LONGEST_SLEEP_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorCost:
    """What watching itself costs.

    Attributes:
        reads: How often the device was read.
        cpu_ratio: CPU time of the monitor's thread, callbacks left out, per wall time: 0.01 is 1 %
            of one core. ``None`` before its thread has read twice.
        read_p50_s: Median time of one reading of all sensors that were due, seconds; the last 512
            readings count. ``None`` before the first.
        read_p99_s: 99th percentile of the same.
        callback_p50_s: Median time of all callbacks of one state, seconds; ``None`` without any.
        callback_cpu_ratio: CPU time of the callbacks per wall time; ``None`` as ``cpu_ratio``.
        late_ratio: Share of the scheduled readings that were skipped or began more than half a
            period late; ``None`` before the first.
    """

    reads: int
    cpu_ratio: float | None
    read_p50_s: float | None
    read_p99_s: float | None
    callback_p50_s: float | None
    callback_cpu_ratio: float | None
    late_ratio: float | None


def read_state(sensors: Iterable[Sensor], now_s: float) -> DeviceState:
    """Read every sensor once.

    Args:
        sensors: In order of preference.
        now_s: The present instant on a monotonic clock.

    Returns:
        All quantities. Of a name that several report the first good value counts, else the most
        telling reason: stale, masked, denied, unsupported. What a sensor that raises would have
        said is absent, and the log says why.
    """
    answers: list[Mapping[str, Quantity]] = []
    for sensor in sensors:
        try:
            answers.append(sensor.read(now_s))
        except Exception as error:  # noqa: BLE001 - one faulty sensor must not hide the others
            _log.warning("%s", _fault(sensor, error))
    return DeviceState(at_s=now_s, quantities=_merge(answers))


@dataclass(slots=True)
class _Watched:
    """A sensor and what it said last; only the thread that reads changes it.

    ``answers`` are replaced before ``read_at_s``, so that another thread, which looks at the
    instant first, never takes old answers for new ones.
    """

    sensor: Sensor
    answers: dict[str, Quantity] = field(default_factory=dict)
    read_at_s: float = -math.inf
    due_s: float = -math.inf
    retry_s: float = 0.0  # 0 while it works
    silent: int = 0  # readings in a row without a good value

    @property
    def period_s(self) -> float:
        """How often it is read: a sensor that has nothing to tell is asked now and then."""
        own_s = self.sensor.period_s
        return own_s if self.silent < _SILENT_READINGS else max(own_s, _SILENT_PERIOD_S)


class Monitor:
    """Reads sensors again and again on a thread of its own; a `StateSource`.

    Readings are due at fixed instants, so that the period does not drift; those that are missed
    are skipped, and those at which no sensor is due are left out, up to 50 ms. A sensor that has
    had nothing to tell for ten readings is asked once a second. One that raises is asked again
    after 1 s, then 2 s, up to 30 s; meanwhile its quantities say why they are unknown. Where a
    sensor hangs, `latest` says that the values are stale; none is passed off as current.

    After a gap (a stopped process, a suspended machine, a clock that was set) rates would span the
    gap, so what is read first is marked stale and everything is read once more.

    Args:
        sensors: In order of preference, see `read_state`. The monitor closes them when it stops.
        clock: For instants and ages. The thread itself waits in real time.
        period_s: Time between readings, at least 1 ms. A sensor with a longer period of its own is
            read that often.
        stale_after_s: How old a value may be, at least three periods of its sensor; the larger of
            three periods and 0.1 s by default.
        on_state: Called with each new state on the monitor's thread, after it was published. One
            that raises is logged once and goes on being called.

    Raises:
        ConfigError: The period or age is out of range.
    """

    def __init__(
        self,
        sensors: Iterable[Sensor],
        *,
        clock: Clock | None = None,
        period_s: float = 0.01,
        stale_after_s: float | None = None,
        on_state: Sequence[OnState] = (),
    ) -> None:
        if not 1e-3 <= period_s <= 3600:
            raise ConfigError(
                f"expected a monitoring period from 1 ms to 1 h, found {format_duration(period_s)}",
                help="10 ms follows clocks closely, 100 ms costs a tenth of it",
            )
        if stale_after_s is None:
            stale_after_s = max(3 * period_s, _LEAST_STALE_S)
        if not stale_after_s >= period_s:
            raise ConfigError(
                f"values cannot be stale after {format_duration(stale_after_s)} when they are read"
                f" every {format_duration(period_s)}",
                help="leave stale_after_s out, or give at least the period",
            )
        self.period_s = period_s
        self.stale_after_s = stale_after_s
        self._clock = clock if clock is not None else MonotonicClock()
        self._on_state = tuple(on_state)
        self._watched = [_Watched(each) for each in sensors]
        self._jump_s = max(_LEAST_JUMP_S, 3 * period_s, stale_after_s)
        self._asleep_s = _asleep_s
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._first = threading.Event()
        self._reading: Sensor | None = None
        self._published = DeviceState(at_s=self._clock.now_s(), quantities={})
        self._merged: Mapping[str, Quantity] = {}
        self._longest_wait_s = max(period_s, _LONGEST_IDLE_S)
        self._last_step: tuple[float, float] | None = None
        self._complained: set[int] = set()
        self._read_times_s: deque[float] = deque(maxlen=_KEPT_TIMES)
        self._callback_times_s: deque[float] = deque(maxlen=_KEPT_TIMES)
        self._reads = self._late = self._skipped = 0
        self._wall_s = self._cpu_s = self._callback_cpu_s = 0.0

    def latest(self) -> DeviceState:
        """The newest state: one reference, no file and no lock.

        Returns:
            What was read last. Where that is too old, since a sensor hangs or the monitor does not
            run, a copy whose values are marked stale. Before the first reading, a state without
            quantities.
        """
        state = self._published
        now_s = self._clock.now_s()
        if now_s - state.at_s <= self.stale_after_s:
            return state
        return DeviceState(
            at_s=state.at_s, quantities=_merge(self._aged(each, now_s) for each in self._watched)
        )

    @property
    def running(self) -> bool:
        """Whether its thread is alive in this process."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def cost(self) -> MonitorCost:
        """What watching has cost since `start`."""
        wall_s = self._wall_s
        scheduled = self._reads + self._skipped
        return MonitorCost(
            reads=self._reads,
            cpu_ratio=(self._cpu_s - self._callback_cpu_s) / wall_s if wall_s > 0 else None,
            read_p50_s=_quantile(self._read_times_s, 0.5),
            read_p99_s=_quantile(self._read_times_s, 0.99),
            callback_p50_s=_quantile(self._callback_times_s, 0.5),
            callback_cpu_ratio=self._callback_cpu_s / wall_s if wall_s > 0 else None,
            late_ratio=self._late / scheduled if scheduled else None,
        )

    def start(self) -> Self:
        """Start the thread; nothing happens where it runs already.

        Returns:
            Itself, when the first state is there, or after 1 s where a sensor takes longer.

        Raises:
            EdgeError: The thread of an earlier start still hangs in a sensor.
        """
        if self.running:
            if not self._stopping.is_set():
                return self
            raise EdgeError(
                f"the monitor cannot start again: {self._hang() or 'it is still stopping'}",
                help="make a new monitor without that sensor",
            )
        self._reads = self._late = self._skipped = 0
        self._wall_s = self._cpu_s = self._callback_cpu_s = 0.0
        self._read_times_s.clear()
        self._callback_times_s.clear()
        self._last_step = None
        self._stopping, self._first = threading.Event(), threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(self._stopping,), name=THREAD_NAME, daemon=True
        )
        self._thread.start()
        _running.add(self)
        self._first.wait(_FIRST_STATE_WITHIN_S)
        return self

    def stop(self, timeout_s: float = 1.0) -> None:
        """End the thread and close the sensors.

        The thread ends after the reading that it is in. Where a sensor hangs for longer than
        ``timeout_s``, a warning is logged and this returns; the thread ends when the sensor
        answers, and does not keep the program from ending.
        """
        self._stopping.set()
        thread = self._thread
        if thread is threading.current_thread():  # called by a callback
            return
        if thread is not None:
            thread.join(timeout_s)
            if thread.is_alive():
                _log.warning("the monitor could not be stopped yet: %s", self._hang())
                return
        self._thread = None
        _running.discard(self)
        self._close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def step(self) -> DeviceState:
        """Read what is due, publish it and call back; the thread does this once per period.

        Call it directly only where no thread runs, as a simulation on a virtual clock does.
        """
        now_s = self._clock.now_s()
        gap = self._gap(now_s)
        changed = False
        for each in self._watched:
            # A reading that begins a little early must not make a slow sensor wait a period more.
            if gap or now_s >= each.due_s - self.period_s / 2:
                changed = True
                self._read(each)
                if gap:
                    each.answers = _marked_stale(each.answers, gap)
                    each.due_s = now_s
        if changed:
            self._merged = _merge(each.answers for each in self._watched)
        state = DeviceState(at_s=now_s, quantities=self._merged)
        self._published = state
        self._reads += 1
        self._read_times_s.append(self._clock.now_s() - now_s)
        if self._on_state:
            self._call_back(state)
        return state

    def _run(self, stopping: threading.Event) -> None:
        cpu_start_s, start_s = time.thread_time(), self._clock.now_s()
        due_s = start_s
        try:
            while not stopping.is_set():
                self.step()
                if not self._first.is_set():
                    self._first.set()
                now_s = self._clock.now_s()
                self._cpu_s, self._wall_s = time.thread_time() - cpu_start_s, now_s - start_s
                due_s = self._next_due_s(due_s, now_s)
                # Not longer than a period, even where the clock stepped back.
                _wait(min(max(0.0, due_s - now_s), self._longest_wait_s), stopping)
                self._late += self._clock.now_s() - due_s > self.period_s / 2
        finally:
            self._close()

    def _next_due_s(self, due_s: float, now_s: float) -> float:
        if now_s < due_s - self.period_s or now_s > due_s + self._jump_s:
            return now_s + self.period_s  # the clock jumped, or the process was stopped
        missed = math.floor((now_s - due_s) / self.period_s)
        if missed > 0:
            self._skipped += missed
            self._late += missed
        due_s += (1 + max(0, missed)) * self.period_s
        # Waking costs as much as a reading, so where no sensor is due nobody wakes.
        soonest_s = min((each.due_s for each in self._watched), default=due_s)
        idle = math.floor(
            min(soonest_s - due_s, self._longest_wait_s - self.period_s) / self.period_s + 0.5
        )
        return due_s + max(0, idle) * self.period_s

    def _gap(self, now_s: float) -> str:
        """Why what is read now cannot be compared with what was read before; empty if it can."""
        asleep_s = self._asleep_s()
        before, self._last_step = self._last_step, (now_s, asleep_s)
        if before is None:
            return ""
        passed_s = now_s - before[0]
        if passed_s < 0:
            return f"the clock stepped back by {_long(-passed_s)}"
        passed_s += max(0.0, asleep_s - before[1])
        if passed_s > self._jump_s:
            return f"nothing was read for {_long(passed_s)}; rates may span that gap"
        return ""

    def _read(self, each: _Watched) -> None:
        sensor = self._reading = each.sensor
        now_s = self._clock.now_s()
        try:
            # A copy, since the sensor may go on using its own.
            each.answers = dict(sensor.read(now_s))
        except Exception as error:  # noqa: BLE001 - whatever it is, the other sensors go on
            self._failed(each, error, now_s)
        else:
            if each.retry_s:
                _log.info("the sensor %r works again", sensor.name)
                each.retry_s = 0.0
            good = any(found.quality == "ok" for found in each.answers.values())
            each.silent = 0 if good else each.silent + 1
            missed = now_s - each.due_s > each.period_s
            each.due_s = (now_s if missed else each.due_s) + each.period_s
        each.read_at_s = now_s
        self._reading = None

    def _failed(self, each: _Watched, error: Exception, now_s: float) -> None:
        fault = _fault(each.sensor, error)
        if not each.retry_s:
            _log.warning("%s", fault)
        each.retry_s = min(2 * each.retry_s, _LAST_RETRY_S) or _FIRST_RETRY_S
        each.due_s = now_s + each.retry_s
        each.answers = {
            name: Quantity.missing("unsupported", f"{fault}; tried again within 30 s")
            for name in each.answers
        }
        with contextlib.suppress(Exception):
            each.sensor.close()  # it opens its files afresh next time

    def _call_back(self, state: DeviceState) -> None:
        start_s, cpu_start_s = self._clock.now_s(), time.thread_time()
        for index, callback in enumerate(self._on_state):
            try:
                callback(state)
            except Exception:  # noqa: BLE001 - whatever it is, watching goes on
                if index not in self._complained:
                    self._complained.add(index)
                    _log.exception("a callback of the monitor failed; said once: %r", callback)
        self._callback_cpu_s += time.thread_time() - cpu_start_s
        self._callback_times_s.append(self._clock.now_s() - start_s)

    def _aged(self, each: _Watched, now_s: float) -> Mapping[str, Quantity]:
        age_s = now_s - each.read_at_s
        answers = each.answers
        if age_s <= max(3 * each.period_s, self.stale_after_s):
            return answers
        why = self._hang() or ("" if self.running else "the monitor does not run")
        said = f"read {_long(age_s)} ago" + (f": {why}" if why else "")
        return _marked_stale(answers, said)

    def _hang(self) -> str:
        sensor = self._reading
        return f"the sensor {sensor.name!r} does not answer" if sensor is not None else ""

    def _close(self) -> None:
        for each in self._watched:
            with contextlib.suppress(Exception):
                each.sensor.close()

    def _forget_thread(self) -> None:
        """In the child of a fork, which has the descriptors and not the thread."""
        self._thread = self._reading = None
        self._stopping = threading.Event()  # the lock of the old one may be held for ever
        self._close()


_running: weakref.WeakSet[Monitor] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for monitor in list(_running):
        monitor._forget_thread()  # noqa: SLF001 - this module's own
    _running.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _wait(duration_s: float, stopping: threading.Event) -> None:
    # Sleeping takes half the CPU time of waiting for an event.
    if duration_s <= _LONGEST_SLEEP_S:
        time.sleep(duration_s)
    else:
        stopping.wait(duration_s)


def _merge(answers: Iterable[Mapping[str, Quantity]]) -> dict[str, Quantity]:
    merged: dict[str, Quantity] = {}
    for each in answers:
        # Whole mappings at once: a loop over all quantities would be most of a reading's cost.
        if merged.keys().isdisjoint(each):
            merged.update(each)
            continue
        for name, found in each.items():
            before = merged.get(name)
            if before is None or _RANK[found.quality] < _RANK[before.quality]:
                merged[name] = found
    return merged


def _marked_stale(answers: Mapping[str, Quantity], reason: str) -> dict[str, Quantity]:
    return {
        name: Quantity(value=found.value, quality="stale", reason=reason)
        if found.quality == "ok"
        else found
        for name, found in answers.items()
    }


def _fault(sensor: Sensor, error: Exception) -> str:
    return f"the sensor {sensor.name!r} failed: {type(error).__name__}: {error}"


def _long(duration_s: float) -> str:
    return f"{duration_s:.0f} s" if duration_s >= 100 else format_duration(duration_s)


def _quantile(times_s: deque[float], level: float) -> float | None:
    ordered = sorted(times_s)  # copies first, in one step that no other thread interrupts
    return ordered[math.ceil(level * len(ordered)) - 1] if ordered else None


def _asleep_s() -> float:
    """How long the machine has been suspended, which the monotonic clock leaves out."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)
