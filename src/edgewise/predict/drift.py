"""Notices that predictions have been wrong by one factor for long: the profile is stale.

Margins and scale factors absorb what changes for moments. What stays, such as a device that has
become hot for good, a new driver or another power mode, should be profiled again, and be told.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from edgewise.errors import ConfigError

_HELP = "profile again: edgewise profile MODEL, then edgewise fit MODEL"
# Log ratios of a real machine are not steadier than this for long.
_LEAST_SPREAD = 0.01
_MAD_TO_SIGMA = 1.4826  # of a normal distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftAlarm:
    """The profile is stale.

    Attributes:
        since_s: When the shift began, as far as can be told.
        at_s: When it was noticed.
        ratio: Observed over predicted since then, geometric mean, relative to the calibrated one.
        reason: In words.
        help: What to do.
    """

    since_s: float
    at_s: float
    ratio: float
    reason: str
    help: str


@dataclass(slots=True)
class _OneSide:
    """Page's test for a shift to one side."""

    sum: float = 0.0
    since_s: float = 0.0
    logs: float = 0.0
    count: int = 0

    def add(self, at_s: float, increment: float, log_ratio: float, *, limit: float) -> None:
        if self.sum <= 0.0:
            self.since_s, self.logs, self.count = at_s, 0.0, 0
        self.sum = min(limit, max(0.0, self.sum + increment))
        self.logs += log_ratio
        self.count += 1


@dataclass(slots=True)
class DriftTest:
    """A two-sided CUSUM on log(observed / predicted), made deaf to bursts.

    With x the log ratio less its calibrated centre, σ its spread and δ the shift to be noticed, the
    sum is S ← max(0, S + (δ/σ²)·(x − δ/2)): the log likelihood ratio of "shifted by δ" against "as
    calibrated". Under normal noise an alarm at S ≥ h comes falsely once in e^h observations or less
    often; h = ln(2·``mean_between``), for there are two sides.

    Two changes, neither of which makes false alarms more frequent. An observation moves S by at
    most h / ``least_count`` either way, so that no outlier counts for more than its vote (the mean
    of e^increment stays at most 1, on which the bound rests). And S stays at h instead of growing
    and must have been above zero for ``hold_s``: when a burst ends, S falls at once.

    It is for one thread at a time.

    Attributes:
        centre: Log ratio when all is well.
        spread: Its standard deviation then.
        least_shift_ratio: The smallest lasting factor worth profiling again, either way.
        mean_between: Observations between false alarms, at least, while noise is as calibrated.
        least_count: Observations an alarm needs.
        hold_s: How long a shift must last.
        help: What an alarm says to do.
        alarm: The first one since the last `reset`.

    Raises:
        ConfigError: A value is out of range.

    Source:
        E. S. Page, Continuous Inspection Schemes, Biometrika 41, 1954; the bound on false alarms:
        G. Lorden, Procedures for Reacting to a Change in Distribution, Annals of Mathematical
        Statistics 42, 1971.
    """

    spread: float
    centre: float = 0.0
    least_shift_ratio: float = 1.25
    mean_between: float = 1e6
    least_count: int = 20
    hold_s: float = 5.0
    help: str = _HELP
    alarm: DriftAlarm | None = field(default=None, init=False)
    _slower: _OneSide = field(default_factory=_OneSide, init=False, repr=False)
    _faster: _OneSide = field(default_factory=_OneSide, init=False, repr=False)

    def __post_init__(self) -> None:
        if not (0 < self.spread < math.inf and math.isfinite(self.centre)):
            raise ConfigError(
                f"expected a finite centre and a spread above zero, found {self.centre!r} and"
                f" {self.spread!r}"
            )
        if not self.least_shift_ratio > 1 or not self.mean_between >= 1:
            raise ConfigError(
                f"expected a shift above 1 and at least one observation between alarms, found"
                f" {self.least_shift_ratio!r} and {self.mean_between!r}"
            )
        if self.least_count < 1 or not self.hold_s >= 0:
            raise ConfigError(
                f"expected at least one observation and a time of zero or more, found"
                f" {self.least_count!r} and {self.hold_s!r} s"
            )

    @classmethod
    def calibrated(cls, ratios: Sequence[float], *, help: str = _HELP) -> Self:  # noqa: A002 - as its field
        """With centre and spread of observed / predicted as they were when the profile was taken.

        Args:
            ratios: Residuals of the profile or of cross-validation; not finite or not positive ones
                are left out. The spread comes from the median deviation: outliers do not widen it.
            help: What an alarm says to do.

        Raises:
            ConfigError: Fewer than two ratios can be used.
        """
        values = np.asarray(ratios, dtype=np.float64).ravel()
        values = values[np.isfinite(values) & (values > 0)]
        if values.size < 2:
            raise ConfigError(f"expected at least two ratios above zero, found {values.size}")
        logs = np.log(values)
        centre = float(np.median(logs))
        spread = _MAD_TO_SIGMA * float(np.median(np.abs(logs - centre)))
        return cls(spread=max(spread, _LEAST_SPREAD), centre=centre, help=help)

    def add(self, at_s: float, predicted_s: float, observed_s: float) -> DriftAlarm | None:
        """Take a piece of work into account; one without a finite ratio is left out.

        One piece per request is best: the units of one share their fate.

        Args:
            at_s: When it ended.
            predicted_s: What it was predicted to take, no margin or scale factor applied.
            observed_s: What it took.

        Returns:
            The alarm, once; then ``None`` until `reset`.
        """
        if not (0.0 < predicted_s < math.inf and 0.0 < observed_s < math.inf):
            return None
        x = math.log(observed_s / predicted_s) - self.centre
        shift = max(math.log(self.least_shift_ratio), self.spread)
        limit = math.log(2.0 * self.mean_between)
        slope, most = shift / self.spread**2, limit / self.least_count
        for side, signed in ((self._slower, x), (self._faster, -x)):
            increment = max(-most, min(most, slope * (signed - shift / 2)))
            side.add(at_s, increment, x, limit=limit)
            lasted = at_s - side.since_s >= self.hold_s
            # So many equal parts of the limit add up to a little less.
            if self.alarm is None and side.sum >= limit * (1 - 1e-9) and lasted:
                self.alarm = self._raise(at_s, side)
                return self.alarm
        return None

    def reset(self) -> None:
        """Start again, as after a new profile."""
        self.alarm = None
        self._slower, self._faster = _OneSide(), _OneSide()

    def _raise(self, at_s: float, side: _OneSide) -> DriftAlarm:
        ratio = math.exp(side.logs / side.count)
        return DriftAlarm(
            since_s=side.since_s,
            at_s=at_s,
            ratio=ratio,
            reason=(
                f"profile is stale: work has taken {ratio:.2f} times its prediction for"
                f" {at_s - side.since_s:.0f} s"
            ),
            help=self.help,
        )
