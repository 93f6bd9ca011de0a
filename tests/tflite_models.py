"""Small TFLite models for tests, written through the schema: random weights, fixed by a seed."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from ai_edge_litert import schema_py_generated as schema

Array = npt.NDArray[Any]
TYPES = {
    "float32": schema.TensorType.FLOAT32,
    "int8": schema.TensorType.INT8,
    "int32": schema.TensorType.INT32,
}

# Of the operators that learnt int8 later than float.
VERSIONS = {"CONV_2D": 3, "ADD": 2, "CONCATENATION": 2, "FULLY_CONNECTED": 4}


class Net:
    """One graph that grows by an operator a call; tensors are numbers.

    Attributes:
        model: To be changed by tests that want something odd.
        graph: Its only graph.
    """

    def __init__(self, dtype: str = "int8", *, seed: int = 0) -> None:
        self.dtype = dtype
        self.rng = np.random.default_rng(seed)
        self.graph = schema.SubGraphT()
        self.graph.tensors, self.graph.operators = [], []
        self.graph.inputs, self.graph.outputs = [], []
        self.model = schema.ModelT()
        self.model.version = 3
        self.model.operatorCodes = []
        self.model.buffers = [schema.BufferT()]
        self.model.subgraphs = [self.graph]

    def content(self) -> bytes:
        """The file."""
        builder = importlib.import_module("flatbuffers").Builder(1024)
        builder.Finish(self.model.Pack(builder), b"TFL3")
        return bytes(builder.Output())

    def tensor(
        self,
        name: str | None,
        shape: Sequence[int],
        *,
        dtype: str = "",
        scales: Sequence[float] | Array = (0.05,),
    ) -> int:
        """Declare a tensor that flows."""
        tensor = schema.TensorT()
        tensor.name = name
        tensor.shape = list(shape)
        tensor.type = TYPES[dtype or self.dtype]
        if self.dtype == "int8" and len(scales):
            quantization = schema.QuantizationParametersT()
            quantization.scale = np.array(scales, np.float32)
            quantization.zeroPoint = np.zeros(len(scales), np.int64)
            tensor.quantization = quantization
        self.graph.tensors.append(tensor)
        return len(self.graph.tensors) - 1

    def constant(self, name: str, value: Array, *, scales: Sequence[float] | Array = ()) -> int:
        """Declare a tensor whose value is in the file."""
        index = self.tensor(name, value.shape, dtype=value.dtype.name, scales=scales)
        buffer = schema.BufferT()
        buffer.data = np.frombuffer(value.tobytes(), np.uint8)
        self.model.buffers.append(buffer)
        self.graph.tensors[index].buffer = len(self.model.buffers) - 1
        return index

    def op(
        self,
        kind: str,
        inputs: Sequence[int],
        outputs: Sequence[int],
        options: Any = None,
        *,
        custom: str = "",
    ) -> int:
        """Append an operator; returns its first output."""
        code = schema.OperatorCodeT()
        code.builtinCode = getattr(schema.BuiltinOperator, kind)
        code.deprecatedBuiltinCode = min(code.builtinCode, 127)
        code.version = VERSIONS.get(kind, 1) if self.dtype == "int8" else 1
        code.customCode = custom or None
        self.model.operatorCodes.append(code)
        operator = schema.OperatorT()
        operator.opcodeIndex = len(self.model.operatorCodes) - 1
        operator.inputs, operator.outputs = list(inputs), list(outputs)
        if options is not None:
            operator.builtinOptions = options
            name = type(options).__name__.removesuffix("T")
            operator.builtinOptionsType = getattr(schema.BuiltinOptions, name)
        self.graph.operators.append(operator)
        return outputs[0]

    def shape(self, tensor: int) -> list[int]:
        """Of a tensor."""
        return list(self.graph.tensors[tensor].shape)

    def weights(self, name: str, shape: Sequence[int]) -> tuple[int, int]:
        """Weights and bias of a contraction whose first axis is the output's."""
        fan_in = int(np.prod(shape[1:]))
        if self.dtype == "float32":
            values = self.rng.standard_normal(shape) / np.sqrt(fan_in)
            bias = self.rng.standard_normal(shape[0])
            return (
                self.constant(f"{name}/w", values.astype(np.float32)),
                self.constant(f"{name}/b", bias.astype(np.float32)),
            )
        scales = self.rng.uniform(0.6, 1.4, shape[0]) / (74 * np.sqrt(fan_in))
        return (
            self.constant(
                f"{name}/w", self.rng.integers(-127, 128, shape).astype(np.int8), scales=scales
            ),
            self.constant(
                f"{name}/b",
                self.rng.integers(-500, 500, shape[0]).astype(np.int32),
                scales=scales * 0.05,
            ),
        )

    def conv(
        self,
        x: int,
        channels: int,
        name: str,
        *,
        size: int = 3,
        stride: int = 1,
        weights: tuple[int, int] | None = None,
    ) -> int:
        """A convolution with a rectifier."""
        batch, height, width, depth = self.shape(x)
        w, b = weights or self.weights(name, (channels, size, size, depth))
        options = schema.Conv2DOptionsT()
        options.strideH = options.strideW = stride
        options.fusedActivationFunction = schema.ActivationFunctionType.RELU
        y = self.tensor(name, (batch, -(-height // stride), -(-width // stride), channels))
        return self.op("CONV_2D", [x, w, b], [y], options)

    def add(self, a: int, b: int, name: str) -> int:
        """A sum."""
        return self.op("ADD", [a, b], [self.tensor(name, self.shape(a))], schema.AddOptionsT())

    def concat(self, parts: Sequence[int], name: str) -> int:
        """Channels side by side."""
        shape = self.shape(parts[0])[:3]
        options = schema.ConcatenationOptionsT()
        options.axis = 3
        y = self.tensor(name, (*shape, sum(self.shape(p)[3] for p in parts)))
        return self.op("CONCATENATION", list(parts), [y], options)

    def flatten(self, x: int, name: str) -> int:
        """One row."""
        size = int(np.prod(self.shape(x)))
        row = self.constant(f"{name}/shape", np.array([1, size], np.int32))
        y = self.tensor(name, (1, size))
        return self.op("RESHAPE", [x, row], [y], schema.ReshapeOptionsT())

    def dense(self, x: int, classes: int, name: str) -> int:
        """A fully connected layer, one scale for all its weights."""
        w, b = self.weights(name, (classes, self.shape(x)[1]))
        if self.dtype == "int8":
            for index, scale in ((w, 0.001), (b, 0.001 * 0.05)):
                self.graph.tensors[index].quantization.scale = np.array([scale], np.float32)
                self.graph.tensors[index].quantization.zeroPoint = np.zeros(1, np.int64)
        y = self.tensor(name, (1, classes))
        return self.op("FULLY_CONNECTED", [x, w, b], [y], schema.FullyConnectedOptionsT())

    def ends(self, inputs: Sequence[int], outputs: Sequence[int]) -> Net:
        """Say what goes in and what comes out."""
        self.graph.inputs, self.graph.outputs = list(inputs), list(outputs)
        return self


def residual(dtype: str = "int8") -> Net:
    """A stem, a residual block, two branches side by side, and weights that two layers share."""
    net = Net(dtype)
    x = net.tensor("x", (1, 8, 8, 3))
    stem = net.conv(x, 8, "stem")
    shared = net.weights("shared", (8, 3, 3, 8))
    left = net.conv(stem, 8, "left", weights=shared)
    joined = net.add(net.conv(left, 8, "right"), stem, "joined;other/name")
    branches = [net.conv(joined, 4, "wide"), net.conv(joined, 4, "thin", size=1)]
    both = net.concat(branches, "both")
    late = net.conv(both, 8, "late", weights=shared)
    flat = net.flatten(net.conv(late, 6, "narrow", stride=2), "flat")
    return net.ends([x], [net.dense(flat, 5, "scores")])


def failing() -> Net:
    """Looks a number up in a table of three; other numbers fail when it runs, not before."""
    net = Net("float32")
    x = net.tensor("x", (1, 2), dtype="int32")
    table = net.constant("table", np.array([0.5, 1.5, 2.5], np.float32))
    y = net.tensor("y", (1, 2))
    return net.ends([x], [net.op("GATHER", [table, x], [y], schema.GatherOptionsT())])
