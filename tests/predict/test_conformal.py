from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgewise.errors import ConfigError, DataError
from edgewise.predict.conformal import (
    AdaptiveConformal,
    AdaptiveMargins,
    SplitConformal,
    SplitMargins,
)
from edgewise.predict.state_costs import REGIMES, Regime

UNITS = ("segment:0-1", "head:0")


def adaptive_after(
    residuals: Sequence[float], *, level: float, **options: float
) -> AdaptiveConformal:
    cell = AdaptiveConformal(level=level, **options)  # type: ignore[arg-type]
    for residual in residuals:
        cell.add(residual)
    return cell


@given(
    residuals=st.lists(st.integers(0, 50), max_size=60),
    level=st.sampled_from([0.5, 0.8, 0.9]),
    size=st.integers(9, 20),
    gain=st.sampled_from([0.0, 0.05, 0.5]),
)
def test_the_bound_is_the_one_found_by_counting(
    residuals: list[int], level: float, size: int, gain: float
) -> None:
    cell = AdaptiveConformal(level=level, size=size, gain=gain)
    window: deque[int] = deque(maxlen=size)
    allowed, bound = 1 - level, math.inf
    for residual in residuals:
        if bound < math.inf:
            allowed += gain * (1 - level - (residual > bound))
            allowed = min(1.0, max(0.0, allowed))
        window.append(residual)
        cell.add(residual)
        if len(window) + 1e-9 >= level / (1 - level):
            # The smallest value with a share 1 − α of all, the next one included, at or below it.
            wanted = (len(window) + 1) * (1 - allowed) - 1e-9
            holds = [v for v in sorted(window) if sum(w <= v for w in window) >= wanted]
            bound = holds[0] if holds else max(window)

        assert cell.bound == bound


@pytest.mark.parametrize("level", [0.8, 0.9, 0.95])
def test_split_coverage_is_nominal_over_many_calibrations(level: float) -> None:
    rng = np.random.default_rng(1)
    covered = count = 0
    for _ in range(2000):
        residuals = rng.lognormal(0.0, 0.5, 99 + 20)
        cell = SplitConformal(residuals[:99], level=level)
        for residual in residuals[99:]:
            cell.add(residual)
        covered += cell.coverage.covered
        count += cell.coverage.count

    # 99 residuals: (n + 1)·level is whole, so the promise is exact on average. Its error here is
    # that of 2000 calibrations, each with a spread of sqrt(level·(1 − level)/101).
    assert covered / count == pytest.approx(level, abs=0.01)


@pytest.mark.parametrize("level", [0.8, 0.95])
@pytest.mark.parametrize("gain", [0.0, 0.01])
def test_adaptive_coverage_is_nominal_on_exchangeable_residuals(level: float, gain: float) -> None:
    residuals = np.random.default_rng(2).lognormal(0.0, 0.5, 20_000).tolist()
    coverage = adaptive_after(residuals, level=level, gain=gain).coverage

    assert coverage.nominal == level
    assert coverage.observed == pytest.approx(level, abs=0.01)


def test_under_drift_adaptive_keeps_its_coverage_and_split_does_not() -> None:
    rng = np.random.default_rng(3)
    # A device that becomes three times slower, bit by bit.
    residuals = rng.lognormal(np.linspace(0.0, math.log(3.0), 20_000), 0.1)
    split = SplitConformal(residuals[:200], level=0.95)
    adaptive = AdaptiveConformal(level=0.95)
    for residual in residuals.tolist():
        split.add(residual)
        adaptive.add(residual)

    assert split.coverage.observed is not None
    assert split.coverage.observed < 0.5
    assert adaptive.coverage.observed == pytest.approx(0.95, abs=0.01)


def test_steering_brings_coverage_nearer_than_the_window_alone_where_levels_jump() -> None:
    rng = np.random.default_rng(4)
    level_of_block = rng.lognormal(0.0, 0.5, 100).repeat(200)
    residuals = (level_of_block * rng.lognormal(0.0, 0.05, 20_000)).tolist()
    steered = adaptive_after(residuals, level=0.9, gain=0.05).coverage.observed
    window = adaptive_after(residuals, level=0.9, gain=0.0).coverage.observed

    assert steered is not None
    assert window is not None
    assert abs(steered - 0.9) < abs(window - 0.9)


def test_a_bound_is_infinite_until_there_are_enough_residuals_and_nothing_is_counted() -> None:
    cell = adaptive_after([1.0] * 18, level=0.95)
    assert cell.bound == math.inf
    assert cell.coverage.observed is None

    cell.add(2.0)
    assert cell.bound == 2.0
    assert cell.coverage.count == 0


def test_a_bound_stays_finite_however_often_it_fails() -> None:
    cell = adaptive_after([float(n) for n in range(300)], level=0.95, gain=0.5)

    assert cell.bound == 299.0


def test_nan_is_not_learnt_and_cannot_calibrate() -> None:
    cell = adaptive_after([1.0] * 19, level=0.95)
    cell.add(math.nan)

    assert len(cell) == 19
    with pytest.raises(DataError, match="NaN"):
        SplitConformal([math.nan] * 30, level=0.9)


def test_split_margins_are_kept_apart_by_unit_and_regime() -> None:
    rng = np.random.default_rng(5)
    scale = {(u, r): 1.0 + i for i, (u, r) in enumerate((u, r) for u in UNITS for r in REGIMES)}

    def drawn(count: int) -> list[tuple[str, Regime, float]]:
        return [
            (u, r, s * x)
            for (u, r), s in scale.items()
            for x in rng.lognormal(0, 0.1, count).tolist()
        ]

    margins = SplitMargins(drawn(1999), level=0.9)
    for each in drawn(2000):
        margins.add(*each)

    for (unit, regime), s in scale.items():
        assert margins.ratio(unit, regime) == pytest.approx(s * math.exp(0.1 * 1.2816), rel=0.02)
        observed = margins.coverage(unit, regime).observed
        assert observed == pytest.approx(0.9, abs=0.025)
    assert margins.coverage().count == 2000 * len(scale)
    assert margins.coverage().observed == pytest.approx(0.9, abs=0.01)
    assert margins.ratio("head:9", "steady") == math.inf


def adaptive_margins(**options: float) -> AdaptiveMargins:
    return AdaptiveMargins(UNITS, level=0.9, base_ratio=[1.5, 2.5], **options)  # type: ignore[arg-type]


def test_adaptive_margins_learn_each_unit_and_regime_by_itself() -> None:
    margins = adaptive_margins(gain=0.0)
    for n in range(40):
        margins.begin_request()
        margins.add("segment:0-1", "steady", 1.0 + n / 1000)
        margins.add("head:0", "steady", 3.0)
        margins.add("segment:0-1", "slower", 2.0)

    assert margins.ratio("segment:0-1", "steady") == pytest.approx(1.036)  # the 37th of 40
    assert margins.ratio("head:0", "steady") == 3.0
    assert margins.ratio("segment:0-1", "slower") == 2.0
    assert margins.coverage("head:0").observed == 1.0
    assert margins.coverage(regime="faster").observed is None


def test_what_has_run_too_seldom_takes_what_all_units_need_then_the_base() -> None:
    margins = adaptive_margins()
    assert margins.ratio("head:0", "steady") == 2.5

    for _ in range(9):
        margins.add("segment:0-1", "steady", 1.25)
    assert margins.ratio("head:0", "steady") == 1.25
    assert margins.ratio("head:0", "slower") == 2.5


def test_a_bound_that_keeps_its_unit_from_running_is_forgotten() -> None:
    margins = adaptive_margins(forget_after=50)
    for _ in range(20):
        margins.begin_request()
        margins.add("head:0", "steady", 9.0)
    assert margins.ratio("head:0", "steady") == 9.0

    for _ in range(300):
        margins.begin_request()
        margins.add("segment:0-1", "steady", 1.1)
    assert margins.ratio("head:0", "steady") == 1.1


def test_residuals_of_unknown_units_or_without_a_value_are_left_out() -> None:
    margins = adaptive_margins()
    for _ in range(20):
        margins.add("segment:0-4", "steady", 7.0)
        margins.add("head:0", "steady", math.inf)

    assert margins.ratio("head:0", "steady") == 2.5


def test_levels_windows_and_gains_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected a coverage from"):
        SplitConformal([1.0], level=1.0)
    with pytest.raises(ConfigError, match="at least 99 residuals"):
        AdaptiveConformal(level=0.99, size=98)
    with pytest.raises(ConfigError, match="gain"):
        AdaptiveConformal(level=0.9, gain=-1.0)
    with pytest.raises(ConfigError, match="2 base ratios, found 1"):
        AdaptiveMargins(UNITS, level=0.9, base_ratio=[1.0])
    with pytest.raises(ConfigError, match="at least one request"):
        adaptive_margins(forget_after=0)
