from __future__ import annotations

import numpy as np
import pytest

from edgewise.device.accelerator import load_accelerator
from edgewise.placement.search import search
from edgewise.placement.study import UTILISATIONS, random_mixes, search_gaps

CORAL = load_accelerator("coral-usb")


def test_gaps_are_those_of_the_scores() -> None:
    problems = random_mixes(6, CORAL, seed=1)

    [row] = search_gaps(problems, ("greedy",))

    gaps = [search(p, "greedy").rank / search(p, "exact").rank - 1 for p in problems]
    assert row.problems == 6
    assert row.stuck == 0
    assert row.mean_gap_ratio == pytest.approx(np.mean(gaps), abs=1e-9)
    assert row.max_gap_ratio == pytest.approx(max(gaps), abs=1e-9)
    assert row.above_1_percent_ratio == np.mean(np.array(gaps) > 0.01)


def test_problems_without_any_plan_are_left_out_and_the_stuck_are_counted() -> None:
    problem = random_mixes(9, CORAL, seed=1, tenants=(3,))[8]
    hopeless = problem.with_rates(problem.rates * 100)

    [row] = search_gaps([problem, hopeless], ("published",))

    assert (row.problems, row.stuck) == (1, 1)
    assert row.mean_gap_ratio is None


def test_mixes_load_the_accelerator_evenly_and_come_again() -> None:
    first, again = (random_mixes(9, CORAL, seed=4) for _ in range(2))

    for number, problem in enumerate(first):
        tenants = len(problem.tenants)
        each = problem.rates * problem.service_s[np.arange(tenants), problem.last]
        assert tenants == 2 + number % 3
        assert each == pytest.approx(np.full(tenants, UTILISATIONS[number // 3] / tenants))
        assert np.array_equal(problem.rates, again[number].rates)


def test_given_models_are_drawn_without_replacement_while_there_are_enough() -> None:
    profiles = [p.tenants[0].profile for p in random_mixes(5, CORAL, seed=0)]

    for problem in random_mixes(6, CORAL, seed=0, profiles=profiles):
        picked = [id(t.profile) for t in problem.tenants]
        assert len(set(picked)) == len(picked)
        assert set(picked) <= {id(p) for p in profiles}
