from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edgewise.dispatch.problem import (
    Assignment,
    Objective,
    Problem,
    Totals,
    build_problem,
    need_energy,
    totals,
)
from edgewise.dispatch.trace import Candidate, Node, Tensor, Trace
from edgewise.errors import ConfigError, ProfileError
from edgewise.profiles.operators import (
    Correctness,
    Energy,
    Kind,
    LatencySummary,
    OperatorCost,
    OperatorShape,
    OperatorTable,
    SwitchCost,
    table_of,
)
from edgewise.profiles.records import ThreadPolicy

THREADS = ThreadPolicy(threads=1)
TORCH, ORT = "torch:cpu", "onnxruntime:CPU"


def shape(kind: Kind, m: int = 2, k: int = 8, n: int = 8) -> OperatorShape:
    return OperatorShape(kind=kind, m=m, k=k, n=n)


NORM, WIDE, ADD, MLP = shape("rmsnorm"), shape("linear", n=16), shape("add"), shape("mlp", n=16)
NARROW, TIMES = shape("linear", k=16), shape("multiply", k=16, n=16)

# norm, wide, (multiply), narrow, (add): one segment covers all from wide to add
COSTS: dict[OperatorShape, tuple[float | None, float | None]] = {
    NORM: (1.0, 3.0),
    WIDE: (8.0, 5.0),
    TIMES: (0.5, None),
    NARROW: (6.0, 7.0),
    ADD: (0.25, None),
    MLP: (None, 9.0),
}


def trace() -> Trace:
    shapes = (NORM, WIDE, TIMES, NARROW, ADD)
    nodes = tuple(
        Node(name=f"node{i}", shape=s, inputs=(i,), output=i + 1) for i, s in enumerate(shapes)
    )
    tensors = tuple(Tensor(name=f"t{i}", size_bytes=1) for i in range(len(shapes) + 1))
    mlp = Candidate(kind="mlp", start=1, stop=5, parts=(MLP,), name="mlp")
    return Trace(
        model="m",
        phase="prefill",
        length=2,
        past=0,
        nodes=nodes,
        tensors=tensors,
        candidates=(mlp,),
    )


def cost(shape: OperatorShape, backend: str, seconds: float | None, **fields: Any) -> OperatorCost:
    latency = None
    if seconds is not None:
        names = ("mean", "median", "min", "max", "p90", "p95", "p99", "median_low", "median_high")
        same = {f"{name}_s": seconds for name in names}
        latency = LatencySummary(**same, std_s=0.0, calls=1, samples=1)
    given = {
        "correctness": None,
        "energy": Energy(energy_j=None if seconds is None else 2 * seconds),
        "thread_policy": THREADS,
        "reason": "" if latency else "does not run",
    }
    return OperatorCost(shape=shape, backend=backend, latency=latency, **(given | fields))


def table(*more: OperatorCost, switch_j: float | None = 0.2) -> OperatorTable:
    costs = [
        cost(s, backend, seconds)
        for s, both in COSTS.items()
        for backend, seconds in zip((TORCH, ORT), both, strict=True)
    ]
    switches = [
        SwitchCost(source=TORCH, target=ORT, fixed_s=0.1, per_byte_s=0.01, fixed_j=switch_j),
        SwitchCost(source=ORT, target=TORCH, fixed_s=0.3, fixed_j=switch_j, per_byte_j=0.001),
    ]
    facts: Mapping[str, object] = {
        "name": "t",
        "device_id": "d",
        "device": {},
        "thread_policy": THREADS,
        "provenance": "simulated",
    }
    return table_of([*costs, *more], switches, **facts)


@pytest.fixture(scope="module")
def problem() -> Problem:
    return build_problem([trace()], table(), segments=True)


def on(*backends: int, segments: tuple[int, ...] = ()) -> Assignment:
    return Assignment(backend=np.array(backends), segments=segments)


def test_a_problem_has_the_table_s_numbers_in_the_order_operators_run(problem: Problem) -> None:
    assert problem.backends == (TORCH, ORT)
    assert problem.names == ("node0", "node1", "node3")
    assert problem.op_s.tolist() == [[1, 3], [8, 5], [6, 7]]
    assert problem.op_j is not None
    assert problem.op_j.tolist() == [[2, 6], [16, 10], [12, 14]]
    assert problem.weight_bytes.tolist() == [4 * 8, 4 * 8 * 16, 4 * 8 * 16]
    assert problem.gap_s.tolist() == [0, 0, 0.5, 0.25]


def test_switches_grow_with_the_input_and_there_is_none_before_the_first(problem: Problem) -> None:
    assert problem.switch_j is not None
    assert problem.switch_s[0].tolist() == [[0, 0], [0, 0]]
    assert problem.switch_s[1].tolist() == [[0, 0.1 + 0.01 * 4 * 2 * 8], [0.3, 0]]
    assert problem.switch_s[2, 0, 1] == pytest.approx(0.1 + 0.01 * 4 * 2 * 16)
    assert problem.switch_j[2, 1, 0] == pytest.approx(0.2 + 0.001 * 4 * 2 * 16)


def test_a_segment_saves_the_fixed_operators_inside_and_behind(problem: Problem) -> None:
    (segment,) = problem.segments
    assert (segment.start, segment.stop) == (1, 3)
    # The add behind is still paid in the last gap, so the segment is that much cheaper.
    assert segment.cost_s.tolist() == [math.inf, 9 - 0.25]

    counted = totals(problem, on(0, 1, 1, segments=(0,)))

    assert counted.latency_s == pytest.approx(1 + (0.1 + 0.64) + 9)
    assert counted.energy_j == pytest.approx(2 * 1 + 0.2 + 2 * 9)


def test_totals_are_operators_switches_and_gaps(problem: Problem) -> None:
    counted = totals(problem, on(0, 1, 0))

    assert counted.switch_s == pytest.approx(0.1 + 0.64 + 0.3)
    assert counted.gap_s == 0.75
    assert counted.latency_s == pytest.approx(1 + 5 + 6 + counted.switch_s + 0.75)
    assert counted.energy_j == pytest.approx(2 * (1 + 5 + 6 + 0.75) + 0.4 + 0.128)
    assert counted.energy_j is not None
    assert counted.edp == pytest.approx(counted.latency_s * counted.energy_j)
    assert (counted.backend_switches, counted.framework_switches) == (2, 2)
    assert counted.device_switches == 0  # cpu and CPU are one device


def test_devices_and_frameworks_are_counted_apart(problem: Problem) -> None:
    other = replace(problem, backends=("torch:cpu", "torch:cuda"))

    counted = totals(other, on(0, 1, 1))

    assert (counted.backend_switches, counted.device_switches) == (1, 1)
    assert counted.framework_switches == 0


def test_two_passes_follow_one_another(problem: Problem) -> None:
    both = build_problem([trace(), trace()], table(), segments=True)

    assert both.begins == (0, 3)
    assert both.gap_s.tolist() == [0, 0, 0.5, 0.25, 0, 0.5, 0.25]
    assert [(s.start, s.stop, s.candidate) for s in both.segments] == [
        (1, 3, (0, 0)),
        (4, 6, (1, 0)),
    ]
    once = totals(problem, on(0, 0, 0)).latency_s
    assert totals(both, on(*[0] * 6)).latency_s == pytest.approx(2 * once)


def test_what_failed_its_check_is_not_used() -> None:
    wrong = Correctness(passed=False, max_abs=1, mean_abs=1, max_rel=1, rtol=1e-4, atol=1e-5)

    found = build_problem([trace()], table(cost(WIDE, ORT, 0.001, correctness=wrong)))

    assert found.op_s[1].tolist() == [8, math.inf]
    assert found.op_j is not None
    assert found.op_j[1].tolist() == [16, math.inf]
    assert found.segments == ()


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param(table(cost(WIDE, ORT, 5.0, energy=Energy())), id="an operator"),
        pytest.param(table(switch_j=None), id="switches"),
        pytest.param(table(cost(ADD, TORCH, 0.25, energy=Energy())), id="a fixed operator"),
    ],
)
def test_energy_that_is_not_known_of_one_part_is_not_known(odd: OperatorTable) -> None:
    found = build_problem([trace()], odd)

    assert totals(found, on(0, 0, 0)).energy_j is None
    with pytest.raises(ProfileError, match="'energy' needs energy, which was not measured"):
        need_energy(found, "energy")
    need_energy(found, "latency")


def test_a_segment_without_energy_leaves_only_its_own_plans_without() -> None:
    found = build_problem([trace()], table(cost(MLP, ORT, 9.0, energy=Energy())), segments=True)

    assert totals(found, on(0, 1, 1, segments=(0,))).energy_j is None
    assert totals(found, on(0, 1, 1)).energy_j is not None


def test_totals_know_each_objective() -> None:
    counted = Totals(
        latency_s=2.0,
        energy_j=3.0,
        switch_s=0.0,
        gap_s=0.0,
        backend_switches=0,
        device_switches=0,
        framework_switches=0,
    )
    unmetered = replace(counted, energy_j=None)

    assert [counted.of(o) for o in ("latency", "energy", "edp")] == [2.0, 3.0, 6.0]
    assert unmetered.of("latency") == 2.0
    assert unmetered.edp is None
    with pytest.raises(ProfileError, match="needs energy"):
        unmetered.of("edp")


def test_an_unknown_objective_names_the_nearest(problem: Problem) -> None:
    wrong: Objective = "latancy"  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="did you mean 'latency'"):
        need_energy(problem, wrong)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        pytest.param(on(0, 0), "each of 3 operators", id="too short"),
        pytest.param(on(0, 0, 1, segments=(0,)), "spread over several", id="two backends"),
        pytest.param(on(0, 1, 1, segments=(0, 0)), "overlaps another", id="twice"),
    ],
)
def test_assignments_that_cannot_be_are_refused(
    problem: Problem, assignment: Assignment, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        totals(problem, assignment)


@pytest.mark.parametrize(
    ("traces", "backends", "message"),
    [
        pytest.param([], None, "expected traces", id="no trace"),
        pytest.param([trace()], [], "distinct backends", id="no backend"),
        pytest.param([trace()], [TORCH, TORCH], "distinct backends", id="one twice"),
        pytest.param([trace()], ["openvino:CPU"], "no cost on backend", id="not in the table"),
        pytest.param(
            [replace(trace(), nodes=(), candidates=())], None, "no operator", id="nothing to choose"
        ),
    ],
)
def test_questions_that_make_no_sense_are_refused(
    traces: list[Trace], backends: list[str] | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_problem(traces, table(), backends=backends)


def test_an_operator_that_nothing_can_run_is_named() -> None:
    with pytest.raises(ProfileError, match=r"no usable cost of 'linear m=2 k=8 n=16'.*1 shapes"):
        build_problem([trace()], table(cost(WIDE, TORCH, None)), backends=[TORCH])


def test_a_switch_that_was_not_measured_is_refused() -> None:
    found = table()
    half = replace(found, switches={(TORCH, ORT): found.switches[TORCH, ORT]})

    with pytest.raises(ProfileError, match="no switch cost from 'onnxruntime:CPU' to 'torch:cpu'"):
        build_problem([trace()], half)
    assert build_problem([trace()], half, backends=[TORCH]).num_operators == 3
