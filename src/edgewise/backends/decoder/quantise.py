"""Weights of 8 and 4 bits, by ONNX Runtime's own quantiser, and what its rounding leaves behind."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from edgewise.backends.base import import_runtime
from edgewise.backends.decoder.base import Precision
from edgewise.errors import BackendUnavailable

Float32 = npt.NDArray[np.float32]
UInt8 = npt.NDArray[np.uint8]
BITS: dict[Precision, int] = {"int8": 8, "int4": 4}
BLOCK = 32
"""Weights that share a scale."""
# A zero point for each block costs a tenth of the speed and is worth it where levels are few.
SYMMETRIC: dict[Precision, bool] = {"int8": True, "int4": False}
# Blocks' mean errors are given back where they are more than this share of the squared error.
_WORTH = 0.5


def quantise(proto: Any, precision: Precision, *, backend: str) -> Any:
    """Store the matrices of a graph's multiplications in few bits.

    Weights are rounded to nearest in blocks of :data:`BLOCK` along a matrix's inputs. The runtime
    multiplies in integers: activations are rounded to 8 bits, by block, in each call.

    A block's zero point is a whole number of steps. Weights that were stored in 4 bits with a real
    offset before (GGUF's Q4_1, Q4_K) come out with the right steps, each block shifted by up to
    half of one. Such shifts are given back: the sum of a block's inputs times its mean error.

    Args:
        proto: ``onnx.ModelProto`` with matrices [in, out]; changed in place.
        precision: ``"fp32"`` leaves it as it is.
        backend: Who asks, for messages.

    Raises:
        BackendUnavailable: The quantiser, or a package that it needs, is not installed.
    """
    if precision == "fp32":
        return proto
    import_runtime("onnxruntime", backend=backend, extra="onnx")
    quantiser = _quantiser(backend)(
        proto,
        bits=BITS[precision],
        block_size=BLOCK,
        is_symmetric=SYMMETRIC[precision],
        accuracy_level=4,
    )
    numpy_helper = importlib.import_module("onnx").numpy_helper
    originals = {
        w.name: numpy_helper.to_array(w) for w in proto.graph.initializer if len(w.dims) == 2
    }
    quantiser.process()
    found = quantiser.model.model
    if precision == "int4":
        _give_back(found.graph, originals)
    return found


def _give_back(graph: Any, originals: Mapping[str, Float32]) -> None:
    """Add, where it is worth it, each block's mean error times the sum of the block's inputs."""
    onnx = importlib.import_module("onnx")
    stored = {w.name: w for w in graph.initializer}
    nodes = []
    for node in graph.node:
        nodes.append(node)
        name = node.input[1].removesuffix("_Q4") if node.op_type == "MatMulNBits" else ""
        if name not in originals or len(originals[name]) % BLOCK:
            continue
        parts = [onnx.numpy_helper.to_array(stored[n]) for n in node.input[1:4]]
        shifts = _shifts(originals[name], *parts)
        if shifts is None:
            continue
        result = node.output[0]
        node.output[0] = f"{result}_rounded"
        blocks = onnx.numpy_helper.from_array(np.array([-1, len(shifts), BLOCK]), f"{name}_blocks")
        last = onnx.numpy_helper.from_array(np.array([-1]), f"{name}_last")
        graph.initializer.extend(
            [blocks, last, onnx.numpy_helper.from_array(shifts, f"{name}_shifts")]
        )
        for kind, inputs, output in (
            ("Reshape", [node.input[0], blocks.name], f"{result}_blocks"),
            ("ReduceSum", [f"{result}_blocks", last.name], f"{result}_sums"),
            ("MatMul", [f"{result}_sums", f"{name}_shifts"], f"{result}_shift"),
            ("Add", [node.output[0], f"{result}_shift"], result),
        ):
            more = {"keepdims": 0} if kind == "ReduceSum" else {}
            nodes.append(onnx.helper.make_node(kind, inputs, [output], **more))
    del graph.node[:]
    graph.node.extend(nodes)


def _shifts(
    original: Float32, packed: UInt8, scales: Float32, zero_points: UInt8
) -> Float32 | None:
    """Mean error of each block, [blocks, out]; ``None`` where errors have next to no mean.

    Args:
        original: [in, out].
        packed: Two steps a byte, the lower half first, [out, blocks, BLOCK / 2].
        scales: [out * blocks] or [out, blocks].
        zero_points: Two a byte, [out, blocks / 2].

    Source:
        ONNX Runtime, operator com.microsoft.MatMulNBits.
    """
    outs, blocks, _ = packed.shape
    steps = _halves(packed).astype(np.float32)
    zeros = _halves(zero_points.reshape(outs, -1))[:, :blocks, None]
    steps -= zeros
    steps *= scales.reshape(outs, blocks, 1)
    np.subtract(original.T.reshape(steps.shape), steps, out=steps)
    mean = steps.mean(axis=2)
    explained = BLOCK * float(np.vdot(mean, mean))
    if explained <= _WORTH * float(np.vdot(steps, steps)):
        return None
    return np.ascontiguousarray(mean.T)


def _halves(packed: UInt8) -> UInt8:
    """Unpack bytes along the last axis."""
    both = np.stack([packed & 15, packed >> 4], axis=-1)
    return both.reshape(*packed.shape[:-1], -1)


def _quantiser(backend: str) -> Any:
    """The quantiser; importing it would set up the root logger."""
    root, quiet = logging.getLogger(), logging.NullHandler()
    root.addHandler(quiet)
    try:
        module = importlib.import_module("onnxruntime.quantization.matmul_nbits_quantizer")
    except ImportError as error:
        raise BackendUnavailable(
            f"backend {backend!r} cannot quantise here: {error}",
            help="pip install 'edgewise[onnx]' onnx-ir",
        ) from error
    finally:
        root.removeHandler(quiet)
    logging.getLogger(module.__name__).setLevel(logging.WARNING)
    return module.MatMulNBitsQuantizer
