"""Upper quantiles of how much longer work takes than its medians say, by length of the work.

A short piece of work on a busy machine either is not disturbed at all or takes many times its
median; a long piece averages that out. One margin for both is wrong for one of them. So the
recent past is kept as a sequence of units with predicted and observed seconds, and for each of a
few horizons (an amount of predicted work) the ratio observed / predicted is taken over every
window of the sequence that holds that much work. Quantiles of those ratios are the margins.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgewise.errors import ConfigError

Float64 = npt.NDArray[np.float64]


class HorizonMargins:
    """A bounded window of recent residuals and the ratios it implies.

    Args:
        horizons_s: Amounts of predicted work at which ratios are wanted, ascending, seconds.
        level: The quantile, for example 0.98.
        size: How many units the window holds; the oldest leave first.
        floor_s: Added to each upper bound: the timer's and the controller's own share.

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
        floor_s: float = 20e-6,
    ) -> None:
        if not 0.5 <= level < 1.0:
            raise ConfigError(f"expected a margin level from 0.5 up to 1, found {level!r}")
        self.horizons_s = np.asarray(sorted(horizons_s), dtype=float)
        if self.horizons_s.size == 0 or not (self.horizons_s > 0).all():
            raise ConfigError("expected horizons above zero")
        self.level = level
        self.floor_s = floor_s
        self._size = size
        # Twice the window: written once per unit, moved back once per window.
        self._predicted = np.zeros(2 * size)
        self._observed = np.zeros(2 * size)
        self._stop = 0

    def __len__(self) -> int:
        """How many units the window holds now."""
        return min(self._stop, self._size)

    def add(self, predicted_s: float, observed_s: float) -> None:
        """Append one unit; a prediction that is not above zero is ignored."""
        if predicted_s <= 0.0 or not observed_s >= 0.0:
            return
        if self._stop == len(self._predicted):
            keep = self._size
            self._predicted[:keep] = self._predicted[keep:]
            self._observed[:keep] = self._observed[keep:]
            self._stop = keep
        self._predicted[self._stop] = predicted_s
        self._observed[self._stop] = observed_s
        self._stop += 1

    def ratios(self) -> tuple[Float64, Float64, Float64]:
        """Median, upper-quantile and largest ratio at each horizon.

        Returns:
            Three arrays [H]. All ones where the window is empty. Upper ratios never fall below the
            median ones, and never rise with the horizon: a longer piece of work cannot be
            relatively harder to foresee than its parts.
        """
        begin = max(0, self._stop - self._size)
        count = self._stop - begin
        if count == 0:
            return tuple(np.ones(len(self.horizons_s)) for _ in range(3))  # type: ignore[return-value]
        work = np.zeros(count + 1)
        spent = np.zeros(count + 1)
        np.cumsum(self._predicted[begin : self._stop], out=work[1:])
        np.cumsum(self._observed[begin : self._stop], out=spent[1:])
        # [H, N]: where the window that starts at n ends.
        targets = work[:-1] + self.horizons_s[:, None] * (1 - 1e-9)
        stops = np.searchsorted(work, targets)
        inside = stops <= count
        # With less work than a horizon, all of it is one window.
        inside[:, 0] |= ~inside.any(axis=1)
        stops = np.minimum(stops, count)
        ratio = np.where(
            inside, (spent[stops] - spent[:-1]) / (work[stops] - work[:-1]), np.inf
        )
        ratio.sort(axis=1)
        sizes = inside.sum(axis=1)
        ranks = np.minimum(sizes, np.ceil((sizes + 1) * self.level).astype(int)) - 1
        rows = np.arange(len(sizes))
        median = ratio[rows, sizes // 2]
        # The longest horizon first: shorter ones are at least as uncertain.
        upper = np.maximum.accumulate(ratio[rows, ranks][::-1])[::-1]
        worst = np.maximum.accumulate(ratio[rows, sizes - 1][::-1])[::-1]
        return median, np.maximum(upper, median), worst
