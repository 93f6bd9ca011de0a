from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgewise.backends.piece import load_piece
from edgewise.backends.staged_pieces import staged_segment
from edgewise.errors import ModelError
from edgewise.frontends.partition import PartitionedModel
from edgewise.model import StagedModel
from edgewise.profiling.segments import graph_of
from edgewise.profiling.staged_partition import partitioned

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")


@pytest.fixture(scope="module", name="model")
def _model() -> StagedModel:
    from edgewise.frontends.checkpoint import load_model

    return load_model("fashion-lite0")


@pytest.fixture(scope="module", name="cut")
def _cut(model: StagedModel) -> PartitionedModel:
    return partitioned(model)


def test_prefix_and_suffix_together_answer_as_the_program_does_at_its_last_exit(
    model: StagedModel, cut: PartitionedModel
) -> None:
    from edgewise.backends import load_program

    x = np.random.default_rng(0).random(cut.places[0].shape, dtype=np.float32)
    program = load_program(model, "onnxruntime", check=False)
    with program.context() as context:
        context.set_boundary(0, x)
        context.run_segment(0, cut.last)
        whole = context.run_head(cut.last - 1).copy()
    for place in (2, 6):
        crossing = load_piece(cut.prefix(place), "onnx").run(x)
        answer = load_piece(cut.suffix(place), "onnx").run(crossing)

        assert crossing.shape == cut.places[place].shape
        np.testing.assert_allclose(answer, whole, rtol=1e-4, atol=1e-4)


def test_places_are_the_ends_of_stages_and_the_last_head_belongs_to_the_last_piece(
    model: StagedModel, cut: PartitionedModel
) -> None:
    sizes = [p.prefix_bytes for p in cut.places]
    head = model.exits[-1].head
    assert head is not None
    head_bytes = sum(w.nbytes for w in head.weights.values())

    assert cut.last == len(model.stages) == 7
    assert cut.places[-1].shape == (1, model.num_classes)
    assert sizes == sorted(sizes)
    assert sizes[-1] == sum(s.weight_bytes for s in model.stages) + head_bytes
    assert graph_of(cut) is model.source.graph
    assert cut.version == model.version()


def test_pieces_out_of_order_are_refused(model: StagedModel) -> None:
    with pytest.raises(ModelError, match="found a piece from 3 to 3"):
        staged_segment(model, 3, 3)


def test_a_head_follows_a_piece_of_an_older_operator_set(model: StagedModel) -> None:
    from edgewise.backends.staged_pieces import _with_head

    head = model.exits[-1].head
    assert head is not None
    helper, real = onnx.helper, onnx.TensorProto.FLOAT
    shape = list(head.spec.feature_shape)
    values: list[Any] = [helper.make_tensor_value_info(n, real, shape) for n in ("x", "hidden")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["hidden"])], "old", *zip(values))
    old = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    piece = load_piece(_with_head(old, head).SerializeToString(), "onnx")

    assert piece.run(np.ones(shape, dtype=np.float32)).shape == (1, model.num_classes)
