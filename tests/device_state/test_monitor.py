from __future__ import annotations

import itertools
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from edgewise.clock import VirtualClock
from edgewise.device.monitor import THREAD_NAME, Monitor, OnState, read_state
from edgewise.device.sensor import Sensor, make_sensors
from edgewise.device.state import FEATURES, DeviceState, Quantity
from edgewise.errors import ConfigError, EdgeError

# How long a test waits for another thread before it gives up; nothing is asserted about time.
PATIENCE_S = 20.0


class Fake(Sensor):
    """Answers what it was given, or what a function makes of the instant."""

    def __init__(
        self,
        answers: Mapping[str, Quantity] | Callable[[float], Mapping[str, Quantity]],
        *,
        name: str = "fake",
        period_s: float = 0.0,
    ) -> None:
        self.name = name
        self.period_s = period_s
        self.answers = answers
        self.reads: list[float] = []
        self.closed = 0

    def read(self, now_s: float) -> Mapping[str, Quantity]:
        self.reads.append(now_s)
        return self.answers(now_s) if callable(self.answers) else self.answers

    def close(self) -> None:
        self.closed += 1


class Hanging(Fake):
    """Answers once, then not before it is released."""

    def __init__(self) -> None:
        super().__init__({"gpu.power_w": Quantity.ok(5.0)}, name="hanging")
        self.entered, self.release = threading.Event(), threading.Event()

    def read(self, now_s: float) -> Mapping[str, Quantity]:
        if self.reads:
            self.entered.set()
            assert self.release.wait(PATIENCE_S)
        return super().read(now_s)


def clock_of(hz: float) -> Fake:
    return Fake({"cpu.frequency_hz": Quantity.ok(hz)})


def by_hand(
    *sensors: Sensor, period_s: float = 0.01, on_state: tuple[OnState, ...] = ()
) -> tuple[Monitor, VirtualClock]:
    """A monitor without a thread, on a clock that the test moves."""
    clock = VirtualClock(100.0)
    monitor = Monitor(sensors, clock=clock, period_s=period_s, on_state=on_state)
    monitor._asleep_s = lambda: 0.0
    return monitor, clock


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.001)


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == THREAD_NAME]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    until(lambda: not threads())


MISSING = {
    "stale": Quantity(value=1.0, quality="stale", reason="old"),
    "masked": Quantity.missing("masked", "offline"),
    "denied": Quantity.missing("denied", "for root"),
    "unsupported": Quantity.missing("unsupported", "no such file"),
}


@pytest.mark.parametrize(("better", "worse"), list(itertools.combinations(MISSING, 2)))
def test_the_most_telling_reason_is_kept_where_no_sensor_has_a_value(
    better: str, worse: str
) -> None:
    for order in ((better, worse), (worse, better)):
        state = read_state([Fake({"emc.frequency_hz": MISSING[each]}) for each in order], 1.0)

        assert state.quantities == {"emc.frequency_hz": MISSING[better]}


def test_the_first_sensor_with_a_good_value_wins() -> None:
    denied = Fake({"emc.frequency_hz": MISSING["denied"], "only.here_w": Quantity.ok(1.0)})
    first, second = clock_of(1e9), clock_of(2e9)
    published = Fake({"emc.frequency_hz": Quantity.ok(2e9)})

    state = read_state([denied, first, second, published], 7.0)

    assert state.at_s == 7.0
    assert {name: q.value for name, q in state.quantities.items()} == {
        "emc.frequency_hz": 2e9,
        "only.here_w": 1.0,
        "cpu.frequency_hz": 1e9,
    }


def test_one_reading_without_a_monitor_survives_a_sensor_that_raises(
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = read_state([Fake(_raise, name="broken"), clock_of(1e9)], 0.0)

    assert list(state.quantities) == ["cpu.frequency_hz"]
    assert "'broken' failed: KeyError: 'freq'" in caplog.text


def _raise(_now_s: float) -> Mapping[str, Quantity]:
    raise KeyError("freq")


def test_before_the_first_reading_the_state_is_empty_and_says_so() -> None:
    monitor, _ = by_hand(clock_of(1e9))

    assert monitor.latest().quantities == {}
    assert monitor.latest().reason("cpu.frequency_hz") == "no sensor reads it"
    assert monitor.cost.reads == 0
    assert monitor.cost.read_p50_s is monitor.cost.late_ratio is monitor.cost.cpu_ratio is None


def test_latest_gives_the_very_state_that_was_published() -> None:
    seen: list[DeviceState] = []
    monitor, clock = by_hand(clock_of(1e9), on_state=(seen.append,))

    monitor.step()
    assert monitor.latest() is seen[0]
    clock.sleep_s(0.01)
    monitor.step()

    assert monitor.latest() is seen[1]
    assert [each.at_s for each in seen] == [100.0, 100.01]


def test_a_published_state_does_not_change_when_the_sensor_reuses_its_answer() -> None:
    answers = {"cpu.frequency_hz": Quantity.ok(1e9)}
    monitor, clock = by_hand(Fake(answers))
    first = monitor.step()

    answers["cpu.frequency_hz"] = Quantity.ok(2e9)
    clock.sleep_s(0.01)
    second = monitor.step()

    assert first.value("cpu.frequency_hz") == 1e9
    assert second.value("cpu.frequency_hz") == 2e9


def test_a_slow_sensor_is_read_only_as_often_as_it_asks() -> None:
    fast, slow = clock_of(1e9), Fake({"thermal.cpu_celsius": Quantity.ok(40.0)}, period_s=0.1)
    monitor, clock = by_hand(fast, slow)

    for _ in range(101):
        monitor.step()
        clock.sleep_s(0.01)

    assert len(fast.reads) == 101
    assert slow.reads == pytest.approx([100.0 + 0.1 * each for each in range(11)])
    assert monitor.latest().value("thermal.cpu_celsius") == 40.0


def test_values_become_stale_when_nobody_reads_them_and_keep_the_last_value() -> None:
    fast, slow = clock_of(1e9), Fake({"thermal.cpu_celsius": Quantity.ok(40.0)}, period_s=1.0)
    absent = Fake({"gpu.load_ratio": MISSING["unsupported"]})
    monitor, clock = by_hand(fast, slow, absent)
    monitor.step()

    clock.sleep_s(0.5)
    after_half_a_second = monitor.latest()
    clock.sleep_s(3.0)
    after_long = monitor.latest()

    assert after_half_a_second.quantities["cpu.frequency_hz"] == Quantity(
        value=1e9, quality="stale", reason="read 500 ms ago: the monitor does not run"
    )
    assert after_half_a_second.value("thermal.cpu_celsius") == 40.0  # three periods are 3 s
    assert after_half_a_second.at_s == 100.0
    assert after_long.quantities["thermal.cpu_celsius"].quality == "stale"
    assert after_long.quantities["gpu.load_ratio"] == MISSING["unsupported"]


def test_a_sensor_that_raises_is_tried_again_ever_more_rarely_and_comes_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sensor, other = clock_of(1e9), Fake({"cpu.load_ratio": Quantity.ok(0.5)})
    monitor, clock = by_hand(sensor, other, period_s=0.5)
    monitor.step()
    sensor.answers = _raise
    sensor.reads.clear()
    for _ in range(300):
        clock.sleep_s(0.5)
        state = monitor.step()
    failed_at = [each - 100.5 for each in sensor.reads]
    lost = state.quantities["cpu.frequency_hz"]
    load = state.value("cpu.load_ratio")
    sensor.answers = {"cpu.frequency_hz": Quantity.ok(2e9)}
    for _ in range(60):
        clock.sleep_s(0.5)
        monitor.step()

    assert failed_at == [0, 1, 3, 7, 15, 31, 61, 91, 121]
    assert (lost.value, lost.quality) == (None, "unsupported")
    assert "'fake' failed: KeyError: 'freq'" in lost.reason
    assert load == 0.5
    assert sensor.closed == len(failed_at)
    assert monitor.latest().value("cpu.frequency_hz") == 2e9
    assert caplog.text.count("failed") == 1


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0], ids=["forward", "back"])
def test_what_is_read_after_a_clock_jump_is_stale_once_and_then_good(jump_s: float) -> None:
    slow = Fake({"energy.package-0_j": Quantity.ok(7.0)}, period_s=1.0)
    monitor, clock = by_hand(clock_of(1e9), slow)
    for _ in range(3):
        monitor.step()
        clock.sleep_s(0.01)

    clock._now_s += jump_s
    first = monitor.step()
    clock.sleep_s(0.01)
    second = monitor.step()

    assert {q.quality for q in first.quantities.values()} == {"stale"}
    assert re.search(r"36\d\d s", first.reason("cpu.frequency_hz"))
    assert {q.quality for q in second.quantities.values()} == {"ok"}
    assert len(slow.reads) == 3
    clock.sleep_s(0.01)
    monitor.step()
    assert len(slow.reads) == 3


def test_a_suspended_machine_is_noticed_although_its_monotonic_clock_stood_still() -> None:
    asleep_s = 0.0
    monitor, clock = by_hand(clock_of(1e9))
    monitor._asleep_s = lambda: asleep_s
    monitor.step()
    clock.sleep_s(0.01)

    asleep_s = 600.0
    state = monitor.step()

    assert state.quantities["cpu.frequency_hz"].quality == "stale"
    assert "600 s" in state.reason("cpu.frequency_hz")


def test_the_real_clocks_see_no_suspension_while_a_test_runs() -> None:
    monitor = Monitor([clock_of(1e9)])

    assert [monitor.step().value("cpu.frequency_hz") for _ in range(3)] == [1e9] * 3


def test_a_failing_callback_is_logged_once_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[DeviceState] = []

    def fail(_: DeviceState) -> None:
        raise ZeroDivisionError

    monitor, clock = by_hand(clock_of(1e9), on_state=(fail, seen.append))
    for _ in range(5):
        monitor.step()
        clock.sleep_s(0.01)

    assert len(seen) == 5
    assert caplog.text.count("a callback of the monitor failed") == 1


def test_time_in_callbacks_is_counted_apart_from_reading() -> None:
    clock = VirtualClock()

    def read(_now_s: float) -> Mapping[str, Quantity]:
        clock.sleep_s(0.001)
        return {}

    monitor = Monitor([Fake(read)], clock=clock, on_state=[lambda _: clock.sleep_s(0.004)])
    for _ in range(10):
        monitor.step()

    cost = monitor.cost
    assert cost.reads == 10
    assert cost.read_p50_s == pytest.approx(0.001)
    assert cost.read_p99_s == pytest.approx(0.001)
    assert cost.callback_p50_s == pytest.approx(0.004)


def test_quantiles_of_read_times_are_those_of_the_last_512() -> None:
    clock = VirtualClock()
    durations_s = iter([99.0] * 100 + [each / 1000 for each in range(1, 513)])

    def read(_now_s: float) -> Mapping[str, Quantity]:
        clock.sleep_s(next(durations_s))
        return {"cpu.frequency_hz": Quantity.ok(1e9)}

    monitor = Monitor([Fake(read)], clock=clock)
    for _ in range(612):
        monitor.step()

    assert len(monitor._read_times_s) == 512
    assert monitor.cost.read_p50_s == pytest.approx(0.256)
    assert monitor.cost.read_p99_s == pytest.approx(0.507)


@pytest.mark.parametrize(
    ("took_s", "next_due_s", "skipped"),
    [(0.0, 0.01, 0), (0.009, 0.01, 0), (0.0101, 0.02, 1), (0.057, 0.06, 5)],
)
def test_readings_keep_to_their_instants_and_missed_ones_are_skipped(
    took_s: float, next_due_s: float, skipped: int
) -> None:
    monitor, _ = by_hand()

    assert monitor._next_due_s(0.0, took_s) == pytest.approx(next_due_s)
    assert monitor._skipped == monitor._late == skipped


@pytest.mark.parametrize("now_s", [-3600.0, 3600.0])
def test_a_jump_neither_stops_readings_nor_makes_a_burst(now_s: float) -> None:
    monitor, _ = by_hand()

    assert monitor._next_due_s(0.0, now_s) == pytest.approx(now_s + 0.01)
    assert monitor._skipped == 0


def test_the_thread_reads_calls_back_on_its_own_thread_and_ends() -> None:
    names: list[str] = []
    sensor = clock_of(1e9)
    with Monitor(
        [sensor], period_s=0.001, on_state=[lambda _: names.append(threading.current_thread().name)]
    ) as monitor:
        assert monitor.latest().quantities["cpu.frequency_hz"] == Quantity.ok(1e9)
        assert monitor.running
        assert all(each.daemon for each in threads())
        until(lambda: len(names) >= 20)
        assert monitor.start() is monitor
        assert len(threads()) == 1

    assert not monitor.running
    assert threads() == []
    assert set(names) == {THREAD_NAME}
    assert sensor.closed >= 1
    cost = monitor.cost
    assert cost.reads == len(names)
    assert cost.cpu_ratio is not None
    assert cost.callback_cpu_ratio is not None
    assert cost.late_ratio is not None
    assert cost.read_p50_s is not None
    assert cost.read_p99_s is not None
    assert 0 < cost.cpu_ratio < 1
    assert 0 <= cost.late_ratio <= 1
    assert cost.read_p50_s <= cost.read_p99_s


def test_a_stopped_monitor_starts_again_and_counts_anew() -> None:
    sensor = clock_of(1e9)
    monitor = Monitor([sensor], period_s=0.001)
    with monitor:
        until(lambda: monitor.cost.reads >= 50)
    with monitor:
        assert monitor.latest().value("cpu.frequency_hz") == 1e9

    assert threads() == []
    monitor.stop()
    monitor.stop()


def test_the_thread_ends_when_the_block_that_uses_it_raises() -> None:
    with pytest.raises(KeyboardInterrupt), Monitor([clock_of(1e9)]):
        raise KeyboardInterrupt

    assert threads() == []


def test_a_callback_may_stop_the_monitor() -> None:
    stops: list[Callable[[], None]] = []
    monitor = Monitor([clock_of(1e9)], period_s=0.001, on_state=[lambda _: stops[0]()])
    stops.append(monitor.stop)
    monitor.start()

    until(lambda: not monitor.running)
    assert monitor.cost.reads == 1


def test_a_sensor_that_hangs_is_named_and_does_not_keep_stop_from_returning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hanging = Hanging()
    monitor = Monitor([clock_of(1e9), hanging], period_s=0.001, stale_after_s=0.002).start()
    assert hanging.entered.wait(PATIENCE_S)
    until(lambda: monitor.latest().quantities["gpu.power_w"].quality == "stale")

    state = monitor.latest()
    monitor.stop(timeout_s=0.01)

    assert state.quantities["gpu.power_w"].value == 5.0
    assert "the sensor 'hanging' does not answer" in state.reason("gpu.power_w")
    assert "could not be stopped yet: the sensor 'hanging' does not answer" in caplog.text
    assert all(each.daemon for each in threads())
    with pytest.raises(EdgeError, match="cannot start again: the sensor 'hanging'"):
        monitor.start()
    hanging.release.set()
    until(lambda: hanging.closed > 0)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - it lists itself either way


def test_no_descriptor_is_left_after_stop(tmp_path: Path) -> None:
    class KeepsOpen(Fake):
        descriptor: int | None = None

        def read(self, now_s: float) -> Mapping[str, Quantity]:
            if self.descriptor is None:
                self.descriptor = os.open(tmp_path, os.O_RDONLY)
            return super().read(now_s)

        def close(self) -> None:
            if self.descriptor is not None:
                os.close(self.descriptor)
                self.descriptor = None

    before = descriptors()
    with Monitor([KeepsOpen({})], period_s=0.001):
        during = descriptors()

    assert during == before + 1
    assert descriptors() == before


def test_all_sensors_of_this_machine_are_watched_and_leave_no_descriptor() -> None:
    read_state(make_sensors(), 0.0)  # what libraries open once and keep is not the monitor's
    before = descriptors()
    with Monitor(make_sensors(), period_s=0.005) as monitor:
        until(lambda: monitor.cost.reads >= 20)
        state = monitor.latest()

    assert set(FEATURES) <= set(state.quantities)
    for found in state.quantities.values():
        assert (found.quality == "ok") == (found.reason == "")
        assert found.quality != "ok" or found.value is not None
    assert descriptors() == before


def test_the_child_of_a_fork_has_no_thread_closes_the_files_and_can_start_its_own() -> None:
    sensor = clock_of(1e9)
    with Monitor([sensor], period_s=0.001) as monitor:
        child = os.fork()
        if child == 0:  # no assertion of pytest's may run here
            code = 1
            try:
                quiet = not monitor.running and not threads() and sensor.closed == 1
                sensor.reads.clear()
                with monitor:
                    works = monitor.latest().value("cpu.frequency_hz") == 1e9 and bool(sensor.reads)
                code = 0 if quiet and works and not threads() else 2
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)

        assert os.waitstatus_to_exitcode(status) == 0
        assert monitor.running
        assert sensor.closed == 0


@pytest.mark.parametrize("period_s", [0.0, -1.0, 1e-6, float("nan"), 1e9])
def test_a_period_that_cannot_be_kept_is_refused(period_s: float) -> None:
    with pytest.raises(ConfigError, match="from 1 ms to 1 h"):
        Monitor([], period_s=period_s)


def test_an_age_shorter_than_the_period_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be stale after 5 ms"):
        Monitor([], stale_after_s=0.005)


def test_the_log_of_a_working_monitor_is_empty(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), Monitor([clock_of(1e9)], period_s=0.001) as monitor:
        until(lambda: monitor.cost.reads > 5)

    assert caplog.records == []


def test_a_sensor_with_nothing_to_tell_is_asked_once_a_second_until_it_has() -> None:
    clock, calls = VirtualClock(), list[float]()
    there = False

    def read(now_s: float) -> Mapping[str, Quantity]:
        calls.append(now_s)
        good = Quantity.ok(1e9) if there else Quantity.missing("unsupported", "no such node")
        return {"gpu.frequency_hz": good}

    monitor = Monitor([Fake(read)], clock=clock)
    for _ in range(500):
        monitor.step()
        clock.sleep_s(0.01)
    assert 10 <= len(calls) <= 16
    there = True
    for _ in range(120):
        monitor.step()
        clock.sleep_s(0.01)
    before = len(calls)
    for _ in range(50):
        monitor.step()
        clock.sleep_s(0.01)
    assert len(calls) - before >= 49


def test_instants_at_which_no_sensor_is_due_are_left_out() -> None:
    clock = VirtualClock()
    slow = Fake(lambda _: {"cpu.frequency_hz": Quantity.ok(1e9)})
    slow.period_s = 0.1
    monitor = Monitor([slow], clock=clock)
    monitor.step()
    # 50 ms is the longest that the thread sleeps: somebody may want to stop it.
    assert monitor._next_due_s(0.0, 0.001) == pytest.approx(0.05)
    monitor._watched[0].due_s = 0.03
    assert monitor._next_due_s(0.0, 0.001) == pytest.approx(0.03)
