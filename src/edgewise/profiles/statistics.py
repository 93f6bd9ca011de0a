"""What may be concluded from latency samples: quantiles, intervals, steadiness, margins.

Every function ignores NaN, which stands for "this round has no sample", except
:func:`conformal_quantile`, where a missing residual would silently weaken the guarantee.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edgewise.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

_RESAMPLES_PER_BLOCK = 256  # bounds the memory of the bootstrap to 256 copies of the samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A confidence interval.

    Attributes:
        low: Lower end, in the unit of the samples; ``-math.inf`` where there are too few samples.
        high: Upper end; ``math.inf`` where there are too few samples.
        level: The coverage that was asked for, in (0, 1).
    """

    low: float
    high: float
    level: float

    @property
    def half_width(self) -> float:
        """Half the distance between the ends; ``math.inf`` for an unbounded interval."""
        return (self.high - self.low) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Steadiness:
    """Whether samples have settled, and the numbers it was concluded from.

    Attributes:
        steady: The interval is narrow and there is no drift.
        reason: One sentence for a person, with the number that decided.
        count: Samples looked at.
        median_s: Their median, seconds; ``None`` without samples.
        interval: Of that median; unbounded with too few samples.
        half_width_ratio: Half the interval over the median; ``math.inf`` where unbounded.
        shift_ratio: Median of the second half over that of the first, less one; ``None``
            with too few samples.
        drift_p_value: Of the rank-sum test between the halves; ``None`` with too few samples.
    """

    steady: bool
    reason: str
    count: int
    median_s: float | None
    interval: Interval
    half_width_ratio: float
    shift_ratio: float | None
    drift_p_value: float | None


def median(samples: Sequence[float] | npt.NDArray[np.float64]) -> float:
    """Middle sample, or the mean of the two middle ones.

    Args:
        samples: [N], NaN where there is none.

    Raises:
        DataError: There is no sample.

    Example:
        >>> median([3.0, 1.0, 10.0])
        3.0
    """
    return float(np.median(_present(samples)))


def quantile(samples: Sequence[float] | npt.NDArray[np.float64], q: float) -> float:
    """Sample quantile, interpolated linearly between order statistics.

    With sorted samples x₁ … xₙ and h = (n − 1)·q + 1 the value is
    x⌊h⌋ + (h − ⌊h⌋)·(x⌊h⌋₊₁ − x⌊h⌋). It is the median for q = 1/2. It never leaves the range of
    the samples, so a high quantile of few samples is too low on average: use
    :func:`conformal_quantile` for a promise and :func:`quantile_interval` for the uncertainty.

    Args:
        samples: [N], NaN where there is none.
        q: In [0, 1].

    Raises:
        DataError: There is no sample.
        ValueError: ``q`` is outside [0, 1].

    Source:
        R. J. Hyndman, Y. Fan, Sample Quantiles in Statistical Packages, The American
        Statistician 50(4), 1996: definition 7.

    Example:
        >>> quantile([1.0, 2.0, 3.0, 4.0, 5.0], 0.9)
        4.6
    """
    if not 0 <= q <= 1:
        raise ValueError(f"a quantile must be in [0, 1], found {q!r}")
    return float(np.quantile(_present(samples), q, method="linear"))


def quantile_interval(
    samples: Sequence[float] | npt.NDArray[np.float64], q: float, *, level: float = 0.95
) -> Interval:
    """Confidence interval of a quantile that assumes nothing about the distribution.

    The number of samples below the true quantile is Binomial(n, q), so the order statistics
    x_l and x_u with P(B < l) ≤ (1 − level)/2 and P(B ≥ u) ≤ (1 − level)/2 enclose it with at
    least ``level``, whatever the distribution; more than that where it has atoms.
    Limit: independent samples. Correlated ones, such as latencies under one slow change of
    frequency, are covered less often than stated.

    Args:
        samples: [N], NaN where there is none.
        q: In (0, 1).
        level: Coverage, in (0, 1), half of the rest on each side.

    Returns:
        An end is infinite where no order statistic is extreme enough: for the median at 95 %
        with fewer than 6 samples.

    Raises:
        DataError: There is no sample.
        ValueError: ``q`` or ``level`` is outside (0, 1).

    Source:
        H. A. David, H. N. Nagaraja, Order Statistics (3rd ed., 2003), section 7.1.

    Example:
        >>> quantile_interval(range(1, 11), 0.5)
        Interval(low=2.0, high=9.0, level=0.95)
    """
    _check_open_unit("quantile", q)
    _check_open_unit("level", level)
    values = np.sort(_present(samples))
    count = values.size
    tail = (1 - level) / 2
    below = _binomial_cdf(count, q)  # [N+1], P(B <= i)
    low_ranks = np.flatnonzero(below <= tail)  # rank l = i + 1 has P(B < l) = below[i]
    # From the other side the tail is a small number again, and keeps its digits.
    above = _binomial_cdf(count, 1 - q)[::-1]  # [N+1], P(B >= i)
    high_ranks = np.flatnonzero(above <= tail)
    return Interval(
        low=float(values[low_ranks[-1]]) if low_ranks.size else -math.inf,
        high=float(values[high_ranks[0] - 1]) if high_ranks.size else math.inf,
        level=level,
    )


def median_bootstrap_interval(
    samples: Sequence[float] | npt.NDArray[np.float64],
    *,
    rng: np.random.Generator,
    level: float = 0.95,
    resamples: int = 2000,
) -> Interval:
    """Percentile bootstrap interval of the median.

    Draws ``resamples`` samples of the same size with replacement and takes the two quantiles of
    their medians. Limits: independent samples, at least ten or so; the ends jump between order
    statistics, and carry the noise of the draw, which a larger ``resamples`` shrinks.
    :func:`quantile_interval` needs no draw and keeps its promise for few samples.

    Args:
        samples: [N], NaN where there is none.
        rng: Source of the draw; the same state gives the same interval.
        level: Coverage, in (0, 1).
        resamples: Number of draws.

    Raises:
        DataError: There is no sample.
        ValueError: ``level`` is outside (0, 1), or there is no draw.

    Source:
        B. Efron, Bootstrap Methods: Another Look at the Jackknife, Annals of Statistics 7(1),
        1979, which also gives the distribution of the resampled median in closed form.
    """
    _check_open_unit("level", level)
    if resamples < 1:
        raise ValueError(f"the bootstrap needs at least one draw, found {resamples!r}")
    values = _present(samples)
    medians = np.empty(resamples)
    for start in range(0, resamples, _RESAMPLES_PER_BLOCK):
        stop = min(start + _RESAMPLES_PER_BLOCK, resamples)
        chosen = rng.integers(0, values.size, size=(stop - start, values.size))  # [block, N]
        medians[start:stop] = np.median(values[chosen], axis=1)
    low, high = np.quantile(medians, [(1 - level) / 2, (1 + level) / 2], method="inverted_cdf")
    return Interval(low=float(low), high=float(high), level=level)


def rank_sum_p_value(
    first: Sequence[float] | npt.NDArray[np.float64],
    second: Sequence[float] | npt.NDArray[np.float64],
) -> float:
    """Two-sided p-value of the Wilcoxon–Mann–Whitney test that two sets come from one source.

    Normal approximation with tie and continuity corrections. Only ranks count, so one latency
    of a hundred times the median moves it no more than any other large one. Limits: about eight
    samples a side for the approximation; independent samples, else the value is too small.

    Args:
        first: [N], NaN where there is none.
        second: [M], likewise.

    Returns:
        In [0, 1]; 1 where all samples are equal.

    Raises:
        DataError: A side has no sample.

    Source:
        H. B. Mann, D. R. Whitney, Annals of Mathematical Statistics 18(1), 1947; tie correction
        as in E. L. Lehmann, Nonparametrics: Statistical Methods Based on Ranks (1975), ch. 1.

    Example:
        >>> rank_sum_p_value([1.0, 2.0], [1.0, 2.0])
        1.0
    """
    left, right = _present(first), _present(second)
    pooled = np.concatenate([left, right])
    _, position, ties = np.unique(pooled, return_inverse=True, return_counts=True)
    rank_of_value = np.cumsum(ties) - (ties - 1) / 2  # mean rank of each distinct value
    n, m, total = left.size, right.size, pooled.size
    u = float(rank_of_value[position[:n]].sum()) - n * (n + 1) / 2
    tie_term = float((ties.astype(np.float64) ** 3 - ties).sum()) / (total * (total - 1))
    variance = n * m / 12 * ((total + 1) - tie_term)
    if variance <= 0:  # all equal: no order to speak of
        return 1.0
    distance = max(0.0, abs(u - n * m / 2) - 0.5)
    return math.erfc(distance / math.sqrt(2 * variance))


def steady(
    samples_s: Sequence[float] | npt.NDArray[np.float64],
    *,
    half_width_ratio: float = 0.02,
    level: float = 0.95,
    drift_p_value: float = 0.01,
    min_count: int = 20,
) -> Steadiness:
    """Say whether a unit has been sampled long enough.

    Steady means: at least ``min_count`` samples; half the order-statistic interval of the
    median is at most ``half_width_ratio`` of the median; and the second half of the samples has
    not drifted from the first. Drift needs both a rank-sum p-value below ``drift_p_value`` and
    medians further apart than ``half_width_ratio``: neighbouring latencies are correlated, so
    the test alone would call any machine unsteady, and the shift alone would call noise drift.

    Limits: asking after every round looks at the data many times, so the stated level is
    nominal; a drift within the ratio, or one that returns, is not seen.

    Args:
        samples_s: [N] seconds, in the order they were taken, NaN where there is none.
        half_width_ratio: Allowed half width, and allowed shift, relative to the median.
        level: Coverage of the interval of the median.
        drift_p_value: Below it, a shift counts as drift.
        min_count: Fewest samples that may be called steady.

    Raises:
        ValueError: A threshold makes no sense.

    Example:
        >>> steady([0.010, 0.011] * 30, half_width_ratio=0.1).steady
        True
        >>> steady([0.010] * 3).reason
        '3 samples of at least 20'
    """
    if not half_width_ratio > 0:
        raise ValueError(f"half_width_ratio must be above zero, found {half_width_ratio!r}")
    _check_open_unit("level", level)
    values = np.asarray(samples_s, dtype=np.float64)
    values = values[~np.isnan(values)]
    count = int(values.size)
    if count < max(min_count, 4):
        return Steadiness(
            steady=False,
            reason=f"{count} samples of at least {max(min_count, 4)}",
            count=count,
            median_s=float(np.median(values)) if count else None,
            interval=Interval(low=-math.inf, high=math.inf, level=level),
            half_width_ratio=math.inf,
            shift_ratio=None,
            drift_p_value=None,
        )
    centre_s = float(np.median(values))
    interval = quantile_interval(values, 0.5, level=level)
    width = _relative(interval.half_width, centre_s)
    early, late = values[: count // 2], values[count // 2 :]
    shift = _relative(float(np.median(late) - np.median(early)), float(np.median(early)))
    p_value = rank_sum_p_value(early, late)
    if width > half_width_ratio:
        reason = f"the median is known to ±{width:.2%}, wanted ±{half_width_ratio:.2%}"
    elif p_value < drift_p_value and abs(shift) > half_width_ratio:
        reason = f"the second half is {shift:+.2%} from the first (p = {p_value:.2g})"
    else:
        reason = ""
    return Steadiness(
        steady=not reason,
        reason=reason or f"the median is known to ±{width:.2%} and has not drifted",
        count=count,
        median_s=centre_s,
        interval=interval,
        half_width_ratio=width,
        shift_ratio=shift,
        drift_p_value=p_value,
    )


def conformal_quantile(residuals: Sequence[float] | npt.NDArray[np.float64], level: float) -> float:
    """Margin that the next residual stays under with at least the given probability.

    The ⌈(n + 1)·level⌉-th smallest residual. If the next residual is exchangeable with these,
    it is at or below the margin with probability at least ``level``, and at most
    ``level`` + 1/(n + 1) where ties have probability zero: for every n and distribution, on
    average over the draw of the residuals. Limit: exchangeable means that the regime has not
    changed; keep residuals by regime and forget old ones.

    Args:
        residuals: [N] observed − predicted, in the unit of the margin.
        level: In (0, 1).

    Returns:
        ``math.inf`` where n < level/(1 − level), since then no residual seen is large enough:
        19 are needed for 95 %.

    Raises:
        DataError: A residual is NaN.
        ValueError: ``level`` is outside (0, 1).

    Source:
        V. Vovk, A. Gammerman, G. Shafer, Algorithmic Learning in a Random World (2005);
        J. Lei et al., Distribution-Free Predictive Inference for Regression, JASA 113, 2018,
        theorem 2.2 (there for absolute residuals; here one-sided).

    Example:
        >>> conformal_quantile(range(1, 20), 0.95), conformal_quantile(range(1, 19), 0.95)
        (19.0, inf)
    """
    _check_open_unit("level", level)
    values = np.asarray(residuals, dtype=np.float64).ravel()
    if np.isnan(values).any():
        raise DataError(
            f"{int(np.isnan(values).sum())} of {values.size} residuals are NaN; "
            "leave out what was not observed"
        )
    # Rounded first: 100 · 0.55 is 55.00000000000001 in binary, and its ceiling one too many.
    rank = math.ceil(round((values.size + 1) * level, 9))
    if rank > values.size:
        return math.inf
    return float(np.partition(values, rank - 1)[rank - 1])


def _present(samples: Sequence[float] | npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    values = np.asarray(samples, dtype=np.float64).ravel()
    values = values[~np.isnan(values)]
    if not values.size:
        raise DataError("expected at least one sample, found none")
    return values


def _check_open_unit(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise ValueError(f"{name} must be between 0 and 1, found {value!r}")


def _relative(difference: float, base: float) -> float:
    """Return difference / base, with 0/0 = 0: a clock that stands still is perfectly steady."""
    if base == 0:
        return 0.0 if difference == 0 else math.copysign(math.inf, difference)
    return difference / base


def _binomial_cdf(count: int, q: float) -> npt.NDArray[np.float64]:
    """P(B ≤ i) for i = 0 … count and B ~ Binomial(count, q), by logarithms. [count+1]."""
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, count + 1)))])
    i = np.arange(count + 1)
    log_mass = (
        log_factorial[-1]
        - log_factorial
        - log_factorial[::-1]
        + i * math.log(q)
        + (count - i) * math.log1p(-q)
    )
    cdf: npt.NDArray[np.float64] = np.minimum(np.cumsum(np.exp(log_mass)), 1.0)
    return cdf
