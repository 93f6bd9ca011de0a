"""The paper's trend-aware fallback: is the device's state volatile, and how bad has it lately been?

Two parts that do not know each other. `Trend` sees states, once per reading of the sensors.
`WorstCases` sees units that ran. Whoever decides adds the second's gap where the first says so.

The paper (UniExit, section 5.4) leaves open how long the windows are, what "period" is measured
over and how high the thresholds lie. Each choice of ours stands, with its reason, at its argument.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgewise.errors import ConfigError
from edgewise.predict.state_costs import Regime

Float64 = npt.NDArray[np.float64]

# Readings 10 ms apart are 9.99 ms apart now and then.
_JITTER = 1.0 + 1e-3


class Trend:
    """Says of a sequence of states whether it is volatile, and which way costs are going.

    σ_f is the largest range of any feature within the window, features being shares of their
    highest value. τ_f is the window over the number of readings in it at which some feature left
    its level. Volatile means σ_f above and τ_f below their thresholds: large and frequent changes.
    One large change, or many tiny ones, are something that predictions follow.

    Not safe for several threads at once: it belongs to the monitor's.

    Attributes:
        sigma_f: Largest range of any feature within the window.
        tau_f_s: Mean time between changes within the window, seconds; infinite without any.
        regime: ``"slower"`` or ``"faster"`` where the whole network's prediction has lately risen
            or fallen by more than ``regime_ratio``.

    Args:
        window_s: Of σ_f and τ_f. A tenth of a second is several requests, several steps of a
            governor, and the shortest window over which Linux tells a load.
        sigma_threshold: A tenth: about as much cost changes with it, and margins for the error of
            predictions alone are smaller.
        tau_threshold_s: Half the window, so that a single step of a governor is not volatile. A
            monitor that reads less often than this never sees volatility.
        level_ratio: A feature must leave its level by more than this to have changed: less is the
            rounding of clocks and counters.
        regime_window_s: Over how long a rise or fall counts: three readings at the default period
            of the monitor, for a turn must be noticed within about a request.
        regime_ratio: How much of a rise or fall counts; less is noise of utilisation.
        max_readings: How many readings are held at most.

    Raises:
        ConfigError: An argument is out of range.

    Source:
        UniExit, section 5.4, for the two indicators; windows and thresholds are ours.
    """

    def __init__(  # noqa: PLR0913 - each is one choice that the paper leaves open
        self,
        *,
        window_s: float = 0.100,
        sigma_threshold: float = 0.10,
        tau_threshold_s: float = 0.050,
        level_ratio: float = 0.01,
        regime_window_s: float = 0.030,
        regime_ratio: float = 0.03,
        max_readings: int = 128,
    ) -> None:
        if not (0 < window_s < math.inf and 0 < regime_window_s <= window_s):
            raise ConfigError(
                f"expected windows above zero, the regime's within the other's, found"
                f" {window_s!r} s and {regime_window_s!r} s"
            )
        if not (sigma_threshold >= 0 and tau_threshold_s > 0 and level_ratio >= 0):
            raise ConfigError(
                f"expected thresholds of zero or more, found {sigma_threshold!r},"
                f" {tau_threshold_s!r} s and {level_ratio!r}"
            )
        if not regime_ratio > 0 or max_readings < 2:
            raise ConfigError(
                f"expected a regime ratio above zero and at least two readings, found"
                f" {regime_ratio!r} and {max_readings!r}"
            )
        self._window_s = window_s
        self._sigma_threshold = sigma_threshold
        self._tau_threshold_s = tau_threshold_s
        self._level_ratio = level_ratio
        self._regime_window_s = regime_window_s
        self._log_regime_ratio = math.log1p(regime_ratio)
        self._size = max_readings
        self._readings: deque[tuple[float, float]] = deque(maxlen=max_readings)
        self._changes: deque[float] = deque(maxlen=max_readings)
        self._features = np.zeros((0, 0))
        self._level = np.zeros(0)
        self._stop = 0
        self.reset()

    def reset(self) -> None:
        """Forget all states."""
        self._readings.clear()
        self._changes.clear()
        self._stop = 0
        self.sigma_f = 0.0
        self.tau_f_s = math.inf
        self.regime: Regime = "steady"

    @property
    def volatile(self) -> bool:
        """Whether both indicators are past their thresholds."""
        return self.sigma_f > self._sigma_threshold and self.tau_f_s < self._tau_threshold_s

    def add(self, at_s: float, features: Float64, full_depth_s: float) -> None:
        """Take a state into account.

        Args:
            at_s: When it was read. One that is not later than the last is left out; one that lies
                further back than the window means that the clock jumped, and all is forgotten.
            features: [F], from 0 to 1; NaN where not known, which is no change.
            full_depth_s: What the whole network is predicted to take in it, seconds.
        """
        if self._readings and at_s <= self._readings[-1][0]:
            if at_s > self._readings[-1][0] - self._window_s:
                return
            self.reset()
        self._note_change(at_s, features)
        self._append(features)
        self._readings.append((at_s, full_depth_s))
        oldest_s = at_s - self._window_s * _JITTER
        while self._readings[0][0] < oldest_s:
            self._readings.popleft()
        # One window holds as many periods as changes: the one at its very start is not of it.
        while self._changes and self._changes[0] <= at_s - self._window_s / _JITTER:
            self._changes.popleft()
        held = self._features[self._stop - len(self._readings) : self._stop]  # [N, F]
        spans = np.fmax.reduce(held) - np.fmin.reduce(held)  # [F], NaN ignored
        self.sigma_f = float(np.fmax.reduce(spans, initial=0.0))
        self.tau_f_s = self._window_s / len(self._changes) if self._changes else math.inf
        self.regime = self._regime_at(at_s)

    def _note_change(self, at_s: float, features: Float64) -> None:
        if features.shape != self._level.shape or not self._readings:
            self.reset()
            self._level = features.astype(np.float64)
            self._features = np.empty((2 * self._size, features.size))
            return
        left = np.abs(features - self._level) > self._level_ratio  # False where NaN
        if left.any():
            self._level = np.where(left, features, self._level)
            self._changes.append(at_s)
        unknown = np.isnan(self._level)
        if unknown.any():
            self._level = np.where(unknown, features, self._level)

    def _append(self, features: Float64) -> None:
        # Twice the readings: written once each, moved back once per filling.
        if self._stop == len(self._features):
            self._features[: self._size] = self._features[self._size :]
            self._stop = self._size
        self._features[self._stop] = features
        self._stop += 1

    def _regime_at(self, at_s: float) -> Regime:
        since_s = at_s - self._regime_window_s * _JITTER
        now_s = before_s = self._readings[-1][1]
        for read_s, full_depth_s in reversed(self._readings):
            if read_s < since_s:
                break
            before_s = full_depth_s
        if not (0 < before_s < math.inf and 0 < now_s < math.inf):
            return "steady"
        change = math.log(now_s / before_s)
        if abs(change) <= self._log_regime_ratio:
            return "steady"
        return "slower" if change > 0 else "faster"


@dataclass(slots=True)
class _Worst:
    """Largest values of one unit, in this part of the window and in the one before."""

    ratio: float = 0.0
    seconds: float = 0.0
    ratio_before: float = 0.0
    seconds_before: float = 0.0


class WorstCases:
    """The worst that each unit has lately taken: the paper's periodic worst case.

    Memory is two values per unit: of the running period and of the one before. So a worst case is
    remembered for at least one period and at most two.

    Args:
        period_s: Half a second: the paper's down-up traces repeat every 0.42 s and 0.48 s, and what
            is remembered must hold one whole round, or the worst part of it is forgotten before it
            comes again.

    Raises:
        ConfigError: The period is not above zero.

    Source:
        UniExit, section 5.4: what it adds to a prediction can be read as seconds (`gap_s`) or as a
        ratio (`gap_ratio`).
    """

    def __init__(self, *, period_s: float = 0.5) -> None:
        if not 0 < period_s < math.inf:
            raise ConfigError(f"expected a period above zero, found {period_s!r} s")
        self._period_s = period_s
        self._worst: dict[str, _Worst] = {}
        self._since_s: float | None = None

    def add(self, unit: str, predicted_s: float, observed_s: float, *, at_s: float) -> None:
        """Take a unit that ran into account; one without a finite ratio is left out.

        Args:
            unit: Its name.
            predicted_s: What it was predicted to take.
            observed_s: What it took.
            at_s: When it ended.
        """
        if not (0.0 < predicted_s < math.inf and 0.0 <= observed_s < math.inf):
            return
        self.advance(at_s)
        worst = self._worst.setdefault(unit, _Worst())
        worst.ratio = max(worst.ratio, observed_s / predicted_s)
        worst.seconds = max(worst.seconds, observed_s)

    def advance(self, at_s: float) -> None:
        """Forget what is too old at an instant; all of it where the clock was set back."""
        if self._since_s is None:
            self._since_s = at_s
        age = (at_s - self._since_s) / self._period_s
        if 0 <= age < 1:
            return
        if not 0 <= age < 2:
            self._since_s = at_s
            self._worst.clear()
            return
        self._since_s += self._period_s
        for worst in self._worst.values():
            worst.ratio_before, worst.seconds_before = worst.ratio, worst.seconds
            worst.ratio = worst.seconds = 0.0

    def gap_ratio(self, unit: str) -> float:
        """Worst observed over predicted, less one; zero where the unit has not run lately."""
        worst = self._worst.get(unit)
        return 0.0 if worst is None else max(0.0, max(worst.ratio, worst.ratio_before) - 1.0)

    def gap_s(self, unit: str, predicted_s: float) -> float:
        """Worst observed less the present prediction, seconds, never below zero.

        Where the trace has just been at its lowest clocks this holds the cost there against the
        highest ones.
        """
        worst = self._worst.get(unit)
        if worst is None:
            return 0.0
        return max(0.0, max(worst.seconds, worst.seconds_before) - predicted_s)
