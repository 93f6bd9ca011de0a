from __future__ import annotations

import math

import pytest

from edgewise.backends.accelerator import AcceleratorLost
from edgewise.backends.supervision import RestartBudget, watchdog_s
from edgewise.clock import VirtualClock
from edgewise.errors import ConfigError


def test_a_budget_gives_so_many_restarts_within_so_long_and_says_when_the_next_is() -> None:
    clock = VirtualClock()
    budget = RestartBudget(clock=clock, restarts=2, within_s=60.0)
    budget.take("the device")
    clock.sleep_s(10.0)
    budget.take("the device")
    clock.sleep_s(15.0)

    with pytest.raises(AcceleratorLost, match=r"2 times within 60 s .* in 35 s"):
        budget.take("the device")
    assert budget.wait_s == 35.0
    clock.sleep_s(35.0)
    assert budget.wait_s == 0.0
    budget.take("the device")
    assert budget.wait_s == 10.0


def test_no_restarts_at_all_is_a_budget_as_well() -> None:
    budget = RestartBudget(clock=VirtualClock(), restarts=0)

    assert budget.wait_s == math.inf
    with pytest.raises(AcceleratorLost, match="switched off"):
        budget.take("the device")


@pytest.mark.parametrize(("restarts", "within_s"), [(-1, 60.0), (5, 0.0), (5, math.nan)])
def test_a_budget_that_cannot_be_is_refused(restarts: int, within_s: float) -> None:
    with pytest.raises(ConfigError, match="budget of restarts"):
        RestartBudget(clock=VirtualClock(), restarts=restarts, within_s=within_s)


def test_the_watchdog_waits_for_a_multiple_of_the_expected_time_but_at_least_a_second() -> None:
    assert watchdog_s(0.01) == 1.0
    assert watchdog_s(0.2) == pytest.approx(4.0)
    assert watchdog_s(0.2, factor=2.0, least_s=0.1) == pytest.approx(0.4)
