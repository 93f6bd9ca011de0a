from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgewise.errors import ConfigError
from edgewise.runtime.generation.pace import Pace


def test_strict_gives_each_token_its_own_budget() -> None:
    pace = Pace(1.0, window="strict")
    pace.begin(0.0)

    assert pace.add(0.25)
    assert pace.due_s == 1.25


def test_time_saved_within_the_window_may_be_used_and_is_lost_after_it() -> None:
    pace = Pace(1.0, window=2)
    pace.begin(0.0)
    pace.add(0.25)
    assert pace.due_s == 2.0

    pace.add(0.5)
    assert pace.due_s == 2.25


def test_a_late_token_leaves_no_debt() -> None:
    pace = Pace(1.0, window=8)
    pace.begin(0.0)

    assert not pace.add(5.0)
    assert pace.due_s == 6.0


def test_a_pause_moves_everything() -> None:
    pace = Pace(1.0, window=3)
    pace.begin(0.0)
    pace.add(0.5)
    pace.pause(10.0)

    assert (pace.last_s, pace.due_s) == (10.5, 12.0)


def test_without_a_budget_nothing_is_ever_due() -> None:
    pace = Pace()
    pace.begin(0.0)

    assert math.isinf(pace.due_s)
    assert pace.add(1e9)


@pytest.mark.parametrize("window", [0, -1, True, 1.5, "loose"])
def test_a_window_that_is_none_is_refused(window: Any) -> None:
    with pytest.raises(ConfigError, match="window"):
        Pace(1.0, window=window)


@given(
    spent=st.lists(st.floats(0.1, 3.0), min_size=1, max_size=40),
    window=st.integers(1, 6),
)
def test_any_window_of_tokens_in_time_takes_its_budgets_at_most(
    spent: list[float], window: int
) -> None:
    pace, at_s = Pace(1.0, window=window), 0.0
    pace.begin(at_s)
    run = [at_s]
    for each in spent:
        at_s += each
        run = [*run, at_s] if pace.add(at_s) else [at_s]
        for i in range(len(run)):
            # Brute force over the tokens since the last late one.
            j = min(i + window, len(run) - 1)
            assert run[j] - run[i] <= window * 1.0 + 1e-9
