from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgewise.exits import PolicyInputs, make_policy
from edgewise.exits.policies.oracle import Oracle
from edgewise.predict import CostTable


def oracle(num: int, accuracy: Sequence[float] | None = None) -> Oracle:
    costs = CostTable.from_costs([1.0] * num, [1.0] * num)
    inputs = PolicyInputs(costs=costs, accuracy=None if accuracy is None else tuple(accuracy))
    policy = make_policy("oracle", inputs)
    assert isinstance(policy, Oracle)
    return policy


@settings(deadline=None)  # the machine may be busy
@given(
    exits=st.lists(st.tuples(st.floats(0.1, 9), st.integers(0, 4)), min_size=1, max_size=6),
    budget_s=st.floats(0.1, 9),
)
def test_no_exit_in_time_is_more_accurate_than_the_chosen_one(
    exits: list[tuple[float, int]], budget_s: float
) -> None:
    latency_s = [s for s, _ in exits]
    accuracy = [a / 4 for _, a in exits]

    k = oracle(len(exits), accuracy).choose(latency_s, budget_s)

    in_time = [a for a, s in zip(accuracy, latency_s, strict=True) if s <= budget_s]
    if in_time:
        assert latency_s[k] <= budget_s
        assert accuracy[k] == max(in_time)
    else:
        assert latency_s[k] == min(latency_s)


@pytest.mark.parametrize(("budget_s", "exit_index"), [(3.0, 2), (2.0, 1), (0.5, 0)])
def test_without_validation_it_takes_the_deepest_exit_in_time(
    budget_s: float, exit_index: int
) -> None:
    assert oracle(3).choose([1.0, 2.0, 3.0], budget_s) == exit_index


def test_it_says_that_it_looks_back() -> None:
    policy = oracle(2)

    assert policy.hindsight
    assert policy.explain(1) == "best in hindsight"
