from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from edgewise.predict import CostTable
from edgewise.predict.state_costs import STATIC, StateCosts, UnitCosts
from edgewise.runtime.generation import LanguageCosts
from edgewise.runtime.generation.costs import in_state, state_ratio

FILLED = CostTable.from_costs([1.0, 2.0, 3.0], [0.6, 0.8, 0.5])
BARE = CostTable.from_costs([1.0, 2.0, 3.0], [0.3, 0.4, 0.6])
COSTS = LanguageCosts(propagate=FILLED, mask=BARE)


def test_heads_that_fill_nothing_cost_the_same_share_in_every_state() -> None:
    told = StateCosts(
        at_s=1.0,
        stage_s=3 * FILLED.stage_s,
        head_s=3 * FILLED.head_s,
        stage_j=FILLED.stage_s,
        head_j=FILLED.head_s,
        volatile=True,
    )
    bare = COSTS.under("mask", told)

    assert COSTS.under("propagate", told) is COSTS.under("defer", told) is told
    assert bare.stage_s.tolist() == told.stage_s.tolist()
    # The last fills nothing either way: noise makes it no dearer.
    assert bare.head_s == pytest.approx([0.9, 1.2, 1.5])
    assert bare.head_j == pytest.approx([0.3, 0.4, 0.5])
    assert (bare.at_s, bare.volatile) == (1.0, True)
    assert COSTS.under("verify", dataclasses.replace(told, head_j=None)).head_j is None


def test_a_table_in_a_state_has_the_predictions_and_keeps_what_is_not_predicted() -> None:
    units = UnitCosts(seconds={"segment:0-1": 5.0, "head:2": 2.0})
    now = in_state(FILLED, units)

    assert now.stage_s.tolist() == [5.0, 2.0, 3.0]
    assert now.head_s.tolist() == [0.6, 0.8, 2.0]
    assert now.full_depth_s() == pytest.approx(12.0)
    assert state_ratio(FILLED, units) == pytest.approx(12.0 / 6.5)
    assert FILLED.stage_s.tolist() == [1.0, 2.0, 3.0]


def test_without_predictions_a_table_is_as_measured() -> None:
    assert in_state(FILLED, STATIC) is FILLED
    assert state_ratio(FILLED, STATIC) == 1.0
    assert state_ratio(CostTable.from_costs([0.0], [0.0]), STATIC) == 1.0
    assert np.isfinite(state_ratio(FILLED, UnitCosts()))
