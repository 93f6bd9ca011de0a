from __future__ import annotations

import numpy as np
import pytest

from edgewise.device.accelerator import load_accelerator
from edgewise.errors import ConfigError
from edgewise.placement.methods.multi_start import start_places
from edgewise.placement.problem import Problem
from edgewise.placement.search import search
from edgewise.placement.study import random_mixes, search_gaps

CORAL = load_accelerator("coral-usb")


@pytest.mark.parametrize("mixes", [18, pytest.param(60, marks=pytest.mark.slow)])
def test_it_is_nearly_always_the_optimum_and_the_printed_algorithm_is_not(mixes: int) -> None:
    methods = ("published", "greedy", "multi-start")
    rows = {row.method: row for row in search_gaps(random_mixes(mixes, CORAL, seed=0), methods)}

    best, greedy, published = rows["multi-start"], rows["greedy"], rows["published"]
    assert best.problems == mixes
    assert best.stuck == greedy.stuck == 0
    assert best.mean_gap_ratio is not None
    assert greedy.mean_gap_ratio is not None
    assert greedy.above_1_percent_ratio is not None
    assert best.mean_gap_ratio <= 0.007
    # What the reference calls the failures of the printed algorithm.
    assert greedy.mean_gap_ratio > 0.02
    assert greedy.above_1_percent_ratio > 0.2
    assert published.stuck > mixes / 6


def test_it_starts_from_every_end() -> None:
    problem = random_mixes(3, CORAL, seed=0)[2]

    starts = start_places(problem)

    assert [0, 0, 0, 0] in starts.tolist()
    assert problem.last.tolist() in starts.tolist()
    assert [0, 0, 10, 0] in starts.tolist()
    assert len(np.unique(starts, axis=0)) == len(starts)


def test_without_an_accelerator_there_is_one_start() -> None:
    problem = random_mixes(3, CORAL, seed=0)[2]

    assert start_places(Problem.of(problem.tenants, None, cores=4)).tolist() == [[0, 0, 0, 0]]


def test_a_reach_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="reach of at least 1"):
        search(random_mixes(1, CORAL, seed=0)[0], "multi-start", reach=0)
