from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from edgewise.dispatch.memory import kept_bytes
from edgewise.dispatch.problem import HOME, Assignment, Problem
from edgewise.dispatch.search import Decision, decide
from edgewise.dispatch.synthetic import random_problem
from edgewise.errors import ConfigError, Infeasible


@pytest.fixture(scope="module")
def problem() -> Problem:
    """Twenty equal layers, whose labels must not multiply."""
    found = random_problem(
        np.random.default_rng(4), operators=180, distinct=9, switch_ratio=0.1, segments=6
    )
    away = np.array([1.3 if name == HOME else 1.0 for name in found.backends])
    return replace(found, op_s=found.op_s * away)


def test_home_keeps_nothing_and_others_keep_their_weights(problem: Problem) -> None:
    backend = np.zeros(problem.num_operators, dtype=np.int64)
    assert problem.backends[0] == HOME
    assert kept_bytes(problem, Assignment(backend=backend)) == 0

    backend[3], backend[7] = 1, 2

    kept = kept_bytes(problem, Assignment(backend=backend))
    assert kept == problem.weight_bytes[3] + problem.weight_bytes[7]


def test_a_segment_keeps_its_own_weights_in_place_of_its_operators(problem: Problem) -> None:
    segment = replace(problem.segments[0], weight_bytes=12345.0)
    one = replace(problem, segments=(segment,))
    backend = np.zeros(problem.num_operators, dtype=np.int64)
    backend[segment.start : segment.stop] = 1

    assert kept_bytes(one, Assignment(backend=backend, segments=(0,))) == 12345.0


def test_without_any_budget_all_stays_at_home(problem: Problem) -> None:
    none = decide(problem, memory_bytes=0)

    assert none.exact
    assert set(none.assignment.backend.tolist()) == {0}


def test_more_memory_never_makes_a_plan_slower(problem: Problem) -> None:
    free = decide(problem)
    kept = kept_bytes(problem, free.assignment)
    budgets = [0.1 * kept, 0.3 * kept, 0.6 * kept, kept]

    found = [decide(problem, memory_bytes=budget) for budget in budgets]

    times = [decision.totals.latency_s for decision in found]
    assert all(a >= b * (1 - 1e-9) for a, b in itertools.pairwise(times))
    assert times[-1] == pytest.approx(free.totals.latency_s, rel=1e-12)
    for decision, budget in zip(found, budgets, strict=True):
        assert kept_bytes(problem, decision.assignment) <= budget
        assert 0 <= decision.gap_ratio < 1e-3  # a label limit costs little where layers repeat
        assert decision.lower_bound <= decision.totals.latency_s


def test_what_home_cannot_run_must_fit(problem: Problem) -> None:
    op_s = problem.op_s.copy()
    op_s[[4, 5], 0] = np.inf
    stuck = replace(problem, op_s=op_s, segments=())
    needed = problem.weight_bytes[4] + problem.weight_bytes[5]

    assert kept_bytes(stuck, decide(stuck, memory_bytes=needed).assignment) == needed
    with pytest.raises(Infeasible, match="of weights outside torch:cpu") as refused:
        decide(stuck, memory_bytes=needed - 1)

    assert isinstance(refused.value.closest, Decision)
    assert kept_bytes(stuck, refused.value.closest.assignment) == needed
    assert f"allow {needed:.0f} bytes" in str(refused.value)


@pytest.mark.parametrize("budget", [-1.0, math.nan])
def test_a_budget_is_a_size(problem: Problem, budget: float) -> None:
    with pytest.raises(ConfigError, match="0 bytes or more"):
        decide(problem, memory_bytes=budget)
