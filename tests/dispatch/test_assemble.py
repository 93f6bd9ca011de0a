from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from edgewise.dispatch.assemble import make_plan, static_costs
from edgewise.dispatch.forward import trace_forward
from edgewise.dispatch.plan import DispatchPlan
from edgewise.dispatch.problem import HOME, Assignment, Problem, build_problem, totals
from edgewise.dispatch.residency import evaluate_residency, solve_residency
from edgewise.dispatch.search import decide
from edgewise.dispatch.synthetic_table import random_table
from edgewise.dispatch.trace import Trace
from edgewise.errors import ConfigError
from edgewise.model.transformer import Architecture, architecture_of
from edgewise.profiles.operators import OperatorTable, table_of

ORT, OV = "onnxruntime:CPU", "openvino:CPU"


def small(layers: int = 3) -> Architecture:
    return architecture_of(
        {
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "vocab_size": 64,
        },
        name="small",
        where="test",
    )


TRACE = trace_forward(small(), length=16)


def table_for(trace: Trace = TRACE, seed: int = 0, **options: Any) -> OperatorTable:
    return random_table([trace], np.random.default_rng(seed), **options)


def everywhere(problem: Problem, backend: int) -> Assignment:
    return Assignment(backend=np.full(problem.num_operators, backend, dtype=np.int64))


def plan_of(
    table: OperatorTable, *, segments: bool = False, method: str = "best", **options: Any
) -> tuple[Problem, DispatchPlan]:
    problem = build_problem([TRACE], table, segments=segments)
    choice = decide(problem, method=method, objective=options.get("objective", "latency"))
    defaults = {"objective": "latency", "model": "small", "method": method}
    return problem, make_plan([(problem, choice)], table, **(defaults | options))


@pytest.mark.parametrize("segments", [False, True], ids=["operators", "segments"])
@pytest.mark.parametrize("seed", range(4))
def test_steps_and_switches_and_what_stays_on_torch_make_the_total(
    seed: int, *, segments: bool
) -> None:
    problem, plan = plan_of(table_for(seed=seed, switch_s=2e-6), segments=segments)
    phase = plan.phases[0]

    steps = sum(step.predicted_s + step.switch_s for step in phase.steps)

    assert phase.predicted_s == pytest.approx(steps + phase.fixed_s)
    assert phase.switch_s == pytest.approx(sum(step.switch_s for step in phase.steps))
    assert [name for step in phase.steps for name in step.covers] == list(problem.names)


def test_a_plan_is_held_against_every_backend_alone() -> None:
    table = table_for()
    problem, plan = plan_of(table)
    phase = plan.phases[0]

    by_hand = {
        name: totals(problem, everywhere(problem, b)).latency_s
        for b, name in enumerate(problem.backends)
    }

    assert dict(phase.static_s) == by_hand
    assert phase.best_static == min(by_hand, key=lambda name: by_hand[name])
    assert phase.best_static_s == min(by_hand.values())
    assert phase.predicted_s <= phase.best_static_s


def test_a_backend_that_cannot_run_everything_is_no_static_plan() -> None:
    full = table_for()
    kept = [c for c in full.costs.values() if not (c.backend == OV and c.shape.k == 96)]
    table = table_of(
        kept,
        full.switches.values(),
        name="t",
        device_id="d",
        device={},
        thread_policy=full.thread_policy,
        provenance="simulated",
    )

    assert set(static_costs(build_problem([TRACE], table), table)) == {HOME, ORT}


def test_margins_are_against_the_next_best_backend_alone() -> None:
    table = table_for()
    problem, plan = plan_of(table, method="local")

    for t, step in enumerate(plan.phases[0].steps):
        order = np.argsort(problem.op_s[t])
        assert step.backend == problem.backends[order[0]]
        assert step.best_other == problem.backends[order[1]]
        assert step.margin_s == pytest.approx(np.diff(problem.op_s[t][order[:2]])[0])
        assert step.reason in {"cheapest", "tie"}


def test_what_pays_off_by_saving_switches_says_so() -> None:
    _, plan = plan_of(table_for(switch_s=1e-3))

    dearer = [s for s in plan.phases[0].steps if s.margin_s is not None and s.margin_s < 0]

    assert dearer
    assert {step.reason for step in dearer} == {"saves a switch"}


@pytest.mark.parametrize("because", ["guard", "constraint", "method"])
def test_what_would_be_better_elsewhere_has_the_reason_that_is_given(because: Any) -> None:
    table = table_for(switch_s=0.0)
    problem = build_problem([TRACE], table)

    plan = make_plan(
        [(problem, everywhere(problem, 1))],
        table,
        model="small",
        objective="latency",
        method="static",
        because=[because],
    )

    found = {step.reason for step in plan.phases[0].steps if (step.margin_s or 0) < 0}
    assert because in found
    assert found <= {because, "tie", "saves a switch"}


def test_intervals_that_overlap_are_ties() -> None:
    assert not any(s.tie for s in plan_of(table_for(error_ratio=1e-6))[1].phases[0].steps)
    assert all(s.tie for s in plan_of(table_for(error_ratio=0.9))[1].phases[0].steps)


def test_the_only_backend_needs_no_reason() -> None:
    _, plan = plan_of(table_for(backends=(HOME,)))

    assert {s.reason for s in plan.phases[0].steps} == {"only one"}
    assert {s.best_other for s in plan.phases[0].steps} == {None}


def test_a_segment_says_what_its_operators_cost_one_by_one() -> None:
    table = table_for(seed=2)
    problem, plan = plan_of(table, segments=True)
    pieces = [s for s in plan.phases[0].steps if len(s.covers) > 1]
    assert pieces

    for piece in pieces:
        start = problem.names.index(piece.covers[0])
        stop = start + len(piece.covers)
        singly = problem.op_s[start:stop].sum(axis=0) + problem.gap_s[start + 1 : stop].sum()
        assert piece.one_by_one_s == pytest.approx(singly.min())


def test_energy_is_explained_in_joules() -> None:
    problem, plan = plan_of(table_for(spread=1.0), method="local", objective="energy")

    assert problem.op_j is not None
    for t, step in enumerate(plan.phases[0].steps):
        order = np.argsort(problem.op_j[t])
        assert step.best_other == problem.backends[order[1]]
        assert step.margin_j is not None
        assert step.margin_j >= 0
    assert any((s.margin_s or 0) < 0 for s in plan.phases[0].steps)  # energy is not time
    scores = plan.phases[0].static_j
    assert plan.phases[0].best_static == min(scores, key=scores.__getitem__)


def test_an_optimum_of_edp_leaves_nothing_that_would_be_better_elsewhere() -> None:
    _, plan = plan_of(table_for(spread=1.0), objective="edp")

    assert "method" not in {s.reason for s in plan.phases[0].steps}


def test_copies_are_counted_by_tensor_where_the_decision_does() -> None:
    table = table_for(switch_s=2e-7, spread=0.6)
    problem = build_problem([TRACE], table)
    found = solve_residency(TRACE, table)

    plan = make_plan(
        [(problem, found)], table, model="small", objective="latency", method="residency"
    )

    phase = plan.phases[0]
    assert found.copies
    assert phase.predicted_s == found.cost
    assert phase.switches == len(found.copies)
    assert phase.static_s[ORT] == (
        evaluate_residency(TRACE, table, [ORT] * problem.num_operators).latency_s
    )
    assert phase.fixed_s == pytest.approx(found.fixed_s)


def test_no_single_backend_is_infinitely_far() -> None:
    full = table_for(backends=(HOME, ORT))
    kept = [
        c
        for c in full.costs.values()
        if c.shape.is_fixed or (c.backend == HOME) == (c.shape.kind == "linear")
    ]
    table = table_of(
        kept,
        full.switches.values(),
        name="t",
        device_id="d",
        device={},
        thread_policy=full.thread_policy,
        provenance="simulated",
    )

    phase = plan_of(table)[1].phases[0]

    assert (phase.best_static, phase.best_static_s) == ("", math.inf)


def test_a_phase_is_one_forward_pass_and_all_are_over_the_same_backends() -> None:
    table = table_for()
    options: dict[str, Any] = {"model": "m", "objective": "latency", "method": "m"}
    two = build_problem([TRACE, TRACE], table)
    one = build_problem([TRACE], table)
    less = build_problem([TRACE], table, backends=[HOME])

    with pytest.raises(ConfigError, match="one forward pass, found 2"):
        make_plan([(two, everywhere(two, 0))], table, **options)
    with pytest.raises(ConfigError, match="the same backends"):
        make_plan([(one, everywhere(one, 0)), (less, everywhere(less, 0))], table, **options)
    with pytest.raises(ConfigError, match="at least one problem"):
        make_plan([], table, **options)
