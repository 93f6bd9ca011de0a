from __future__ import annotations

import pytest

from edgewise.device.simulated import SimulatedClock
from edgewise.errors import ConfigError


def test_a_long_sleep_calls_every_tick_at_its_own_instant() -> None:
    clock = SimulatedClock(start_s=5.0)
    seen: list[tuple[float, float]] = []
    clock.every(0.01, lambda due_s: seen.append((due_s, clock.now_s())))
    clock.sleep_s(1.0)
    assert seen == [(5.0 + n * 0.01, 5.0 + n * 0.01) for n in range(1, len(seen) + 1)]
    assert len(seen) == 100
    assert clock.now_s() == 6.0


def test_ticks_do_not_drift_however_many_there_are() -> None:
    clock, last, count = SimulatedClock(), 0.0, 0

    def tick(due_s: float) -> None:
        nonlocal last, count
        last, count = due_s, count + 1

    clock.every(0.1, tick)
    clock.sleep_until_s(20_000.0)
    assert (count, last) == (200_000, 200_000 * 0.1)
    assert sum([0.1] * 200_000) != last  # what adding up would have given


def test_callbacks_are_called_in_order_of_time_then_of_arrival() -> None:
    clock = SimulatedClock()
    seen: list[str] = []
    clock.every(2.0, lambda _: seen.append("slow"))
    clock.every(1.0, lambda _: seen.append("first"))
    clock.every(1.0, lambda _: seen.append("second"))
    clock.sleep_s(2.0)
    assert seen == ["first", "second", "slow", "first", "second"]


def test_a_sleep_that_ends_just_before_a_tick_does_not_call_it() -> None:
    clock = SimulatedClock()
    seen: list[float] = []
    clock.every(1.0, seen.append)
    clock.sleep_s(0.999)
    assert seen == []
    clock.sleep_s(0.001)
    assert seen == [1.0]


def test_a_callback_that_sleeps_is_refused_and_the_clock_goes_on_working() -> None:
    clock = SimulatedClock()
    stop = clock.every(1.0, lambda _: clock.sleep_s(0.1))
    with pytest.raises(ConfigError, match="may not sleep"):
        clock.sleep_s(3.0)
    assert clock.now_s() == 1.0
    stop()
    clock.sleep_s(3.0)
    assert clock.now_s() == 4.0


def test_a_stopped_callback_is_not_called_again() -> None:
    clock = SimulatedClock()
    seen: list[float] = []

    def twice(due_s: float) -> None:
        seen.append(due_s)
        if due_s == 2.0:
            stop()

    stop = clock.every(1.0, twice)
    clock.sleep_s(10.0)
    assert seen == [1.0, 2.0]


def test_a_callback_may_register_another() -> None:
    clock = SimulatedClock()
    seen: list[float] = []
    stop = clock.every(1.0, lambda _: (stop(), clock.every(0.25, seen.append)))
    clock.sleep_s(1.8)
    assert seen == [1.25, 1.5, 1.75]


def test_time_does_not_go_back() -> None:
    clock = SimulatedClock(start_s=3.0)
    clock.sleep_s(-1.0)
    clock.sleep_until_s(1.0)
    assert clock.now_s() == 3.0


@pytest.mark.parametrize("period_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_period_must_be_a_time_above_zero(period_s: float) -> None:
    with pytest.raises(ConfigError, match="above zero"):
        SimulatedClock().every(period_s, print)
