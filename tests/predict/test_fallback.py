from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgewise.errors import ConfigError
from edgewise.predict.fallback import Trend, WorstCases

NAN = math.nan
# The paper's down-up trace on Orin Nano: 22 levels down and up again, one every 10 ms.
LEVELS = np.linspace(1.0, 1 / 15, 22)
ROUND = [*LEVELS, *LEVELS[-2:0:-1]]


def fed(readings: Sequence[tuple[float, Sequence[float], float]]) -> Trend:
    trend = Trend()
    for at_s, features, full_depth_s in readings:
        trend.add(at_s, np.array(features), full_depth_s)
    return trend


def steps(values: Sequence[float], period_s: float) -> Trend:
    """One feature that takes these values, read every 10 ms; cost is its inverse."""
    times_s = np.arange(0.0, len(values) * period_s, 0.01)
    held = [values[min(len(values) - 1, int(t / period_s + 1e-9))] for t in times_s]
    return fed([(t, [v], 1 / v) for t, v in zip(times_s.tolist(), held, strict=True)])


def test_the_papers_down_up_trace_is_volatile_at_every_step_after_the_first_few() -> None:
    trend = Trend()
    for n in range(3 * len(ROUND)):
        ratio = float(ROUND[n % len(ROUND)])
        trend.add(n * 0.01, np.array([ratio] * 3), 0.01 / ratio)

        assert trend.volatile or n < 6
    assert trend.tau_f_s == pytest.approx(0.01)


def test_the_regime_follows_the_trace_and_notices_a_turn_within_two_readings() -> None:
    trend = Trend()
    for n in range(3 * len(ROUND)):
        ratio = float(ROUND[n % len(ROUND)])
        trend.add(n * 0.01, np.array([ratio]), 0.01 / ratio)
        since_turn = n % (len(LEVELS) - 1)

        if n > 3 and since_turn in range(2, len(LEVELS) - 1):
            going_down = (n - 1) % len(ROUND) < len(LEVELS) - 1
            assert trend.regime == ("slower" if going_down else "faster")


@pytest.mark.parametrize(
    ("values", "period_s"),
    [
        pytest.param([0.5] * 30, 0.01, id="nothing changes"),
        pytest.param([1.0] * 20 + [0.25] * 4, 0.01, id="one step, however large"),
        pytest.param([1.0, 0.5] * 10, 0.06, id="large but seldom"),
        pytest.param([0.50, 0.53] * 20, 0.01, id="frequent but small"),
        pytest.param([0.500, 0.504] * 20, 0.01, id="the rounding of a clock"),
    ],
)
def test_what_is_not_large_and_frequent_is_not_volatile(
    values: Sequence[float], period_s: float
) -> None:
    assert not steps(values, period_s).volatile


def test_what_is_large_and_frequent_is_volatile_and_calms_within_the_window() -> None:
    wild = [1.0, 0.5] * 20

    assert steps(wild, 0.02).volatile
    assert steps(wild, 0.02).tau_f_s == pytest.approx(0.02)
    assert not steps([*wild, *[0.5] * 6], 0.02).volatile


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 10), st.integers(0, 10)), min_size=1),
    st.integers(2, 8),
)
def test_sigma_is_the_largest_range_within_the_window_tried_one_by_one(
    readings: list[tuple[int, int, int]], most: int
) -> None:
    trend = Trend(max_readings=most)
    seen: list[tuple[int, int, int]] = []
    now_ms = 0
    for gap_ms, first, second in readings:
        now_ms += gap_ms
        seen.append((now_ms, first, second))
        trend.add(now_ms / 1e3, np.array([first / 10, second / 10]), 1.0)
        held = [s for s in seen[-most:] if now_ms - s[0] <= 100]
        spans = [max(s[i] for s in held) - min(s[i] for s in held) for i in (1, 2)]

        assert trend.sigma_f == pytest.approx(max(spans) / 10)


def test_a_feature_that_is_unknown_is_no_change_and_hides_no_other() -> None:
    came_and_went = fed([(n / 100, [NAN if n % 2 else 0.5, 0.5], 1.0) for n in range(20)])
    hidden = fed([(n / 100, [NAN, 1.0 if n % 2 else 0.5], 1.0) for n in range(20)])

    assert came_and_went.sigma_f == 0.0
    assert came_and_went.tau_f_s == math.inf
    assert hidden.volatile


def test_a_predictor_that_reads_nothing_has_a_steady_device() -> None:
    trend = fed([(n / 100, [], 1.0) for n in range(20)])

    assert not trend.volatile
    assert trend.regime == "steady"


def test_a_clock_that_is_set_back_starts_a_new_sequence() -> None:
    trend = fed([(5 + n / 100, [1.0 if n % 2 else 0.5], 1.0 + n) for n in range(20)])
    assert trend.volatile
    assert trend.regime == "slower"

    trend.add(1.0, np.array([0.5]), 9.0)
    assert not trend.volatile
    assert trend.regime == "steady"


def test_a_state_that_is_told_twice_counts_once() -> None:
    once = steps([1.0, 0.5] * 20, 0.02)
    twice = steps([1.0, 0.5] * 20, 0.02)
    twice.add(0.79, np.array([0.0]), 1.0)

    assert (twice.sigma_f, twice.tau_f_s) == (once.sigma_f, once.tau_f_s)


def test_another_number_of_features_starts_a_new_sequence() -> None:
    trend = steps([1.0, 0.5] * 20, 0.02)
    trend.add(0.9, np.array([1.0, 0.5]), 1.0)

    assert not trend.volatile


@pytest.mark.parametrize("cost_s", [0.0, NAN, math.inf])
def test_a_prediction_that_is_no_time_makes_no_regime(cost_s: float) -> None:
    assert fed([(0.0, [1.0], 1.0), (0.01, [1.0], cost_s)]).regime == "steady"


@pytest.mark.parametrize(
    "options",
    [
        {"window_s": 0.0},
        {"regime_window_s": 0.2},
        {"sigma_threshold": -1.0},
        {"tau_threshold_s": 0.0},
        {"level_ratio": NAN},
        {"regime_ratio": 0.0},
        {"max_readings": 1},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_window_or_threshold_out_of_range_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        Trend(**options)  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9), st.integers(0, 40)), min_size=1))
def test_a_worst_case_is_kept_for_one_period_and_forgotten_after_two(
    units: list[tuple[int, int, int]],
) -> None:
    worst = WorstCases(period_s=10.0)
    now = 0
    ran: list[tuple[int, int, int]] = []
    for gap, predicted, observed in units:
        now += gap
        worst.add("segment:0-1", predicted, observed, at_s=now)
        ran.append((now, predicted, observed))
        ratios = [(at, o / p) for at, p, o in ran]
        least = max(r for at, r in ratios if now - at < 10)
        most = max(r for at, r in ratios if now - at < 20)
        least_s = max(o for at, _, o in ran if now - at < 10)
        most_s = max(o for at, _, o in ran if now - at < 20)

        assert max(0.0, least - 1) <= worst.gap_ratio("segment:0-1") <= max(0.0, most - 1)
        assert max(0, least_s - 7) <= worst.gap_s("segment:0-1", 7.0) <= max(0, most_s - 7)


def test_the_two_readings_of_the_gap_differ_where_the_prediction_has_changed() -> None:
    worst = WorstCases()
    worst.add("head:0", 0.010, 0.012, at_s=0.0)  # at low clocks
    worst.add("head:0", 0.002, 0.002, at_s=0.1)  # at high ones

    assert worst.gap_ratio("head:0") == pytest.approx(0.2)
    assert worst.gap_s("head:0", 0.002) == pytest.approx(0.010)


def test_a_unit_that_has_not_run_has_no_gap() -> None:
    worst = WorstCases()
    worst.add("head:0", 0.0, 1.0, at_s=0.0)
    worst.add("head:1", 1.0, NAN, at_s=0.0)

    assert worst.gap_ratio("head:0") == 0.0
    assert worst.gap_s("head:1", 1.0) == 0.0


def test_a_clock_that_is_set_back_forgets_worst_cases() -> None:
    worst = WorstCases()
    worst.add("head:0", 1.0, 3.0, at_s=100.0)
    worst.advance(1.0)

    assert worst.gap_ratio("head:0") == 0.0


def test_a_period_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="period above zero"):
        WorstCases(period_s=0.0)
