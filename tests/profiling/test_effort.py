from __future__ import annotations

import math

import numpy as np
import pytest

from edgewise.errors import ConfigError
from edgewise.profiles import UnitKey
from edgewise.profiling import QUICK, THOROUGH, steadiness, unit_steadiness


def test_a_unit_with_few_samples_is_not_steady() -> None:
    assert not unit_steadiness([0.01] * 5).steady


def test_a_short_unit_may_be_known_less_well_than_a_long_one() -> None:
    rng = np.random.default_rng(0)
    noisy_s = rng.uniform(5e-5, 1.5e-4, 60)

    assert not unit_steadiness(noisy_s).steady
    assert unit_steadiness(noisy_s, longest_s=0.1).steady
    assert not unit_steadiness(noisy_s, longest_s=1e-3).steady


def test_each_backend_has_its_own_longest_unit() -> None:
    rng = np.random.default_rng(0)
    noisy_s = rng.uniform(5e-5, 1.5e-4, 60)
    samples = {
        UnitKey(name="head:0", kind="head", backend="slow"): noisy_s,
        UnitKey(name="segment:0-8", kind="segment", backend="slow"): np.full(60, 0.1),
        UnitKey(name="head:0", kind="head", backend="fast"): noisy_s,
        UnitKey(name="segment:0-8", kind="segment", backend="fast"): np.full(60, 0.001),
    }

    found = {str(key): each.steady for key, each in steadiness(samples).items()}

    assert found == {
        "head:0 on slow, batch 1": True,
        "segment:0-8 on slow, batch 1": True,
        "head:0 on fast, batch 1": False,
        "segment:0-8 on fast, batch 1": True,
    }


def test_a_unit_that_costs_nothing_is_steady() -> None:
    assert unit_steadiness([0.0] * 30).steady


def test_asking_for_rounds_lifts_the_time_and_asking_for_both_keeps_both() -> None:
    assert THOROUGH.limited(rounds=7).time_cap_s == math.inf
    assert THOROUGH.limited(rounds=7).min_rounds == 7
    assert QUICK.limited(rounds=500, time_cap_s=2.0).time_cap_s == 2.0
    assert QUICK.limited() == QUICK


def test_the_rule_is_told_in_words() -> None:
    assert THOROUGH.in_words() == (
        "when every unit's median is known to ±2% or to ±0.2% of the longest unit's,"
        " without drift, else after 300 rounds or 30 s each"
    )
    assert "s each" not in THOROUGH.limited(rounds=7).in_words()


@pytest.mark.parametrize("rounds", [0, -1])
def test_no_rounds_at_all_are_refused(rounds: int) -> None:
    with pytest.raises(ConfigError, match="at least one round"):
        THOROUGH.limited(rounds=rounds)
