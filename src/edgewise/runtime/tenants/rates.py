"""How often a tenant is asked, and whether that has changed: a window that forgets at a change."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from edgewise.errors import ConfigError

Float64 = npt.NDArray[np.float64]

_KEPT = 256  # arrivals; more say nothing new about one rate
_LEAST_BEFORE = 6  # gaps that a rate must be known from before it can have changed


@dataclass(slots=True)
class RateEstimator:
    """Arrivals over a sliding window, with a likelihood-ratio test for a change of rate.

    For n gaps of total T, of which n₁ of total T₁ come before a candidate instant and n₂ of total
    T₂ after it, exponential gaps give

        ln Λ = n₁ ln(n₁/T₁) + n₂ ln(n₂/T₂) - n ln(n/T).

    The gap that is still open counts into T₂, so that silence is noticed too. Where the largest
    ln Λ over all instants exceeds ``limit``, everything before that instant is forgotten. Arrivals
    more irregular than Poisson (C² > 1) have theirs divided by C², as a quasi-likelihood has.

    It is for one thread at a time; instants are of any clock.

    Attributes:
        window_s: How far back arrivals count.
        limit: ln Λ that is a change. 10 is exceeded about once in a thousand windows by chance.
        changed: Whether there was a change since `acknowledge`.
        changed_s: When the rate changed last, as far as can be told; ``None`` if never.
        changes: How many there were.

    Raises:
        ConfigError: The window or the limit is not above zero.

    Source:
        D. Siegmund and E. Venkatraman, Using the generalized likelihood ratio statistic for
        sequential detection of a change-point, Annals of Statistics 23, 1995.
    """

    window_s: float = 30.0
    limit: float = 10.0
    changed: bool = field(default=False, init=False)
    changed_s: float | None = field(default=None, init=False)
    changes: int = field(default=0, init=False)
    _arrivals: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT), init=False)

    def __post_init__(self) -> None:
        if not self.window_s > 0 or not self.limit > 0:
            raise ConfigError(
                f"expected a window and a limit above zero, found {self.window_s!r} and"
                f" {self.limit!r}"
            )

    def add(self, instant_s: float) -> None:
        """Count an arrival; instants must not fall, and one that does counts as the last one."""
        if self._arrivals:
            instant_s = max(instant_s, self._arrivals[-1])
        self._arrivals.append(instant_s)

    def acknowledge(self) -> None:
        """Forget that there was a change."""
        self.changed = False

    def rate_per_s(self, now_s: float) -> float | None:
        """Estimate λ, and look for a change.

        Args:
            now_s: The present instant.

        Returns:
            Requests per second since the last change, within the window; ``None`` where nothing
            has come yet. Zero after a whole window of silence.
        """
        if not self._arrivals:
            return None
        now_s = max(now_s, self._arrivals[-1])
        while len(self._arrivals) > 1 and self._arrivals[1] <= now_s - self.window_s:
            self._arrivals.popleft()
        self._look(now_s)
        first_s = self._arrivals[0]
        start_s = max(first_s, now_s - self.window_s)
        # An arrival that opens the span is where counting begins: it does not count itself.
        count = len(self._arrivals) - 1
        if first_s < now_s - self.window_s and count == 0:
            return 0.0
        span_s = now_s - start_s
        return count / span_s if span_s > 0 else None

    def arrival_cv2(self) -> float | None:
        """C_a² of the gaps since the last change; ``None`` with fewer than ten."""
        gaps = np.diff(np.array(self._arrivals))
        if len(gaps) < 10 or not gaps.mean() > 0:
            return None
        return float(gaps.var() / gaps.mean() ** 2)

    def _look(self, now_s: float) -> None:
        times = np.array(self._arrivals)
        gaps = len(times) - 1
        if gaps < _LEAST_BEFORE:
            return
        before = np.arange(_LEAST_BEFORE, gaps + 1)  # n₁
        ratio = _log_ratio(before, times[before] - times[0], gaps, now_s - times[0])
        ratio /= max(1.0, self.arrival_cv2() or 1.0)
        best = int(ratio.argmax())
        if ratio[best] <= self.limit:
            return
        at = int(before[best])
        self.changed, self.changed_s = True, float(times[at])
        self.changes += 1
        for _ in range(at):
            self._arrivals.popleft()


def _log_ratio(
    before: npt.NDArray[np.int64], before_s: Float64, gaps: int, total_s: float
) -> Float64:
    after, after_s = gaps - before, total_s - before_s

    def part(count: npt.NDArray[np.int64], span_s: Float64) -> Float64:
        rate = np.maximum(count, 1) / np.maximum(span_s, 1e-9)
        return np.asarray(count * np.log(rate))

    whole = gaps * math.log(gaps / max(total_s, 1e-9))
    return part(before, before_s) + part(after, after_s) - whole
