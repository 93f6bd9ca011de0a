from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgewise.errors import DataError
from edgewise.profiles import statistics

finite = st.floats(0.0, 1e3, allow_nan=False)
samples_of = st.lists(finite, min_size=1, max_size=60)
levels = st.floats(0.05, 0.995)
no_deadline = settings(deadline=None, max_examples=60)


def binomial_mass(count: int, q: Fraction) -> list[Fraction]:
    return [math.comb(count, i) * q**i * (1 - q) ** (count - i) for i in range(count + 1)]


@no_deadline
@given(samples_of)
def test_the_median_has_half_of_the_samples_on_each_side(samples: list[float]) -> None:
    middle = statistics.median(samples)

    assert sum(s <= middle for s in samples) * 2 >= len(samples)
    assert sum(s >= middle for s in samples) * 2 >= len(samples)


@no_deadline
@given(samples_of, st.floats(0, 1))
def test_a_quantile_agrees_with_its_definition_written_out(samples: list[float], q: float) -> None:
    ordered = sorted(samples)
    h = (len(ordered) - 1) * q
    low = min(math.floor(h), len(ordered) - 1)
    high = min(low + 1, len(ordered) - 1)
    expected = ordered[low] + (h - low) * (ordered[high] - ordered[low])

    # Two orders of the same three operations: a few units in the last place of 1e3.
    assert statistics.quantile(samples, q) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_missing_rounds_do_not_count() -> None:
    assert statistics.median([math.nan, 1.0, 3.0, math.nan]) == 2.0
    assert statistics.quantile([math.nan, 1.0, 3.0], 1.0) == 3.0


@pytest.mark.parametrize("samples", [[], [math.nan]], ids=["empty", "only missing rounds"])
def test_no_sample_is_an_error_and_not_zero(samples: list[float]) -> None:
    with pytest.raises(DataError, match="at least one sample"):
        statistics.median(samples)


@pytest.mark.parametrize("q", [-0.1, 1.1, math.nan])
def test_a_quantile_outside_zero_to_one_is_refused(q: float) -> None:
    with pytest.raises(ValueError, match="quantile"):
        statistics.quantile([1.0], q)


@pytest.mark.parametrize("q", [Fraction(1, 2), Fraction(19, 20), Fraction(1, 10)], ids=str)
@pytest.mark.parametrize("count", [1, 5, 6, 20, 59, 120])
def test_a_quantile_interval_uses_the_tightest_ranks_that_exact_arithmetic_allows(
    count: int, q: Fraction
) -> None:
    level = Fraction(19, 20)
    tail = (1 - level) / 2
    mass = binomial_mass(count, q)
    low = max((r for r in range(1, count + 1) if sum(mass[:r]) <= tail), default=None)
    high = min((r for r in range(1, count + 1) if sum(mass[r:]) <= tail), default=None)

    interval = statistics.quantile_interval(np.arange(1.0, count + 1), float(q), level=float(level))

    assert interval.low == (-math.inf if low is None else low)
    assert interval.high == (math.inf if high is None else high)
    if low is not None and high is not None:
        assert sum(mass[low:high]) >= level


def test_a_quantile_interval_agrees_with_scipy_for_many_samples() -> None:
    stats = pytest.importorskip("scipy.stats", reason="scipy is the oracle")
    count, q, level = 3001, 0.9, 0.95
    samples = np.random.default_rng(3).exponential(size=count)
    low_rank = int(stats.binom.ppf((1 - level) / 2, count, q))  # first i with cdf >= tail
    high_rank = int(stats.binom.isf((1 - level) / 2, count, q)) + 1

    interval = statistics.quantile_interval(samples, q, level=level)

    assert interval.low == np.sort(samples)[low_rank - 1]
    assert interval.high == np.sort(samples)[high_rank - 1]
    assert interval.low < -math.log(0.1) < interval.high  # the true quantile, for this seed


def test_too_few_samples_leave_the_interval_open() -> None:
    interval = statistics.quantile_interval([0.1] * 5, 0.5)

    assert (interval.low, interval.high) == (-math.inf, math.inf)
    assert interval.half_width == math.inf


def test_the_bootstrap_agrees_with_the_closed_form_of_the_resampled_median() -> None:
    # Efron 1979: for odd n, P(median* <= x_(k)) = P(Binomial(n, k/n) >= (n + 1)/2).
    count, level = 25, 0.9
    below = [
        float(sum(binomial_mass(count, Fraction(k, count))[(count + 1) // 2 :]))
        for k in range(1, count + 1)
    ]
    low = 1 + next(i for i, p in enumerate(below) if p >= (1 - level) / 2)
    high = 1 + next(i for i, p in enumerate(below) if p >= (1 + level) / 2)

    interval = statistics.median_bootstrap_interval(
        np.arange(1.0, count + 1), rng=np.random.default_rng(0), level=level, resamples=20_000
    )

    # The exact tail jumps from rank to rank by more than 1 %, six times the noise of 20 000 draws.
    assert (interval.low, interval.high) == (low, high)


def test_the_same_generator_gives_the_same_bootstrap_interval() -> None:
    samples = np.random.default_rng(1).lognormal(size=40)

    first, second = (
        statistics.median_bootstrap_interval(samples, rng=np.random.default_rng(7), resamples=300)
        for _ in range(2)
    )

    assert first == second
    assert first.low <= statistics.median(samples) <= first.high


@no_deadline
@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=25),
    st.lists(st.integers(0, 12), min_size=1, max_size=25),
)
def test_the_rank_sum_test_agrees_with_scipy(first: list[int], second: list[int]) -> None:
    stats = pytest.importorskip("scipy.stats", reason="scipy is the oracle")
    if len(set(first + second)) == 1:
        assert statistics.rank_sum_p_value(first, second) == 1.0
        return
    expected = stats.mannwhitneyu(first, second, method="asymptotic", use_continuity=True).pvalue

    assert statistics.rank_sum_p_value(first, second) == pytest.approx(expected, rel=1e-9)


def test_the_rank_sum_test_is_near_the_exact_distribution_of_all_orders() -> None:
    first, second = [1.0, 2.0, 3.0, 5.0, 6.0, 9.0], [4.0, 7.0, 8.0, 10.0, 11.0, 12.0]
    pooled = first + second
    sums = [sum(chosen) for chosen in itertools.combinations(pooled, 6)]
    centre = sum(sums) / len(sums)
    exact = sum(abs(s - centre) >= abs(sum(first) - centre) for s in sums) / len(sums)

    # Normal approximation at six a side.
    assert statistics.rank_sum_p_value(first, second) == pytest.approx(exact, abs=0.01)


def test_calm_samples_are_steady() -> None:
    samples_s = 0.01 * np.random.default_rng(0).normal(1, 0.01, size=60)

    verdict = statistics.steady(samples_s)

    assert verdict.steady
    assert verdict.count == 60
    assert verdict.half_width_ratio < 0.01


def test_a_few_wild_samples_do_not_make_calm_ones_unsteady() -> None:
    samples_s = 0.01 * np.random.default_rng(0).normal(1, 0.005, size=60)
    samples_s[[7, 31, 44]] = 1.0

    assert statistics.steady(samples_s).steady


def test_wide_samples_are_not_steady_and_the_reason_has_the_width() -> None:
    samples_s = 0.01 * np.random.default_rng(0).lognormal(0, 1, size=60)

    verdict = statistics.steady(samples_s)

    assert not verdict.steady
    assert "the median is known to ±" in verdict.reason


def test_a_drift_is_not_steady_although_the_median_is_well_known() -> None:
    rng = np.random.default_rng(0)
    samples_s = 0.01 * np.concatenate([rng.normal(1, 0.01, 400), rng.normal(1.03, 0.01, 400)])

    verdict = statistics.steady(samples_s)

    assert not verdict.steady
    assert verdict.half_width_ratio < 0.02
    assert "the second half is +3" in verdict.reason


def test_a_shift_too_small_to_matter_is_steady() -> None:
    samples_s = [0.010 + 1e-9 * i for i in range(100)]

    verdict = statistics.steady(samples_s)

    assert verdict.steady
    assert verdict.drift_p_value is not None
    assert verdict.drift_p_value < 1e-9


def test_a_clock_that_stands_still_is_steady() -> None:
    assert statistics.steady([0.0] * 30).steady


def test_nothing_is_not_steady() -> None:
    verdict = statistics.steady([])

    assert not verdict.steady
    assert verdict.median_s is None


@no_deadline
@given(st.lists(st.floats(1e-6, 1e2), max_size=80), st.floats(1e-3, 1e3))
def test_steadiness_does_not_depend_on_the_unit_of_time(samples: list[float], power: float) -> None:
    scale = 2.0 ** round(math.log2(power))  # exact in binary, so no rounding moves a threshold

    assert (
        statistics.steady(samples).steady == statistics.steady([s * scale for s in samples]).steady
    )


@pytest.mark.parametrize("ratio", [0.0, -1.0, math.nan])
def test_a_steadiness_ratio_without_sense_is_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match="half_width_ratio"):
        statistics.steady([1.0], half_width_ratio=ratio)


@pytest.mark.parametrize("level", [0.5, 0.75, 0.8])
@pytest.mark.parametrize("count", [3, 4, 6])
def test_the_conformal_margin_covers_in_every_order_of_exchangeable_residuals(
    count: int, level: float
) -> None:
    orders = list(itertools.permutations(range(count + 1)))
    covered = sum(order[-1] <= statistics.conformal_quantile(order[:-1], level) for order in orders)

    assert level <= covered / len(orders) <= level + 1 / (count + 1)


@no_deadline
@given(samples_of, levels, levels)
def test_a_higher_level_never_gives_a_smaller_margin(
    residuals: list[float], one: float, other: float
) -> None:
    low, high = sorted([one, other])

    assert statistics.conformal_quantile(residuals, low) <= statistics.conformal_quantile(
        residuals, high
    )


@no_deadline
@given(samples_of, st.integers(1, 99))
def test_the_conformal_margin_is_the_order_statistic_of_exact_arithmetic(
    residuals: list[float], percent: int
) -> None:
    rank = math.ceil((len(residuals) + 1) * Fraction(percent, 100))
    expected = sorted(residuals)[rank - 1] if rank <= len(residuals) else math.inf

    assert statistics.conformal_quantile(residuals, percent / 100) == expected


@pytest.mark.parametrize(("count", "bounded"), [(0, False), (18, False), (19, True)])
def test_too_few_residuals_give_no_bound(count: int, bounded: bool) -> None:  # noqa: FBT001
    assert math.isfinite(statistics.conformal_quantile([0.1] * count, 0.95)) is bounded


def test_a_missing_residual_is_refused() -> None:
    with pytest.raises(DataError, match="1 of 2 residuals are NaN"):
        statistics.conformal_quantile([0.1, math.nan], 0.5)


@pytest.mark.parametrize("level", [0.0, 1.0, -1.0, math.nan])
def test_a_level_outside_zero_to_one_is_refused(level: float) -> None:
    with pytest.raises(ValueError, match="level"):
        statistics.conformal_quantile([0.1], level)
    with pytest.raises(ValueError, match="level"):
        statistics.quantile_interval([0.1], 0.5, level=level)
    with pytest.raises(ValueError, match="level"):
        statistics.median_bootstrap_interval([0.1], rng=np.random.default_rng(0), level=level)


def test_a_bootstrap_without_draws_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one draw"):
        statistics.median_bootstrap_interval([0.1], rng=np.random.default_rng(0), resamples=0)
