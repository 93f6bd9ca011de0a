from __future__ import annotations

import numpy as np
import pytest

from edgewise.device.accelerator import load_accelerator
from edgewise.placement.memory import best_shares, filled_in_order, hot_first, wanted_bytes
from edgewise.placement.problem import Problem
from edgewise.placement.response import evaluate
from edgewise.placement.study import random_mixes

CORAL = load_accelerator("coral-usb")


@pytest.fixture(scope="module")
def tight() -> Problem:
    """Two tenants whose models do not fit together."""
    problem = random_mixes(4, CORAL, seed=8, tenants=(2,))[3].with_residency("pinned")
    assert problem.prefix_bytes[:, -1].sum() > CORAL.sram_bytes
    return problem


def test_memory_is_given_in_order_until_it_is_used_up() -> None:
    wanted = np.array([[4.0, 5.0, 6.0]])

    assert filled_in_order(wanted, np.array([1, 0, 2]), 8.0).tolist() == [[3.0, 5.0, 0.0]]


def test_who_is_asked_most_often_gets_memory_first(tight: Problem) -> None:
    hot = tight.with_rates([1.0, 3.0])

    [share] = hot_first(hot, hot.last[None])

    assert share[1] == wanted_bytes(hot, hot.last[None])[0, 1]
    assert share.sum() == pytest.approx(CORAL.sram_bytes)


def test_who_is_on_the_cpu_gets_none(tight: Problem) -> None:
    assert hot_first(tight, np.array([[0, int(tight.last[1])]]))[0, 0] == 0


def test_improved_shares_are_near_the_best_of_a_fine_grid(tight: Problem) -> None:
    places = tight.last[None]
    [wanted] = wanted_bytes(tight, places)
    first = np.linspace(
        max(CORAL.sram_bytes - wanted[1], 0), min(wanted[0], CORAL.sram_bytes), 2001
    )
    grid = np.stack([first, CORAL.sram_bytes - first], axis=1)
    every = evaluate(
        tight, np.repeat(places, 2001, axis=0), np.zeros((2001, 2), dtype=int), shares_bytes=grid
    )

    share, looked = best_shares(tight, places[0], np.zeros(2, dtype=int))
    found = evaluate(tight, places, 0 * places, shares_bytes=share[None])

    assert looked > 0
    assert share.sum() <= CORAL.sram_bytes * (1 + 1e-12)
    assert found.score[0] <= every.score.min() * (1 + 1e-4)


def test_shares_that_all_fit_are_left_alone(tight: Problem) -> None:
    share, looked = best_shares(tight, [1, 1], [2, 2])

    assert looked == 0
    assert share.tolist() == wanted_bytes(tight, np.array([[1, 1]]))[0].tolist()
