from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from edgewise.dispatch.edp import least_product
from edgewise.dispatch.paths import Edges, Graph, Solution, graph_of, shortest
from edgewise.dispatch.problem import Problem
from edgewise.dispatch.search import decide
from edgewise.dispatch.synthetic import random_problem
from edgewise.errors import ProfileError


@pytest.fixture(scope="module")
def problem() -> Problem:
    return random_problem(np.random.default_rng(2), operators=120, distinct=11, switch_ratio=0.1)


def by_viterbi(graph: Graph, cost: Edges, *, looseness: float = 0.0) -> Solution:
    path = shortest(graph, cost)
    value = graph.total(cost, path)
    return Solution(assignment=path, value=value, lower_bound=value * (1 - looseness), solves=1)


def least(problem: Problem, *, max_solves: int = 40, looseness: float = 0.0) -> Solution:
    graph = graph_of(problem, energy=True)
    assert graph.energy is not None
    solve = partial(by_viterbi, graph, looseness=looseness)
    return least_product(graph, graph.energy, solve, max_solves=max_solves)


def test_few_solves_are_enough(problem: Problem) -> None:
    found = decide(problem, objective="edp")

    assert found.exact
    assert 3 <= found.solves <= 15


def test_the_least_product_is_below_that_of_every_weighted_sum(problem: Problem) -> None:
    graph = graph_of(problem, energy=True)
    assert graph.energy is not None
    found = least(problem)
    assert found.exact

    for weight in np.geomspace(1e-2, 1e4, 100):
        path = shortest(graph, graph.latency.times(weight).plus(graph.energy))
        product = graph.total(graph.latency, path) * graph.total(graph.energy, path)
        assert found.value <= product * (1 + 1e-12)


def test_a_cap_on_solves_gives_a_bound_that_holds(problem: Problem) -> None:
    optimum = least(problem).value
    bounds = []
    for solves in (2, 3, 4):
        early = least(problem, max_solves=solves)

        assert early.solves == solves
        assert early.lower_bound <= optimum <= early.value
        bounds.append(early.lower_bound)

    assert not least(problem, max_solves=2).exact
    assert bounds == sorted(bounds)


def test_solutions_with_loose_bounds_end_with_a_loose_bound(problem: Problem) -> None:
    optimum = least(problem).value

    found = least(problem, looseness=0.01)

    assert not found.exact
    assert 0.97 * optimum <= found.lower_bound <= optimum <= found.value


def test_a_plan_of_negative_energy_is_refused(problem: Problem) -> None:
    assert problem.gap_j is not None
    graph = graph_of(problem, energy=True)
    assert graph.energy is not None
    less = graph.energy.plus(graph.energy.times(-2.0))

    with pytest.raises(ProfileError, match="EDP needs costs above zero"):
        least_product(graph, less, partial(by_viterbi, graph))
