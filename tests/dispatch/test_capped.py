from __future__ import annotations

import math

import numpy as np
import pytest

from edgewise.dispatch.capped import latency_limit
from edgewise.dispatch.labels import constrained
from edgewise.dispatch.paths import graph_of
from edgewise.dispatch.problem import Problem
from edgewise.dispatch.search import Decision, decide
from edgewise.dispatch.synthetic import random_problem
from edgewise.errors import ConfigError, Infeasible


@pytest.fixture(scope="module")
def problem() -> Problem:
    return random_problem(
        np.random.default_rng(8), operators=60, distinct=12, switch_ratio=0.2, segments=5
    )


@pytest.fixture(scope="module")
def ends(problem: Problem) -> tuple[Decision, Decision]:
    return decide(problem), decide(problem, objective="energy")


def test_more_time_never_costs_more_energy(
    problem: Problem, ends: tuple[Decision, Decision]
) -> None:
    fastest, thrifty = (decision.totals for decision in ends)
    caps = np.linspace(fastest.latency_s, thrifty.latency_s, 5)

    found = [decide(problem, objective="energy", cap_s=float(cap)) for cap in caps]

    energies = [decision.totals.of("energy") for decision in found]
    assert energies == sorted(energies, reverse=True)
    assert all(d.totals.latency_s <= cap * (1 + 2e-9) for d, cap in zip(found, caps, strict=True))
    assert energies[-1] == pytest.approx(thrifty.energy_j, rel=1e-12)
    assert energies[0] <= (fastest.energy_j or 0.0) * (1 + 1e-12)


def test_a_cap_that_does_not_bind_changes_nothing(
    problem: Problem, ends: tuple[Decision, Decision]
) -> None:
    loose = decide(problem, objective="energy", cap_s=1e3)

    assert loose.totals == ends[1].totals
    assert loose.exact


def test_too_short_a_cap_comes_with_the_fastest_plan(
    problem: Problem, ends: tuple[Decision, Decision]
) -> None:
    cap_s = 0.9 * ends[0].totals.latency_s

    with pytest.raises(Infeasible, match="no plan takes at most") as refused:
        decide(problem, objective="energy", cap_s=cap_s)

    assert isinstance(refused.value.closest, Decision)
    assert refused.value.closest.totals == ends[0].totals
    assert f"{ends[0].totals.latency_s:.6g} s or more" in str(refused.value)


@pytest.mark.parametrize("cap_s", [0.0, -1.0, math.nan, math.inf])
def test_a_cap_is_a_time_above_zero(problem: Problem, cap_s: float) -> None:
    with pytest.raises(ConfigError, match="finite time above zero"):
        decide(problem, cap_s=cap_s)


def test_few_labels_give_a_plan_within_the_cap_and_a_bound_that_holds(
    problem: Problem, ends: tuple[Decision, Decision]
) -> None:
    fastest, thrifty = (decision.totals.latency_s for decision in ends)
    cap_s = 0.6 * fastest + 0.4 * thrifty
    graph = graph_of(problem, energy=True)
    assert graph.energy is not None
    limit = latency_limit(problem, graph, cap_s)
    optimum = constrained(graph, graph.energy, limit)
    assert optimum.exact

    for labels in (1, 2, 5, 40):
        found = constrained(graph, graph.energy, limit, max_labels=labels)

        assert found.lower_bound <= optimum.value * (1 + 1e-9) <= found.value * (1 + 2e-9)
        assert graph.total(graph.latency, found.assignment) <= limit.allowed * (1 + 1e-12)
        assert found.exact == (found.lower_bound >= found.value)
    assert not constrained(graph, graph.energy, limit, max_labels=1).exact
