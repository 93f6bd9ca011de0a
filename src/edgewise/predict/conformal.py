"""Margins with a stated coverage: split conformal and adaptive conformal, per unit and regime.

A residual here is observed / predicted, so a bound is a factor and serves all states of a regime.
Both kinds count how often their bounds held, before each residual was learnt from.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from edgewise.errors import ConfigError
from edgewise.predict.state_costs import REGIMES, Regime
from edgewise.profiles.statistics import conformal_quantile


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """How often a bound held, beside how often it should.

    Attributes:
        nominal: The share asked for.
        covered: Observations at or below the bound that was in force when they came.
        count: Observations that met a finite bound.
    """

    nominal: float
    covered: int
    count: int

    @property
    def observed(self) -> float | None:
        """The share that held; ``None`` before the first observation."""
        return self.covered / self.count if self.count else None

    def __add__(self, other: Coverage) -> Coverage:
        return Coverage(
            nominal=self.nominal,
            covered=self.covered + other.covered,
            count=self.count + other.count,
        )


class _Counted:
    """Counts how often bounds held."""

    def __init__(self, level: float) -> None:
        if not 0.5 <= level < 1.0:
            raise ConfigError(f"expected a coverage from 0.5 up to 1, found {level!r}")
        self.level = level
        self._covered = 0
        self._count = 0

    @property
    def coverage(self) -> Coverage:
        """Nominal and observed."""
        return Coverage(nominal=self.level, covered=self._covered, count=self._count)

    def _judge(self, residual: float, bound: float) -> bool:
        held = residual <= bound
        if bound < math.inf:
            self._count += 1
            self._covered += held
        return held


class SplitConformal(_Counted):
    """A bound from calibration residuals, never changed: its promise ends when the load changes.

    Attributes:
        level: Share of later residuals that it should cover.
        bound: The ⌈(n + 1)·level⌉-th smallest calibration residual; infinite where there are fewer.

    Raises:
        ConfigError: The level is out of range.
        DataError: A residual is NaN.

    Source:
        As `conformal_quantile`.
    """

    def __init__(self, residuals: Iterable[float], *, level: float) -> None:
        super().__init__(level)
        self.bound = conformal_quantile(list(residuals), level)

    def add(self, residual: float) -> None:
        """Count whether the bound held."""
        self._judge(residual, self.bound)


class AdaptiveConformal(_Counted):
    """A bound from a sliding window, whose level is steered by how often the bound has failed.

    With α the share allowed to fail and γ the gain, α_{t+1} = α_t + γ·(α − err_t), where err_t is 1
    if residual t lay above the bound; the bound is the conformal quantile at 1 − α_t.

    Where α_t falls to zero the source takes the infinite bound, under which its coverage is certain
    in the long run. A router cannot: it would never run the unit again, and never learn. The
    largest residual of the window is taken instead, and α_t kept from 0 to 1. What that costs is
    told by ``coverage``; ``tests/predict`` holds it under drift.

    Attributes:
        level: Share that should be covered.
        bound: Infinite until there are level / (1 − level) residuals, always finite afterwards.

    Args:
        level: As the attribute.
        size: How many residuals the window holds; the oldest leave first.
        gain: γ; 0 keeps the level, which is split conformal over a sliding window. Large gains
            follow a drift sooner and make the bound restless.

    Raises:
        ConfigError: An argument is out of range.

    Source:
        Gibbs and Candès, Adaptive Conformal Inference Under Distribution Shift (2021), eq. 2.
    """

    def __init__(self, *, level: float, size: int = 256, gain: float = 0.01) -> None:
        super().__init__(level)
        self._needed = math.ceil(round(level / (1.0 - level), 9))
        if size < self._needed:
            raise ConfigError(
                f"expected a window of at least {self._needed} residuals for a coverage of"
                f" {level!r}, found {size!r}"
            )
        if not 0 <= gain <= 1:
            raise ConfigError(f"expected a gain from 0 to 1, found {gain!r}")
        self._size = size
        self._gain = gain
        self.bound = math.inf
        self.clear()

    def __len__(self) -> int:
        """How many residuals the window holds."""
        return len(self._ordered)

    def clear(self) -> None:
        """Forget the residuals and start again from the nominal level; what was counted stays."""
        self._recent: deque[float] = deque()
        self._ordered: list[float] = []
        self._allowed = 1.0 - self.level
        self.bound = math.inf

    def add(self, residual: float) -> None:
        """Judge the bound by a residual, steer the level, and learn; NaN is left out."""
        if math.isnan(residual):
            return
        if self.bound < math.inf:
            allowed = 1.0 - self.level
            failed = not self._judge(residual, self.bound)
            self._allowed = min(1.0, max(0.0, self._allowed + self._gain * (allowed - failed)))
        if len(self._recent) == self._size:
            del self._ordered[bisect_left(self._ordered, self._recent.popleft())]
        self._recent.append(residual)
        insort(self._ordered, residual)
        count = len(self._ordered)
        if count >= self._needed:
            # Rounded as in `conformal_quantile`.
            rank = math.ceil(round((count + 1) * (1.0 - self._allowed), 9))
            self.bound = self._ordered[min(count, max(1, rank)) - 1]


class SplitMargins:
    """One split-conformal bound per unit and regime.

    Args:
        residuals: Unit, regime and residual of each calibration observation.
        level: Share that each bound should cover.
    """

    def __init__(self, residuals: Iterable[tuple[str, Regime, float]], *, level: float) -> None:
        cells: dict[tuple[str, Regime], list[float]] = {}
        for unit, regime, residual in residuals:
            cells.setdefault((unit, regime), []).append(residual)
        self.level = level
        self._cells = {key: SplitConformal(each, level=level) for key, each in cells.items()}

    def ratio(self, unit: str, regime: Regime) -> float:
        """Bound of a unit in a regime; infinite where calibration has seen it too seldom."""
        cell = self._cells.get((unit, regime))
        return math.inf if cell is None else cell.bound

    def add(self, unit: str, regime: Regime, residual: float) -> None:
        """Count whether a bound held."""
        cell = self._cells.get((unit, regime))
        if cell is not None:
            cell.add(residual)

    def coverage(self, unit: str | None = None, regime: Regime | None = None) -> Coverage:
        """Nominal and observed coverage, of one unit or all, in one regime or all."""
        return _total(self._cells, self.level, unit, regime)


class AdaptiveMargins:
    """One adaptive bound per unit and regime, learnt from nothing while the device works.

    A unit that has not run often enough in a regime takes what all units there need together; if
    even those are few, the base that was given. The same holds for one that has not run during
    ``forget_after`` requests: a bound that keeps its own unit from running could not be unlearnt.

    Args:
        units: Their names.
        level: Share that each bound should cover.
        base_ratio: [U], bounds until there are residuals, such as offline ones.
        size: Residuals per unit and regime.
        gain: As for `AdaptiveConformal`.
        forget_after: Requests.

    Raises:
        ConfigError: An argument is out of range.
    """

    def __init__(  # noqa: PLR0913 - each is one knob
        self,
        units: Sequence[str],
        *,
        level: float,
        base_ratio: Sequence[float],
        size: int = 256,
        gain: float = 0.01,
        forget_after: int = 256,
    ) -> None:
        if len(units) != len(base_ratio):
            raise ConfigError(f"expected {len(units)} base ratios, found {len(base_ratio)}")
        if forget_after < 1:
            raise ConfigError(
                f"expected to forget after at least one request, found {forget_after}"
            )

        def cell() -> AdaptiveConformal:
            return AdaptiveConformal(level=level, size=size, gain=gain)

        self.level = level
        self._base = dict(zip(units, map(float, base_ratio), strict=True))
        self._cells = {(u, r): cell() for r in REGIMES for u in units}
        self._together = {r: cell() for r in REGIMES}
        self._forget_after = forget_after
        self._requests = 0
        self._ran_at = dict.fromkeys(self._cells, 0)

    def begin_request(self) -> None:
        """Count a request, by which what has not run for long is forgotten."""
        self._requests += 1

    def add(self, unit: str, regime: Regime, residual: float) -> None:
        """Judge and learn; a unit that is not known is left out.

        Args:
            unit: Its name.
            regime: In which it was predicted.
            residual: Observed / predicted.
        """
        cell = self._cells.get((unit, regime))
        if cell is None or not math.isfinite(residual):
            return
        self._ran_at[unit, regime] = self._requests
        cell.add(residual)
        self._together[regime].add(residual)

    def ratio(self, unit: str, regime: Regime) -> float:
        """Bound of a unit in a regime, always finite."""
        cell = self._cells[unit, regime]
        if len(cell) and self._requests - self._ran_at[unit, regime] > self._forget_after:
            cell.clear()
        if cell.bound < math.inf:
            return cell.bound
        together = self._together[regime].bound
        return together if together < math.inf else self._base[unit]

    def coverage(self, unit: str | None = None, regime: Regime | None = None) -> Coverage:
        """Nominal and observed coverage of units' own bounds, of one or all, in one regime or all.

        What was judged by another's bound or by the base is not counted.
        """
        return _total(self._cells, self.level, unit, regime)


def _total(
    cells: Mapping[tuple[str, Regime], _Counted],
    level: float,
    unit: str | None,
    regime: Regime | None,
) -> Coverage:
    total = Coverage(nominal=level, covered=0, count=0)
    for (each_unit, each_regime), cell in cells.items():
        if unit in {None, each_unit} and regime in {None, each_regime}:
            total += cell.coverage
    return total
