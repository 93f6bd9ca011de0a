from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgewise.dispatch.forward import paper_traces
from edgewise.dispatch.problem import OBJECTIVES, Objective, Problem, totals
from edgewise.dispatch.search import best_static, decide, method_names
from edgewise.dispatch.synthetic import random_problem
from edgewise.errors import ConfigError, Infeasible, ProfileError
from edgewise.model.transformer import architecture_names, load_architecture

METHODS = ("static", "local", "greedy", "viterbi", "best")


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    rng = np.random.default_rng(5)
    return [
        random_problem(
            rng, operators=60, distinct=9, switch_ratio=ratio, segments=8, missing_ratio=missing
        )
        for ratio in (0.0, 0.1, 1.0, 5.0)
        for missing in (0.0, 0.1)
    ]


def test_methods_are_found_by_the_names_of_their_files() -> None:
    assert set(method_names()) >= set(METHODS)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_no_simple_method_beats_the_optimum(problems: list[Problem], objective: Objective) -> None:
    # Local may lose to static and greedy to local where switches are dear: only these always hold.
    for problem in problems:
        optimum = decide(problem, objective=objective, method="viterbi").totals.of(objective)
        with_segments = decide(problem, objective=objective).totals.of(objective)

        assert with_segments <= optimum * (1 + 1e-12)
        for method in ("local", "greedy"):
            other = decide(problem, objective=objective, method=method)
            assert optimum <= other.totals.of(objective) * (1 + 1e-12)
        if np.isfinite(problem.op_s).all(axis=0).any():
            static = best_static(problem, objective).totals.of(objective)
            assert optimum <= static * (1 + 1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_a_decision_says_what_its_assignment_costs(problems: list[Problem], method: str) -> None:
    for objective in OBJECTIVES:
        decision = decide(problems[2], objective=objective, method=method)

        counted = totals(problems[2], decision.assignment)
        assert decision.totals == counted
        assert decision.lower_bound <= counted.of(objective)
        assert decision.exact == (method in {"viterbi", "best"})
        assert decision.objective == objective
        assert decision.gap_ratio == (0.0 if decision.exact else 1.0)
        assert decision.method.partition(":")[0] == method


@pytest.mark.parametrize("method", METHODS[1:])
def test_what_a_backend_cannot_run_is_never_given_to_it(
    problems: list[Problem], method: str
) -> None:
    for problem in problems[1::2]:
        for objective in OBJECTIVES:
            decision = decide(problem, objective=objective, method=method)

            assert np.isfinite(decision.totals.of(objective))


def test_with_one_backend_every_method_chooses_it() -> None:
    problem = random_problem(np.random.default_rng(1), operators=12, backends=1)
    for method in METHODS:
        decision = decide(problem, method=method)

        assert decision.assignment.backend.tolist() == [0] * 12
        assert decision.totals.backend_switches == 0


def test_one_operator_is_enough() -> None:
    problem = random_problem(np.random.default_rng(1), operators=1)
    for method in METHODS:
        assert decide(problem, method=method).assignment.backend.tolist() == [problem.op_s.argmin()]


@pytest.mark.parametrize("objective", ["energy", "edp"])
@pytest.mark.parametrize("method", METHODS)
def test_without_energy_only_latency_can_be_made_small(
    problems: list[Problem], method: str, objective: Objective
) -> None:
    unmetered = replace(problems[0], op_j=None)

    with pytest.raises(ProfileError, match="needs energy, which was not measured"):
        decide(unmetered, objective=objective, method=method)
    assert decide(unmetered, method=method).totals.energy_j is None


def test_a_segment_without_energy_is_left_out_where_energy_counts(problems: list[Problem]) -> None:
    problem = problems[0]
    unmetered = replace(problem, segments=tuple(replace(s, cost_j=None) for s in problem.segments))

    assert decide(problem, objective="energy").assignment.segments
    assert not decide(unmetered, objective="energy").assignment.segments
    assert decide(unmetered).assignment.segments


@pytest.mark.parametrize(
    ("method", "message"),
    [
        pytest.param("viterbo", "did you mean 'viterbi'", id="misspelt"),
        pytest.param("static:onnxruntime:cpu", "did you mean 'onnxruntime:CPU'", id="backend"),
        pytest.param("greedy:torch:cpu", "dispatch method 'greedy' has no 'backend'", id="no need"),
        pytest.param("", "known names", id="empty"),
    ],
)
def test_unknown_names_come_with_the_nearest(
    problems: list[Problem], method: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        decide(problems[0], method=method)


def test_a_limit_needs_a_method_that_keeps_it(problems: list[Problem]) -> None:
    with pytest.raises(ConfigError, match="'greedy' has no 'cap_s'"):
        decide(problems[0], method="greedy", cap_s=1.0)
    with pytest.raises(ConfigError, match="'static' has no 'memory_bytes'"):
        decide(problems[0], method="static", memory_bytes=1e9)
    with pytest.raises(ConfigError, match="found both"):
        decide(problems[0], cap_s=1.0, memory_bytes=1e9)


def test_a_static_backend_that_cannot_run_all_is_refused_with_the_closest() -> None:
    problem = random_problem(np.random.default_rng(3), operators=9, missing_ratio=0.9)

    with pytest.raises(Infeasible, match=r"'openvino:CPU' cannot run \d of 9 operators") as refused:
        decide(problem, method="static:openvino:CPU")

    closest = refused.value.closest
    assert np.isfinite(closest.totals.latency_s)  # type: ignore[attr-defined]
    with pytest.raises(Infeasible, match="cannot run"):
        best_static(problem, "latency")


def test_all_traces_of_the_paper_are_planned_exactly() -> None:
    rng = np.random.default_rng(0)
    operators = 0
    for name in architecture_names():
        count = sum(len(t.operators) for t in paper_traces(load_architecture(name), rule="paper"))
        problem = random_problem(rng, operators=count, distinct=40, switch_ratio=0.1)
        operators += count
        assert decide(problem, method="viterbi").exact
    assert operators == 9584
