from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgewise.backends.decoder.graphs import head_graph, layers_graph, projection_graph

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


@pytest.fixture(scope="module")
def tiny(language: Any) -> Any:
    return language.tiny()


def kinds(graph: Any) -> list[str]:
    return [node.op_type for node in graph.proto.graph.node]


def test_matrices_of_full_precision_are_the_models_own(tiny: Any) -> None:
    graphs = [
        layers_graph(tiny, 0, 2, pack=False),
        projection_graph(tiny, 0, 2, pack=False),
        head_graph(tiny, pack=False),
    ]

    assert set(graphs[0].outside) == {f"{i}.{role}" for i in (0, 1) for role in MATRICES}
    for graph in graphs:
        for name, array in graph.outside.items():
            assert any(np.shares_memory(array, w) for w in tiny.weights.values()), name


def test_packed_graphs_are_complete_and_join_what_reads_the_same_state(tiny: Any) -> None:
    graph = layers_graph(tiny, 1, 3, pack=True)

    assert not graph.outside
    # Queries, keys and values; output; gate and up; down.
    assert kinds(graph).count("MatMul") == 2 * 4


def test_a_group_reads_and_writes_the_cells_of_its_own_layers(tiny: Any) -> None:
    graph = layers_graph(tiny, 1, 3, pack=False).proto.graph
    cells = [f"{name}_{i}" for i in (1, 2) for name in ("key", "value")]

    assert [i.name for i in graph.input if "_" in i.name and i.name in cells] == cells
    assert [o.name for o in graph.output] == ["out", *(f"new_{name}" for name in cells)]


def test_a_short_list_has_its_tokens_rows_in_their_order(tiny: Any) -> None:
    (short,) = head_graph(tiny, pack=False, tokens=np.array([7, 3])).outside.values()

    np.testing.assert_array_equal(short, tiny.weights["lm_head.weight"][[7, 3]])
