from __future__ import annotations

import itertools

from edgewise.clock import Clock, MonotonicClock, VirtualClock


def test_the_machines_clock_never_steps_back() -> None:
    clock = MonotonicClock()
    readings = [clock.now_s() for _ in range(1000)]

    assert all(a <= b for a, b in itertools.pairwise(readings))


def test_sleeping_takes_at_least_as_long_as_asked() -> None:
    clock = MonotonicClock()
    start_s = clock.now_s()
    clock.sleep_s(0.002)

    assert clock.now_s() - start_s >= 0.002


def test_a_virtual_clock_moves_only_when_told_to() -> None:
    clock = VirtualClock(start_s=5.0)

    assert [clock.now_s() for _ in range(3)] == [5.0, 5.0, 5.0]
    clock.sleep_s(0.5)
    assert clock.now_s() == 5.5


def test_no_clock_goes_back_when_asked_to_sleep_a_negative_time() -> None:
    clocks: list[Clock] = [MonotonicClock(), VirtualClock()]
    for clock in clocks:
        before_s = clock.now_s()
        clock.sleep_s(-10.0)

        assert clock.now_s() >= before_s
