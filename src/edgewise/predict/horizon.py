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
        nearest: How many windows count where only those of about one speed do: enough for a
            quantile of 0.98, and few enough to tell clocks about to fall far from clocks at their
            floor.

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
        nearest: int = 96,
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
        self._nearest = nearest
        self._size = size
        # Twice the window: written once per unit, moved back once per window. Rows: share of the
        # network's prediction, observed seconds, the network's prediction, whether windows start.
        self._rows = np.zeros((4, 2 * size))
        self._stop = 0
        self._added = 0
        # How many units had been added when each remembered request began.
        self._begins: deque[int] = deque([0], maxlen=max_groups)

    def __len__(self) -> int:
        """How many units the window holds now."""
        return min(self._size, self._added - self._begins[0])

    def add(
        self, predicted_s: float, observed_s: float, *, whole_s: float = 1.0, starts: bool = True
    ) -> None:
        """Append one unit; one without a finite ratio is ignored.

        Args:
            predicted_s: When it began, seconds.
            observed_s: What it took.
            whole_s: What the whole network was predicted to take when it began. Where this changes,
                a window is judged by the prediction at its start, carried on as shares of the
                whole: what the device does meanwhile is part of the ratio.
            starts: Whether windows that start here count.
        """
        if not (0.0 < predicted_s < math.inf and 0.0 <= observed_s < math.inf):
            return
        if self._stop == self._rows.shape[1]:
            self._rows[:, : self._size] = self._rows[:, self._size :]
            self._stop = self._size
        self._rows[:, self._stop] = predicted_s / whole_s, observed_s, whole_s, starts
        self._stop += 1
        self._added += 1

    def begin_group(self) -> None:
        """Say that the units from here on belong to the next request."""
        if self._begins[-1] != self._added:
            self._begins.append(self._added)

    def ratios(self, *, whole_s: float | None = None) -> tuple[Float64, Float64, Float64]:
        """Median, upper-quantile and largest ratio at each horizon.

        Args:
            whole_s: What the whole network is predicted to take now. Where predictions change,
                only the windows count that started in states of about this speed.

        Returns:
            Three arrays [H]. All ones where the window is empty. Upper ratios never fall below the
            median ones. While one prediction holds they never rise with the horizon: a longer piece
            of work cannot be relatively harder to foresee than its parts. A prediction that grows
            old on the way can.
        """
        count = len(self)
        if count == 0:
            ones = np.ones(len(self.horizons_s))
            return ones, ones, ones
        rows = self._rows[:, self._stop - count : self._stop]
        starts = rows[3] > 0
        one_prediction = bool((rows[2] == rows[2, 0]).all())
        ratio, inside = self._windows(rows) if one_prediction else self._aging_windows(rows)
        chosen = np.flatnonzero(starts) if starts.any() else np.arange(count)
        if not one_prediction and whole_s is not None and len(chosen) > self._nearest:
            apart = np.abs(np.log(rows[2, chosen] / whole_s))
            chosen = np.sort(chosen[np.argpartition(apart, self._nearest)[: self._nearest]])
        if len(chosen) < count:
            ratio, inside = ratio[:, chosen], inside[:, chosen]
        median, upper, worst = _quantiles(ratio, inside, self.level)
        if one_prediction:
            # The longest horizon first: shorter ones are at least as uncertain.
            upper = np.maximum.accumulate(upper[::-1])[::-1]
            worst = np.maximum.accumulate(worst[::-1])[::-1]
        return median, upper, worst

    def _windows(self, rows: Float64) -> tuple[Float64, npt.NDArray[np.bool_]]:
        """Ratio of the window that starts at each unit, and whether the units fill it: [H, N]."""
        count = rows.shape[1]
        work, spent = _sums(rows[0] * rows[2]), _sums(rows[1])
        stops = np.searchsorted(work, work[:-1] + self.horizons_s[:, None] * (1 - 1e-9))
        # A horizon that vanishes beside the sums before it still takes one unit.
        stops = np.maximum(stops, np.arange(1, count + 1))
        inside = stops <= count
        stops = np.minimum(stops, count)
        return (spent[stops] - spent[:-1]) / (work[stops] - work[:-1]), inside

    def _aging_windows(self, rows: Float64) -> tuple[Float64, npt.NDArray[np.bool_]]:
        """The same where predictions change from unit to unit.

        Within its request a window is judged by the prediction at its start; where it runs on into
        later requests, by those at their starts, since a decision looks no further than its own.
        """
        count = rows.shape[1]
        share, spent, whole_s = _sums(rows[0]), _sums(rows[1]), rows[2]
        begins = np.array(self._begins) - (self._added - count)
        begins = begins[(begins >= 0) & (begins < count)]
        if not begins.size or begins[0] != 0:
            begins = np.concatenate(([0], begins))
        request = np.searchsorted(begins, np.arange(count), side="right") - 1
        ends = np.append(begins[1:], count)[request]  # [N], where each unit's request ends
        later = _sums(rows[0] * whole_s[begins[request]])
        inner_s = whole_s * (share[ends] - share[:-1])
        wanted_s = self.horizons_s[:, None] * (1 - 1e-9)  # [H, 1]
        near = np.searchsorted(share, share[:-1] + wanted_s / whole_s)
        far = np.searchsorted(later, later[ends] + wanted_s - inner_s)
        stops = np.where(wanted_s <= inner_s, near, far)
        stops = np.maximum(stops, np.arange(1, count + 1))
        inside = stops <= count
        stops = np.minimum(stops, count)
        work_s = np.where(
            stops <= ends,
            whole_s * (share[stops] - share[:-1]),
            inner_s + later[stops] - later[ends],
        )
        return (spent[stops] - spent[:-1]) / work_s, inside


def _sums(values: Float64) -> Float64:
    """[N + 1], what has come before each unit, and all of it."""
    return np.concatenate(([0.0], np.cumsum(values)))


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
