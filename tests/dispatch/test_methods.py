from __future__ import annotations

import numpy as np
import pytest

from edgewise.dispatch.problem import Problem
from edgewise.dispatch.search import best_static, decide
from edgewise.profiles.operators import OperatorShape


def made(
    op_s: list[list[float]], *, op_j: list[list[float]] | None = None, switch: float
) -> Problem:
    """Every switch costs the same, in seconds and in joules."""
    seconds = np.array(op_s, dtype=np.float64)
    joules = seconds if op_j is None else np.array(op_j, dtype=np.float64)
    count, backends = seconds.shape
    switches = np.tile(switch * (1 - np.eye(backends)), (count, 1, 1))
    switches[0] = 0
    return Problem(
        traces=(),
        backends=("torch:cpu", "onnxruntime:CPU", "openvino:CPU")[:backends],
        names=tuple(f"o{t}" for t in range(count)),
        shapes=(OperatorShape(kind="linear", m=1, k=1, n=1),) * count,
        op_s=seconds,
        op_j=joules,
        switch_s=switches,
        switch_j=switches,
        gap_s=np.zeros(count + 1),
        gap_j=np.zeros(count + 1),
        weight_bytes=np.ones(count),
    )


TRAP = made([[1, 3], [3, 2], [3, 2], [3, 2], [3, 2], [3, 2]], switch=1.5)


def chosen(problem: Problem, method: str) -> list[int]:
    found: list[int] = decide(problem, method=method).assignment.backend.tolist()
    return found


def test_local_takes_the_cheapest_and_pays_for_switches_afterwards() -> None:
    problem = made([[1, 2], [2, 1], [1, 2]], switch=10)

    assert chosen(problem, "local") == [0, 1, 0]
    assert decide(problem, method="local").totals.latency_s == 3 + 20
    assert decide(problem, method="static").totals.latency_s == 4  # dear switches: local loses


def test_greedy_never_pays_a_switch_that_only_later_operators_make_up_for() -> None:
    assert chosen(TRAP, "greedy") == [0] * 6
    assert chosen(TRAP, "viterbi") == [0] + [1] * 5
    assert decide(TRAP, method="viterbi").totals.latency_s == 1 + 1.5 + 10


def test_greedy_starts_with_the_cheapest_and_stays_on_ties() -> None:
    assert chosen(made([[2, 1], [1, 1], [1, 1]], switch=0), "greedy") == [1, 1, 1]


def test_the_optimum_never_switches_between_equals() -> None:
    assert len(set(chosen(made([[1, 1]] * 5, switch=0), "viterbi"))) == 1


def test_static_is_the_best_single_backend_for_the_objective() -> None:
    problem = made([[1, 2], [1, 2]], op_j=[[6, 1], [6, 1]], switch=1)

    assert best_static(problem, "latency").method == "static:torch:cpu"
    assert best_static(problem, "energy").method == "static:onnxruntime:CPU"
    assert best_static(problem, "edp").totals.edp == 8
    assert decide(problem, method="static:torch:cpu", objective="edp").totals.edp == 24


def test_local_and_greedy_take_an_operator_s_own_edp_and_miss_the_whole_one() -> None:
    # By itself each operator has the lower product on the second backend; together it is the first.
    problem = made([[1.0, 100.0], [10.0, 1.0]], op_j=[[10.0, 0.09], [1.0, 9.0]], switch=0)

    local = decide(problem, method="local", objective="edp")
    greedy = decide(problem, method="greedy", objective="edp")
    optimum = decide(problem, method="viterbi", objective="edp")

    assert local.assignment.backend.tolist() == greedy.assignment.backend.tolist() == [1, 1]
    assert local.totals.edp == pytest.approx(101 * 9.09)
    assert optimum.assignment.backend.tolist() == [0, 1]
    assert optimum.totals.edp == pytest.approx(2 * 19)


def test_a_backend_that_cannot_run_an_operator_is_avoided_whatever_its_energy() -> None:
    problem = made([[1, np.inf], [5, 1]], op_j=[[1, np.inf], [5, 1]], switch=0.5)

    for method in ("local", "greedy", "viterbi", "best"):
        for objective in ("latency", "energy", "edp"):
            found = decide(problem, method=method, objective=objective)
            assert found.assignment.backend.tolist() == [0, 1]
