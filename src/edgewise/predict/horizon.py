"""Upper quantiles of how much longer work takes than its medians say, by length of the work.

A short piece of work on a busy machine either is not disturbed at all or takes many times its
median; a long piece averages that out. One margin for both is wrong for one of them. So the
recent past is kept as a sequence of units with predicted and observed seconds, and for each of a
few horizons (an amount of predicted work) the ratio observed / predicted is taken over every
window of the sequence that holds that much work. Quantiles of those ratios are the margins.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgewise.errors import ConfigError

Float64 = npt.NDArray[np.float64]


class HorizonMargins:
    """A bounded window of recent residuals and the ratios it implies.

    Attributes:
        level: The quantile; may be changed between calls of `ratios`.

    Args:
        horizons_s: Amounts of predicted work at which ratios are wanted, ascending, seconds.
        level: The quantile, for example 0.98.
        size: How many units the window holds; the oldest leave first.
        max_groups: How many requests it holds at most. Requests that leave early add few units, and
            counting units alone would remember a disturbance for hundreds of them.

    Raises:
        ConfigError: The level, the size or a horizon is out of range.

    Source:
        Empirical quantiles of a sliding window, as split conformal prediction takes them (Vovk et
        al. 2005); windows overlap and load is not exchangeable, so the level is aimed at, not
        guaranteed. ``tests/predict`` checks coverage on independent and on bursty noise.
    """

    def __init__(
        self,
        horizons_s: Sequence[float],
        *,
        level: float = 0.98,
        size: int = 512,
        max_groups: int = 48,
    ) -> None:
        if not 0.5 <= level < 1.0:
            raise ConfigError(f"expected a margin level from 0.5 up to 1, found {level!r}")
        self.horizons_s = np.asarray(sorted(horizons_s), dtype=float)
        if self.horizons_s.size == 0 or not (self.horizons_s > 0).all():
            raise ConfigError("expected horizons above zero")
        if size < 1 or max_groups < 1:
            raise ConfigError(
                f"expected a window of at least one unit and request, found {size!r} and"
                f" {max_groups!r}"
            )
        self.level = level
        self._size = size
        # Twice the window: written once per unit, moved back once per window.
        self._predicted = np.zeros(2 * size)
        self._observed = np.zeros(2 * size)
        self._stop = 0
        self._added = 0
        # How many units had been added when each remembered request began.
        self._begins: deque[int] = deque([0], maxlen=max_groups)

    def __len__(self) -> int:
        """How many units the window holds now."""
        return min(self._size, self._added - self._begins[0])

    def add(self, predicted_s: float, observed_s: float) -> None:
        """Append one unit; one without a finite ratio is ignored."""
        if not (0.0 < predicted_s < math.inf and 0.0 <= observed_s < math.inf):
            return
        if self._stop == len(self._predicted):
            keep = self._size
            self._predicted[:keep] = self._predicted[keep:]
            self._observed[:keep] = self._observed[keep:]
            self._stop = keep
        self._predicted[self._stop] = predicted_s
        self._observed[self._stop] = observed_s
        self._stop += 1
        self._added += 1

    def begin_group(self) -> None:
        """Say that the units from here on belong to the next request."""
        if self._begins[-1] != self._added:
            self._begins.append(self._added)

    def ratios(self) -> tuple[Float64, Float64, Float64]:
        """Median, upper-quantile and largest ratio at each horizon.

        Returns:
            Three arrays [H]. All ones where the window is empty. Upper ratios never fall below the
            median ones, and never rise with the horizon: a longer piece of work cannot be
            relatively harder to foresee than its parts.
        """
        count = len(self)
        if count == 0:
            ones = np.ones(len(self.horizons_s))
            return ones, ones, ones
        ratio, inside = self._windows(count)
        median, upper, worst = _quantiles(ratio, inside, self.level)
        # The longest horizon first: shorter ones are at least as uncertain.
        upper = np.maximum.accumulate(upper[::-1])[::-1]
        worst = np.maximum.accumulate(worst[::-1])[::-1]
        return median, upper, worst

    def _windows(self, count: int) -> tuple[Float64, npt.NDArray[np.bool_]]:
        """Ratio of the window that starts at each unit, and whether the units fill it: [H, N]."""
        units = slice(self._stop - count, self._stop)
        work = np.zeros(count + 1)
        spent = np.zeros(count + 1)
        np.cumsum(self._predicted[units], out=work[1:])
        np.cumsum(self._observed[units], out=spent[1:])
        stops = np.searchsorted(work, work[:-1] + self.horizons_s[:, None] * (1 - 1e-9))
        # A horizon that vanishes beside the sums before it still takes one unit.
        stops = np.maximum(stops, np.arange(1, count + 1))
        inside = stops <= count
        stops = np.minimum(stops, count)
        return (spent[stops] - spent[:-1]) / (work[stops] - work[:-1]), inside


def _quantiles(
    ratio: Float64, inside: npt.NDArray[np.bool_], level: float
) -> tuple[Float64, Float64, Float64]:
    """Median, upper quantile and maximum of each row over the windows that are filled.

    Where none is, the window that starts first stands for all: it holds the most work.
    """
    inside = inside.copy()
    inside[:, 0] |= ~inside.any(axis=1)
    ordered = np.sort(np.where(inside, ratio, np.inf), axis=1)
    sizes = inside.sum(axis=1)
    ranks = np.minimum(sizes, np.ceil((sizes + 1) * level).astype(int)) - 1
    rows = np.arange(len(sizes))
    return ordered[rows, sizes // 2], ordered[rows, ranks], ordered[rows, sizes - 1]
