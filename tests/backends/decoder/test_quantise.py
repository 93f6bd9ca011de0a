from __future__ import annotations

import logging
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from edgewise.backends.decoder.base import Precision
from edgewise.backends.decoder.quantise import BLOCK, quantise

IN, OUT = 3 * BLOCK, 40


def multiplication(weight: Any) -> Any:
    """A graph that multiplies ``x`` [M, IN] by a matrix [IN, OUT]."""
    helper, element = onnx.helper, onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="only")],
        "multiplication",
        [helper.make_tensor_value_info("x", element, ["rows", IN])],
        [helper.make_tensor_value_info("y", element, ["rows", OUT])],
        [onnx.numpy_helper.from_array(np.ascontiguousarray(weight, np.float32), "w")],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets)
    model.ir_version = 9
    return model


def relative_error(weight: Any, precision: Precision) -> float:
    """Of what the runtime computes for three rows, against numpy."""
    x = np.random.default_rng(1).normal(size=(3, IN)).astype(np.float32)
    proto = quantise(multiplication(weight), precision, backend="a test")
    session: Any = onnxruntime.InferenceSession(
        proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    wanted = x @ weight.astype(np.float32)
    (found,) = session.run(None, {"x": x})
    assert found.shape == wanted.shape
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def four_bits_with_offsets() -> Any:
    """Weights as Q4_1 stores them: each block 16 steps from its own least value."""
    rng = np.random.default_rng(0)
    steps = rng.integers(0, 16, (IN // BLOCK, BLOCK, OUT))
    steps[:, 0], steps[:, 1] = 0, 15  # a block spans all its steps
    size = rng.uniform(0.05, 0.15, (IN // BLOCK, 1, OUT))
    least = -size * rng.uniform(5, 10, size.shape)
    return (steps * size + least).reshape(IN, OUT)


def test_weights_of_four_bits_with_real_offsets_keep_them() -> None:
    # What is left are activations of 8 bits: half a step of 1/127 of the largest, about 0.5 %.
    assert relative_error(four_bits_with_offsets(), "int4") < 0.01


@pytest.mark.parametrize(("precision", "most"), [("int8", 0.015), ("int4", 0.15)])
def test_weights_without_a_pattern_lose_what_their_bits_allow(
    precision: Precision, most: float
) -> None:
    weight = np.random.default_rng(2).normal(size=(IN, OUT))

    assert relative_error(weight, precision) < most


def test_offsets_are_given_back_only_where_blocks_have_them() -> None:
    kinds = [
        {n.op_type for n in quantise(multiplication(w), "int4", backend="a test").graph.node}
        for w in (four_bits_with_offsets(), np.random.default_rng(2).normal(size=(IN, OUT)))
    ]

    assert kinds == [{"MatMulNBits", "Reshape", "ReduceSum", "MatMul", "Add"}, {"MatMulNBits"}]


def test_full_precision_is_left_alone() -> None:
    proto = multiplication(np.ones((IN, OUT)))

    assert quantise(proto, "fp32", backend="a test") is proto
    assert [n.op_type for n in proto.graph.node] == ["MatMul"]


def test_quantising_leaves_the_root_logger_as_it_was() -> None:
    root = logging.getLogger()
    before = root.level, list(root.handlers)

    quantise(multiplication(np.ones((IN, OUT))), "int8", backend="a test")

    assert (root.level, list(root.handlers)) == before
