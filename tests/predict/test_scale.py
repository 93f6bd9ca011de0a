from __future__ import annotations

import math

import numpy as np
import pytest

from edgewise.errors import ConfigError
from edgewise.predict.scale import ScaleFactor


def after(ratios: list[float], **options: float) -> float:
    scale = ScaleFactor(**options)
    for ratio in ratios:
        scale.add(0.002, 0.002 * ratio)
    return scale.value


def test_clocks_never_profiled_are_corrected_after_one_stage() -> None:
    stage_s, slower = np.array([2.0, 3.0, 1.0, 4.0]), 1.7
    scale = ScaleFactor()
    scale.add(stage_s[0], slower * stage_s[0])

    assert scale.value * stage_s[1:] == pytest.approx(slower * stage_s[1:])


@pytest.mark.parametrize("weight", [0.25, 0.5])
def test_a_smaller_weight_comes_near_in_closed_form(weight: float) -> None:
    # From 1 towards r: after n units the factor is r^(1 − (1 − w)^n).
    assert after([3.0] * 4, weight=weight) == pytest.approx(3.0 ** (1 - (1 - weight) ** 4))


def test_good_news_is_believed_as_slowly_as_asked() -> None:
    assert after([2.0], falling_weight=0.5) == 2.0
    assert after([2.0, 0.5], falling_weight=0.5) == pytest.approx(1.0)
    assert after([2.0, 0.5]) == 0.5


def test_a_stage_that_was_held_up_counts_for_no_more_than_the_limits() -> None:
    assert after([1000.0]) == 8.0
    assert after([0.0]) == 0.25
    assert after([1000.0], most=2.0) == 2.0


@pytest.mark.parametrize(
    ("predicted_s", "observed_s"),
    [(0.0, 1.0), (-1.0, 1.0), (1.0, -1.0), (math.nan, 1.0), (1.0, math.nan), (1.0, math.inf)],
)
def test_what_has_no_ratio_changes_nothing(predicted_s: float, observed_s: float) -> None:
    scale = ScaleFactor()
    scale.add(predicted_s, observed_s)

    assert scale.value == 1.0


def test_it_can_be_forgotten() -> None:
    scale = ScaleFactor()
    scale.add(1.0, 2.0)
    scale.reset()

    assert scale.value == 1.0


@pytest.mark.parametrize(
    "options",
    [{"weight": 0.0}, {"weight": 1.5}, {"falling_weight": 0.0}, {"least": 2.0}, {"most": math.inf}],
    ids=lambda o: next(iter(o)),
)
def test_weights_and_limits_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        ScaleFactor(**options)
