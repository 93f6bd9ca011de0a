from __future__ import annotations

import pytest

from edgewise.dispatch.forward import trace_forward
from edgewise.dispatch.trace import Candidate, Node, Tensor, Trace
from edgewise.errors import ModelError
from edgewise.model.transformer import architecture_names, load_architecture
from edgewise.profiles.operators import OperatorShape

ADD = OperatorShape(kind="add", m=1, k=4, n=4)
LINEAR = OperatorShape(kind="linear", m=1, k=4, n=4)


def node(shape: OperatorShape, inputs: tuple[int, ...], output: int) -> Node:
    return Node(name=f"n{output}", shape=shape, inputs=inputs, output=output)


def make(*nodes: Node, candidates: tuple[Candidate, ...] = ()) -> Trace:
    tensors = tuple(Tensor(name=f"t{i}", size_bytes=16) for i in range(len(nodes) + 1))
    return Trace(
        model="m",
        phase="prefill",
        length=1,
        past=0,
        nodes=nodes,
        tensors=tensors,
        candidates=candidates,
    )


def test_operators_are_the_nodes_that_are_not_fixed() -> None:
    trace = make(node(LINEAR, (0,), 1), node(ADD, (0, 1), 2))

    assert [n.name for n in trace.operators] == ["n1"]


@pytest.mark.parametrize(
    "nodes",
    [
        pytest.param((node(LINEAR, (2,), 1), node(ADD, (0, 1), 2)), id="reads the future"),
        pytest.param((node(LINEAR, (0,), 1), node(LINEAR, (0,), 1)), id="made twice"),
        pytest.param((node(LINEAR, (0,), 0),), id="makes the input"),
    ],
)
def test_data_flows_forward(nodes: tuple[Node, ...]) -> None:
    with pytest.raises(ModelError, match="were made before it"):
        make(*nodes)


@pytest.mark.parametrize(("start", "stop"), [(0, 2), (1, 1), (-1, 1)])
def test_a_segment_is_inside(start: int, stop: int) -> None:
    segment = Candidate(kind="mlp", start=start, stop=stop, parts=(LINEAR,), name="s")

    with pytest.raises(ModelError, match="segment 's' covers nodes"):
        make(node(LINEAR, (0,), 1), candidates=(segment,))


@pytest.mark.parametrize("name", architecture_names())
def test_every_tensor_is_read_save_the_answer(name: str) -> None:
    trace = trace_forward(load_architecture(name), length=16)

    read = {t for n in trace.nodes for t in n.inputs}
    made = {n.output for n in trace.nodes}

    assert made - read == {trace.nodes[-1].output}
    assert all(trace.tensors[n.output].name == n.name for n in trace.nodes)
    assert len({n.name for n in trace.nodes}) == len(trace.nodes)
