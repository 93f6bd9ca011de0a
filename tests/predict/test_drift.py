from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgewise.errors import ConfigError
from edgewise.predict.drift import DriftAlarm, DriftTest

PERIOD_S = 1 / 60  # a request each frame


def alarms(test: DriftTest, ratios: Iterable[float]) -> list[tuple[int, DriftAlarm]]:
    """All alarms, the test being reset after each."""
    found = []
    for n, ratio in enumerate(ratios):
        alarm = test.add(n * PERIOD_S, 0.01, 0.01 * ratio)
        if alarm is not None:
            found.append((n, alarm))
            test.reset()
    return found


def noise(count: int, *, spread: float = 0.05, seed: int = 0) -> npt.NDArray[np.float64]:
    return np.random.default_rng(seed).lognormal(0.0, spread, count)


@pytest.mark.parametrize("spread", [0.05, 0.3, 0.6])
def test_false_alarms_are_no_more_frequent_than_promised(spread: float) -> None:
    test = DriftTest(spread=spread, mean_between=1000, least_count=1, hold_s=0.0)
    found = alarms(test, noise(100_000, spread=spread))

    # At most 100 are expected; 130 is three of their standard deviations more.
    assert len(found) <= 130


def test_a_test_that_hardly_waits_does_raise_false_alarms() -> None:
    test = DriftTest(spread=0.6, mean_between=5, least_count=1, hold_s=0.0)

    assert len(alarms(test, noise(20_000, spread=0.6))) > 100


def test_an_hour_of_heavy_tails_raises_none() -> None:
    tails = np.exp(0.05 * np.random.default_rng(1).standard_t(2, 3600 * 60 // 4))

    assert not alarms(DriftTest.calibrated(tails[:500].tolist()), tails)


@pytest.mark.parametrize("factor", [2.0, 0.5], ids=["slower", "faster"])
def test_a_device_that_stays_twice_as_slow_or_fast_is_noticed_soon_after_the_time_to_hold(
    factor: float,
) -> None:
    ratios = noise(3000)
    ratios[1200:] *= factor
    n, alarm = alarms(DriftTest(spread=0.05), ratios)[0]

    assert 5.0 <= n * PERIOD_S - 20.0 <= 5.5
    assert alarm.at_s == n * PERIOD_S
    assert alarm.since_s == pytest.approx(20.0, abs=0.1)
    assert alarm.ratio == pytest.approx(factor, rel=0.02)
    assert "profile is stale" in alarm.reason
    assert "edgewise profile" in alarm.help
    assert "edgewise fit" in alarm.help


def test_without_time_to_hold_it_takes_the_fewest_observations() -> None:
    ratios = noise(1000)
    ratios[500:] *= 2.0

    assert alarms(DriftTest(spread=0.05, hold_s=0.0), ratios)[0][0] == 519


@pytest.mark.parametrize("factor", [4.0, 100.0])
def test_a_burst_is_no_drift(factor: float) -> None:
    ratios = noise(3000)
    ratios[600:840] *= factor  # four seconds
    ratios[1500:1740] *= factor

    assert not alarms(DriftTest(spread=0.05), ratios)


def test_a_shift_below_the_one_to_be_noticed_is_left_alone() -> None:
    assert not alarms(DriftTest(spread=0.05, least_shift_ratio=1.25), noise(20_000) * 1.08)


@given(
    st.lists(st.sampled_from([0.5, 0.9, 1.0, 1.1, 1.3, 2.0]), max_size=60),
    st.sampled_from([1, 3]),
)
def test_it_raises_when_the_largest_sum_of_any_recent_stretch_reaches_the_limit(
    ratios: list[float], least_count: int
) -> None:
    spread, mean_between = 0.15, 50.0
    shift, limit = math.log(1.25), math.log(2 * mean_between)
    first = None
    for sign in (1, -1):
        increments = [shift / spread**2 * (sign * math.log(r) - shift / 2) for r in ratios]
        most = limit / least_count
        increments = [max(-most, min(most, i)) for i in increments]
        for n in range(len(ratios)):
            if max(sum(increments[k : n + 1]) for k in range(n + 1)) >= limit - 1e-12:
                first = n if first is None else min(n, first)
                break
    test = DriftTest(spread=spread, mean_between=mean_between, least_count=least_count, hold_s=0.0)
    found = alarms(test, ratios)
    ours = found[0][0] if found else None

    # Page's recursion is the maximum over all starts.
    assert ours == first


def test_an_alarm_comes_once_and_again_after_a_reset() -> None:
    test = DriftTest(spread=0.05)
    given_s = [test.add(n * PERIOD_S, 1.0, 2.0) for n in range(1200)]
    assert sum(alarm is not None for alarm in given_s) == 1
    assert test.alarm is not None

    test.reset()
    assert test.alarm is None
    assert alarms(test, [2.0] * 600)


def test_calibration_takes_centre_and_spread_and_is_not_widened_by_outliers() -> None:
    ratios = [*(1.2 * noise(2000, spread=0.08)).tolist(), *[50.0] * 40, math.nan, 0.0]
    test = DriftTest.calibrated(ratios)

    assert math.exp(test.centre) == pytest.approx(1.2, rel=0.01)
    assert test.spread == pytest.approx(0.08, rel=0.06)
    assert not alarms(test, 1.2 * noise(5000, spread=0.08, seed=2))


def test_residuals_all_alike_leave_some_spread() -> None:
    assert DriftTest.calibrated([1.0] * 10).spread > 0


@pytest.mark.parametrize(("predicted_s", "observed_s"), [(0.0, 1.0), (1.0, 0.0), (1.0, math.nan)])
def test_what_has_no_ratio_is_left_out(predicted_s: float, observed_s: float) -> None:
    test = DriftTest(spread=0.05, hold_s=0.0, least_count=1)

    assert all(test.add(float(n), predicted_s, observed_s) is None for n in range(50))


@pytest.mark.parametrize(
    "options",
    [
        {"spread": 0.0},
        {"centre": math.nan},
        {"least_shift_ratio": 1.0},
        {"mean_between": 0.5},
        {"least_count": 0},
        {"hold_s": -1.0},
    ],
    ids=lambda o: next(iter(o)),
)
def test_values_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        DriftTest(**{"spread": 0.1, **options})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="two ratios"):
        DriftTest.calibrated([1.0])
