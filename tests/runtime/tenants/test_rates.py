"""Rates from arrivals that are known exactly."""

from __future__ import annotations

import numpy as np
import pytest

from edgewise.errors import ConfigError
from edgewise.runtime.tenants.rates import RateEstimator


def poisson(rate: float, until_s: float, *, start_s: float = 0.0, seed: int = 0) -> list[float]:
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1 / rate, int(2 * rate * (until_s - start_s)) + 50)
    times = start_s + np.cumsum(gaps)
    return [float(t) for t in times[times < until_s]]


def test_a_steady_rate_is_the_count_over_the_window() -> None:
    estimator = RateEstimator(window_s=10)
    for k in range(101):
        estimator.add(k * 0.1)

    assert estimator.rate_per_s(10.0) == pytest.approx(10.0)
    assert not estimator.changed
    assert estimator.arrival_cv2() == pytest.approx(0.0, abs=1e-9)


def test_nothing_is_known_before_two_arrivals_and_zero_after_silence() -> None:
    estimator = RateEstimator(window_s=10)
    assert estimator.rate_per_s(0.0) is None
    estimator.add(1.0)
    assert estimator.rate_per_s(1.0) is None
    assert estimator.rate_per_s(20.0) == 0.0


@pytest.mark.parametrize(("before", "after"), [(5.0, 20.0), (20.0, 5.0)], ids=["rise", "fall"])
def test_a_change_is_noticed_and_the_old_rate_forgotten(before: float, after: float) -> None:
    late = []
    for seed in range(10):
        estimator = RateEstimator()
        for t in poisson(before, 20, seed=seed):
            estimator.add(t)
        estimator.rate_per_s(20.0)
        arrivals = poisson(after, 30, start_s=20, seed=seed + 100)
        noticed = None
        for now_s in np.arange(20.25, 30, 0.25):
            while arrivals and arrivals[0] <= now_s:
                estimator.add(arrivals.pop(0))
            rate = estimator.rate_per_s(float(now_s))
            if noticed is None and estimator.changed:
                noticed = now_s - 20
        late.append(noticed or 99)
        assert rate == pytest.approx(after, rel=0.4)
        assert estimator.changed_s == pytest.approx(20, abs=3)

    assert np.median(late) < 4  # a window of 30 s would need most of it


def test_silence_is_a_change_before_the_window_has_passed() -> None:
    estimator = RateEstimator()
    for t in poisson(10, 20):
        estimator.add(t)
    assert estimator.rate_per_s(20.0) == pytest.approx(10, rel=0.4)
    estimator.acknowledge()
    rate = estimator.rate_per_s(23.0)

    assert estimator.changed
    assert rate is not None
    assert rate < 1


def test_a_constant_poisson_rate_rarely_looks_like_a_change() -> None:
    false = 0
    for seed in range(20):
        estimator = RateEstimator()
        arrivals = poisson(10, 60, seed=seed)
        for now_s in range(1, 61, 2):
            while arrivals and arrivals[0] <= now_s:
                estimator.add(arrivals.pop(0))
            estimator.rate_per_s(now_s)
        false += estimator.changes

    assert false <= 1


def test_bursts_are_not_taken_for_changes() -> None:
    estimator = RateEstimator()
    for start_s in np.cumsum(np.random.default_rng(3).exponential(1.0, 60)):
        for k in range(5):
            estimator.add(float(start_s) + 0.001 * k)
    estimator.rate_per_s(float(start_s))

    assert estimator.changes == 0
    assert (estimator.arrival_cv2() or 0) > 3


def test_an_instant_that_falls_counts_as_the_last_one() -> None:
    estimator = RateEstimator()
    for t in (1.0, 0.5, 2.0):
        estimator.add(t)
    assert estimator.rate_per_s(2.0) == pytest.approx(2.0)


def test_a_window_of_nothing_is_refused() -> None:
    for options in ({"window_s": 0.0}, {"limit": 0.0}):
        with pytest.raises(ConfigError, match="above zero"):
            RateEstimator(**options)
