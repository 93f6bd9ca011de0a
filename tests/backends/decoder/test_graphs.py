from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from edgewise.backends.decoder.graphs import head_graph, layers_graph, projection_graph
from edgewise.backends.decoder.packed import packed_matrices

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


@pytest.fixture(scope="module")
def tiny(language: Any) -> Any:
    return language.tiny()


def kinds(graph: Any) -> list[str]:
    return [node.op_type for node in graph.proto.graph.node]


def test_matrices_of_full_precision_are_the_models_own(tiny: Any) -> None:
    graphs = [
        layers_graph(tiny, 0, 2),
        projection_graph(tiny, 0, 2),
        head_graph(tiny),
    ]

    assert set(graphs[0].outside) == {f"{i}.{role}" for i in (0, 1) for role in MATRICES}
    for graph in graphs:
        for name, array in graph.outside.items():
            assert any(np.shares_memory(array, w) for w in tiny.weights.values()), name


@pytest.fixture(scope="module")
def packed(tiny: Any) -> Any:
    return packed_matrices(tiny, "layers", "int4", backend="a test", folder=None)


def test_packed_graphs_are_complete_and_join_what_reads_the_same_state(
    tiny: Any, packed: Any
) -> None:
    graph = layers_graph(tiny, 1, 3, packed=packed)

    assert not graph.outside
    # Queries, keys and values; output; gate and up; down.
    assert kinds(graph).count("MatMulNBits") == 2 * 4


def test_keys_and_values_of_an_exit_are_multiplied_by_the_layers_own_steps(
    tiny: Any, packed: Any
) -> None:
    graph = projection_graph(tiny, 1, 3, packed=packed).proto.graph
    stored = {w.name: onnx.numpy_helper.to_array(w) for w in graph.initializer}

    for layer in (1, 2):
        queries = len(tiny.weights[f"model.layers.{layer}.self_attn.q_proj.weight"])
        joined = packed[f"{layer}.qkv"].steps
        np.testing.assert_array_equal(stored[f"{layer}.kv.steps"], joined[queries:])


def test_a_group_reads_and_writes_the_cells_of_its_own_layers(tiny: Any) -> None:
    graph = layers_graph(tiny, 1, 3).proto.graph
    cells = [f"{name}_{i}" for i in (1, 2) for name in ("key", "value")]

    assert [i.name for i in graph.input if "_" in i.name and i.name in cells] == cells
    assert [o.name for o in graph.output] == ["out", *(f"new_{name}" for name in cells)]


def test_a_short_list_has_its_tokens_rows_in_their_order(tiny: Any) -> None:
    (short,) = head_graph(tiny, tokens=np.array([7, 3])).outside.values()

    np.testing.assert_array_equal(short, tiny.weights["lm_head.weight"][[7, 3]])
