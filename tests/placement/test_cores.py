from __future__ import annotations

import itertools

import numpy as np
import pytest

from edgewise.placement.cores import best_split, proportional


def by_hand(offered: list[float], cores: int) -> list[int]:
    """The rule as it is told: one each, then the largest load per core."""
    order = sorted(range(len(offered)), key=lambda i: -offered[i])
    held = [0] * len(offered)
    for i in [i for i in order if offered[i] > 0][:cores]:
        held[i] = 1
    for _ in range(cores - sum(held)):
        users = [i for i in range(len(offered)) if held[i]]
        if not users:
            break
        held[max(users, key=lambda i: offered[i] / held[i])] += 1
    return held


@pytest.mark.parametrize(("tenants", "cores"), [(1, 1), (1, 4), (3, 2), (3, 4), (5, 4), (4, 8)])
def test_cores_are_shared_as_the_rule_is_told(tenants: int, cores: int) -> None:
    generator = np.random.default_rng(tenants * 10 + cores)
    offered = generator.uniform(0.01, 3, (200, tenants)) * (generator.random((200, tenants)) < 0.7)

    found = proportional(offered, cores)

    assert found.tolist() == [by_hand(row, cores) for row in offered.tolist()]


def test_more_suffixes_than_cores_leave_the_lightest_without() -> None:
    assert proportional(np.array([[1.0, 3.0, 2.0]]), 2).tolist() == [[0, 1, 1]]


def test_the_best_split_is_the_best_of_all_splits() -> None:
    generator = np.random.default_rng(3)
    cost = generator.uniform(0, 1, (50, 3, 5))
    splits = [k for k in itertools.product(range(5), repeat=3) if sum(k) <= 4]

    cores, least = best_split(cost)

    for row in range(50):
        sums = {k: sum(cost[row, i, k[i]] for i in range(3)) for k in splits}
        assert least[row] == pytest.approx(min(sums.values()), rel=1e-12)
        assert sums[tuple(cores[row].tolist())] == pytest.approx(least[row], rel=1e-12)


def test_cores_of_no_use_are_given_to_nobody() -> None:
    cost = np.array([[[5.0, 1.0, 1.0], [0.0, 0.0, 0.0]]])

    assert best_split(cost)[0].tolist() == [[1, 0]]
