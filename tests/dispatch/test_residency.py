from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from edgewise.dispatch.forward import trace_forward
from edgewise.dispatch.problem import HOME, build_problem
from edgewise.dispatch.residency import evaluate_residency, solve_residency
from edgewise.dispatch.search import decide
from edgewise.dispatch.synthetic_table import random_table, summary
from edgewise.dispatch.trace import Node, Tensor, Trace
from edgewise.errors import ConfigError, ProfileError
from edgewise.model.transformer import architecture_of, load_architecture
from edgewise.profiles.operators import (
    Energy,
    OperatorCost,
    OperatorShape,
    OperatorTable,
    SwitchCost,
    table_of,
)
from edgewise.profiles.records import ThreadPolicy

ORT = "onnxruntime:CPU"
OV = "openvino:CPU"


def random_dag(rng: np.random.Generator, operators: int) -> Trace:
    """Nodes that read up to three earlier tensors, some of them fixed, each of its own size."""
    tensors = [Tensor(name="input", size_bytes=4000)]
    nodes = []
    for i in range(operators):
        width = int(rng.integers(1, 400))
        kind = "add" if rng.random() < 0.2 else "activation"
        shape = OperatorShape(kind=kind, m=1, k=width, n=width)  # type: ignore[arg-type]
        reads = rng.choice(i + 1, size=min(i + 1, int(rng.integers(1, 4))), replace=False)
        nodes.append(Node(name=f"n{i}", shape=shape, inputs=tuple(reads.tolist()), output=i + 1))
        tensors.append(Tensor(name=f"n{i}", size_bytes=4000 * width))
    return Trace(
        model="dag", phase="prefill", length=1, past=0, nodes=tuple(nodes), tensors=tuple(tensors)
    )


def brute_force(trace: Trace, table: OperatorTable, objective: str) -> float:
    choices = itertools.product(table.backends(), repeat=len(trace.operators))
    return min(
        evaluate_residency(trace, table, choice, objective=objective).cost  # type: ignore[arg-type]
        for choice in choices
    )


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("objective", ["latency", "energy"])
def test_nothing_costs_less_on_small_graphs(seed: int, objective: str) -> None:
    rng = np.random.default_rng(seed)
    trace = random_dag(rng, 6)
    table = random_table([trace], rng, switch_s=float(rng.choice([1e-7, 1e-6, 1e-5])), spread=1.0)

    found = solve_residency(trace, table, objective=objective)  # type: ignore[arg-type]

    assert found.cost == pytest.approx(brute_force(trace, table, objective), rel=1e-12)


def test_the_best_chain_need_not_be_best_on_the_graph() -> None:
    architecture = architecture_of(
        {
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "vocab_size": 64,
        },
        name="one layer",
        where="test",
    )
    trace = trace_forward(architecture, length=16)
    rng = np.random.default_rng(0)
    table = random_table([trace], rng, backends=(HOME, ORT), switch_s=2e-6, spread=0.5)
    problem = build_problem([trace], table)

    chain = decide(problem, method="viterbi").assignment
    names = [problem.backends[b] for b in chain.backend.tolist()]
    on_graph = evaluate_residency(trace, table, names)
    found = solve_residency(trace, table)

    assert found.cost < 0.97 * on_graph.cost  # tensors go to attention and back, unseen by chains


def table_by_hand(per_byte_s: float = 0.0) -> OperatorTable:
    """Two operators that read one input; ``ORT`` is much faster, a copy costs 1 s."""
    policy = ThreadPolicy(threads=1)
    costs = [
        OperatorCost(
            shape=OperatorShape(kind="activation", m=1, k=width, n=width),
            backend=backend,
            latency=summary(seconds),
            correctness=None,
            energy=Energy(),
            thread_policy=policy,
        )
        for width in (10, 20)
        for backend, seconds in ((HOME, 5.0), (ORT, 1.0))
    ]
    switches = [
        SwitchCost(source=a, target=b, fixed_s=1.0, per_byte_s=per_byte_s)
        for a, b in ((HOME, ORT), (ORT, HOME))
    ]
    return table_of(
        costs,
        switches,
        name="by hand",
        device_id="d",
        device={},
        thread_policy=policy,
        provenance="simulated",
    )


def fork(*, shared: bool) -> Trace:
    first = OperatorShape(kind="activation", m=1, k=10, n=10)
    second = OperatorShape(kind="activation", m=1, k=20, n=20)
    return Trace(
        model="fork",
        phase="prefill",
        length=1,
        past=0,
        nodes=(
            Node(name="a", shape=first, inputs=(0,), output=1),
            Node(name="b", shape=second, inputs=(0,) if shared else (1,), output=2),
        ),
        tensors=(
            Tensor(name="input", size_bytes=100),
            Tensor(name="a", size_bytes=40),
            Tensor(name="b", size_bytes=80),
        ),
    )


def test_a_copy_that_is_there_is_free() -> None:
    found = evaluate_residency(fork(shared=True), table_by_hand(), [ORT, ORT])

    assert [(c.tensor, c.source, c.target, c.before) for c in found.copies] == [
        ("input", HOME, ORT, 0),
        ("b", ORT, HOME, 2),  # the answer is handed back
    ]
    assert found.latency_s == 2 * 1.0 + 2 * 1.0
    assert found.copy_s == 2.0


def test_a_copy_costs_by_the_bytes_of_its_tensor() -> None:
    found = evaluate_residency(fork(shared=False), table_by_hand(per_byte_s=0.01), [ORT, HOME])

    assert [c.size_bytes for c in found.copies] == [100, 40]
    assert found.copy_s == pytest.approx(2 * 1.0 + 0.01 * 140)
    assert found.latency_s == pytest.approx(1.0 + 5.0 + found.copy_s)


def test_the_input_of_a_faster_backend_is_paid_for() -> None:
    assert solve_residency(fork(shared=True), table_by_hand()).backends == (ORT, ORT)
    far = table_by_hand(per_byte_s=1.0)
    assert solve_residency(fork(shared=True), far).backends == (HOME, HOME)


def test_equal_layers_are_solved_whole_for_a_model_of_30() -> None:
    trace = trace_forward(load_architecture("smollm2-135m"), length=32)
    table = random_table([trace], np.random.default_rng(1), switch_s=2e-5)

    found = solve_residency(trace, table)

    single = [
        evaluate_residency(trace, table, [name] * len(trace.operators)).cost
        for name in table.backends()
    ]
    assert found.cost < min(single)
    problem = build_problem([trace], table)
    names = enumerate(problem.backends.index(name) for name in found.backends)
    operators_s = sum(float(problem.op_s[t, b]) for t, b in names)
    assert found.latency_s == pytest.approx(found.copy_s + found.fixed_s + operators_s)


def test_only_backends_that_are_allowed_are_used_and_torch_still_hands_over() -> None:
    trace = fork(shared=True)
    found = solve_residency(trace, table_by_hand(), backends=[ORT])

    assert set(found.backends) == {ORT}
    assert {c.source for c in found.copies} == {HOME, ORT}


def test_what_cannot_be_counted_is_refused() -> None:
    trace, table = fork(shared=True), table_by_hand()

    with pytest.raises(ProfileError, match="'energy' needs joules"):
        solve_residency(trace, table, objective="energy")
    with pytest.raises(ConfigError, match="no backend 'onnxruntime:CPX'; did you mean"):
        solve_residency(trace, table, backends=["onnxruntime:CPX"])
    with pytest.raises(ConfigError, match="a backend for each of 2 operators, found 1"):
        evaluate_residency(trace, table, [ORT])
    with pytest.raises(ProfileError, match="no switch cost from"):
        solve_residency(trace, table_of(table.costs.values(), [], **fields(table)))


def fields(table: OperatorTable) -> dict[str, object]:
    names = ("name", "device_id", "device", "thread_policy", "provenance")
    return {name: getattr(table, name) for name in names}


def test_an_operator_that_nobody_can_run_is_named() -> None:
    table = table_by_hand()
    costs = [c for c in table.costs.values() if c.shape.k == 10]

    with pytest.raises(ProfileError, match="no usable cost of 'activation m=1 k=20 n=20'"):
        solve_residency(
            fork(shared=True), table_of(costs, table.switches.values(), **fields(table))
        )


def test_what_was_not_measured_is_said() -> None:
    trace = random_dag(np.random.default_rng(3), 8)
    table = random_table([trace], np.random.default_rng(3))
    costs = [c for c in table.costs.values() if not c.shape.is_fixed]
    found = solve_residency(trace, table_of(costs, table.switches.values(), **fields(table)))

    assert found.notes == ("not measured, counted as nothing: add",)
    assert found.fixed_s == 0.0
    assert not math.isnan(found.cost)
