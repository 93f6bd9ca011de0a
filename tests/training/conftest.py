"""A tiny ONNX backbone that is made in a moment, for jobs that must be quick."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from edgewise.data import Preprocess


def _tiny_proto(seed: int = 0) -> onnx.ModelProto:
    """Three convolutions and a classifier of four classes on 1 x 16 x 16, any batch."""
    rng = np.random.default_rng(seed)
    helper, numpy_helper = onnx.helper, onnx.numpy_helper
    nodes, weights, name, before = [], [], "image", 1
    for k, (after, stride) in enumerate([(8, 2), (12, 2), (16, 1)]):
        kernel = rng.standard_normal((after, before, 3, 3)) * np.sqrt(2 / (9 * before))
        weights.append(numpy_helper.from_array(kernel.astype(np.float32), f"conv{k}.weight"))
        bias = rng.standard_normal(after) * 0.1
        weights.append(numpy_helper.from_array(bias.astype(np.float32), f"conv{k}.bias"))
        nodes.append(
            helper.make_node(
                "Conv",
                [name, f"conv{k}.weight", f"conv{k}.bias"],
                [f"conv{k}"],
                pads=[1, 1, 1, 1],
                strides=[stride, stride],
            )
        )
        nodes.append(helper.make_node("Relu", [f"conv{k}"], [f"relu{k}"]))
        name, before = f"relu{k}", after
    nodes.append(helper.make_node("GlobalAveragePool", [name], ["pooled"]))
    nodes.append(helper.make_node("Flatten", ["pooled"], ["flat"]))
    linear = rng.standard_normal((4, before)).astype(np.float32)
    weights.append(numpy_helper.from_array(linear, "linear.weight"))
    nodes.append(helper.make_node("Gemm", ["flat", "linear.weight"], ["logits"], transB=1))
    real = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info("image", real, ["batch", 1, 16, 16])],
        [helper.make_tensor_value_info("logits", real, ["batch", 4])],
        weights,
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    proto.ir_version = 10
    return proto


@pytest.fixture(scope="session")
def tiny_proto() -> Callable[[int], onnx.ModelProto]:
    return _tiny_proto


@pytest.fixture
def tiny_onnx(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.onnx"
    onnx.save(_tiny_proto(), path)
    return path


@pytest.fixture
def tiny_preprocess() -> Preprocess:
    return Preprocess(size=(16, 16), mean=(127.5,), std=(127.5,), channels=1)
