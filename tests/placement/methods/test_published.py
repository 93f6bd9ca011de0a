from __future__ import annotations

import numpy as np
import pytest

from edgewise.device.accelerator import load_accelerator
from edgewise.errors import Infeasible
from edgewise.placement.cores import proportional
from edgewise.placement.plan import Placement
from edgewise.placement.problem import Problem
from edgewise.placement.response import evaluate
from edgewise.placement.search import plan, search
from edgewise.placement.study import random_mixes

CORAL = load_accelerator("coral-usb")


def algorithm_1(problem: Problem, *, price: bool) -> tuple[int, ...]:
    """The printed listing, one candidate at a time."""

    def latency(places: list[int]) -> float:
        offered = [problem.rates[i] * problem.cpu_s[i, p, 1] for i, p in enumerate(places)]
        cores = proportional(np.array([offered]), problem.cores)
        found = evaluate(problem, np.array([places]), cores)
        return float(found.score[0]) if found.stable[0] or price else np.inf

    places = [0] * len(problem.rates)
    best = latency(places)
    while True:
        move = None
        for m in range(len(places)):
            for h in (1, 2):
                if places[m] + h > problem.last[m]:
                    continue
                other = [*places[:m], places[m] + h, *places[m + 1 :]]
                found = latency(other)
                if found < best:
                    best, move = found, other
        if move is None:
            return tuple(places)
        places = move


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("method", ["published", "greedy"])
def test_array_steps_take_the_path_of_the_printed_listing(number: int, method: str) -> None:
    problem = random_mixes(6, CORAL, seed=4)[number]

    assert search(problem, method).places == algorithm_1(problem, price=method == "greedy")


def test_infinity_stops_it_at_its_first_step() -> None:
    problem = random_mixes(9, CORAL, seed=1, tenants=(3,))[8]

    with pytest.raises(Infeasible, match="stopped at its first step") as caught:
        plan(problem, "published")

    assert isinstance(caught.value.closest, Placement)
    assert caught.value.closest.places == (0, 0, 0)
    assert caught.value.help == "method 'best' has a plan"
    assert plan(problem, "greedy").stable


def test_it_is_not_defined_for_more_suffixes_than_cores() -> None:
    problem = random_mixes(3, CORAL, seed=1, cores=2)[2]

    assert "4 suffixes need a core each and 2 are there" in search(problem, "published").notes[0]
