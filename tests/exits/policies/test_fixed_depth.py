from __future__ import annotations

import pytest

from edgewise.exits import ANSWER, Policy, PolicyInputs, make_policy
from edgewise.predict import CostTable

COSTS = CostTable.from_costs([1.0] * 4, [0.5] * 4)
INPUTS = PolicyInputs(costs=COSTS, segments=frozenset({(0, 1), (0, 2), (0, 4), (2, 4)}))


def way(policy: Policy) -> list[int]:
    position, positions = 0, []
    while (action := policy.decide(position, 9.0, 0.0, 1.0)) > position:
        position = action
        positions.append(position)
    assert action == ANSWER
    return positions


def test_full_depth_runs_fused_whatever_the_time() -> None:
    policy = make_policy("full_depth", INPUTS)

    assert way(policy) == [4]
    assert policy.explain(3) == "full depth was asked for"


@pytest.mark.parametrize(("exit_index", "positions"), [(0, [1]), (1, [2]), (2, [2, 3]), (3, [4])])
def test_a_fixed_exit_is_reached_in_the_longest_runs(exit_index: int, positions: list[int]) -> None:
    policy = make_policy("fixed", INPUTS, exit_index=exit_index)

    assert way(policy) == positions
    assert policy.explain(exit_index) == f"exit {exit_index} was asked for"
