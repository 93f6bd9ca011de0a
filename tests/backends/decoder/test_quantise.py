from __future__ import annotations

import logging
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from edgewise.backends.decoder.base import Precision
from edgewise.backends.decoder.quantise import BLOCK, Packed, pack

OUT, IN = 40, 3 * BLOCK


def multiplied(x: Any, packed: Packed) -> Any:
    """What the runtime computes for rows [M, in]."""
    helper, element = onnx.helper, onnx.TensorProto.FLOAT
    parts: dict[str, Any] = {"s": packed.steps, "c": packed.scales, "z": packed.zero_points}
    stored = [onnx.numpy_helper.from_array(a, n) for n, a in parts.items() if a is not None]
    node = helper.make_node(
        "MatMulNBits",
        ["x", *(t.name for t in stored)],
        ["y"],
        domain="com.microsoft",
        K=packed.inputs,
        N=len(packed.scales),
        bits=packed.bits,
        block_size=BLOCK,
        accuracy_level=4,
    )
    ends = [helper.make_tensor_value_info(n, element, ["m", n]) for n in "xy"]
    graph = helper.make_graph([node], "product", ends[:1], ends[1:], stored)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets)
    model.ir_version = 9
    session: Any = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    means = x.reshape(len(x), -1, BLOCK).mean(axis=2)[:, : packed.means]
    (found,) = session.run(None, {"x": np.concatenate([x, means], axis=1)})
    return found


def relative_error(weight: Any, packed: Packed) -> float:
    """For three rows, against numpy."""
    x = np.random.default_rng(1).normal(size=(3, weight.shape[1])).astype(np.float32)
    wanted = x @ weight.T
    found = multiplied(x, packed)
    assert found.shape == wanted.shape
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def four_bits_with_offsets(blocks: int = 3) -> Any:
    """Weights as Q4_1 stores them: each block 16 steps from its own least value."""
    rng = np.random.default_rng(0)
    steps = rng.integers(0, 16, (OUT, blocks, BLOCK))
    steps[..., 0], steps[..., 1] = 0, 15  # a block spans all its steps
    size = rng.uniform(0.05, 0.15, (OUT, blocks, 1))
    least = -size * rng.uniform(5, 10, size.shape)
    return (steps * size + least).reshape(OUT, -1).astype(np.float32)


def random_weight() -> Any:
    return np.random.default_rng(2).normal(size=(OUT, IN)).astype(np.float32)


@pytest.mark.parametrize("blocks", [1, 2, 3, 40], ids="{} blocks".format)
def test_weights_of_four_bits_with_real_offsets_keep_them(blocks: int) -> None:
    weight = four_bits_with_offsets(blocks)
    packed = pack(weight, "int4", backend="a test")

    assert packed.means == blocks
    # Activations of 8 bits: half a step of 1/127 of the largest, about 0.5 %; and the offsets'
    # own rounding, a 30th of a step of 1/15, as much again.
    assert relative_error(weight, packed) < 0.012


@pytest.mark.parametrize(("precision", "most"), [("int8", 0.015), ("int4", 0.15)])
def test_weights_without_a_pattern_lose_what_their_bits_allow(
    precision: Precision, most: float
) -> None:
    packed = pack(random_weight(), precision, backend="a test")

    assert packed.means == 0
    assert relative_error(random_weight(), packed) < most


def test_inputs_that_are_no_whole_blocks_are_packed_too() -> None:
    weight = four_bits_with_offsets()[:, :80]
    packed = pack(weight, "int4", backend="a test")
    x = np.random.default_rng(1).normal(size=(3, 80)).astype(np.float32)
    wanted = x @ weight.T

    assert packed.means == 0
    assert np.linalg.norm(by_numpy(x, packed) - wanted) / np.linalg.norm(wanted) < 0.15


def by_numpy(x: Any, packed: Packed) -> Any:
    """By numpy, from the operator's published layout."""
    assert packed.zero_points is not None
    outs, blocks, _ = packed.steps.shape
    steps, zeros = (
        np.stack([a & 15, a >> 4], axis=-1).reshape(outs, -1).astype(np.float32)
        for a in (packed.steps, packed.zero_points)
    )
    weight = (steps.reshape(outs, blocks, BLOCK) - zeros[:, :blocks, None]) * packed.scales[
        ..., None
    ]
    return x @ weight.reshape(outs, -1)[:, : packed.inputs].T


@pytest.mark.parametrize("which", [slice(7, 21), np.array([30, 2, 2])], ids=["slice", "chosen"])
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_some_outputs_of_a_packed_matrix_are_the_packed_outputs(
    precision: Precision, which: Any
) -> None:
    weight = four_bits_with_offsets()
    some = pack(weight, precision, backend="a test").rows(which)
    alone = pack(weight[which], precision, backend="a test")

    np.testing.assert_array_equal(some.steps, alone.steps)
    np.testing.assert_array_equal(some.scales, alone.scales)
    assert (some.inputs, some.means) == (alone.inputs, alone.means)
    if some.zero_points is not None and alone.zero_points is not None:
        np.testing.assert_array_equal(some.zero_points, alone.zero_points)


def test_quantising_leaves_the_root_logger_as_it_was() -> None:
    root = logging.getLogger()
    before = root.level, list(root.handlers)

    pack(random_weight(), "int8", backend="a test")

    assert (root.level, list(root.handlers)) == before
