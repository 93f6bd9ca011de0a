"""Operators and segments as ONNX graphs, for every runtime that reads ONNX.

Rows are one axis, whatever leading dimensions the tensors have. Weights are named, not contained:
a runtime is given them where they are in memory.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from edgewise.backends.base import import_runtime
from edgewise.backends.operators.weights import attention_of
from edgewise.errors import OpUnsupported
from edgewise.profiles.operators import AttentionShape, OperatorShape

_OPSET = 20  # the first with Gelu
_IR_VERSION = 9
Size = tuple[int | str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorGraph:
    """An ONNX graph whose weights lie elsewhere.

    Attributes:
        nodes: In order.
        constants: Small tensors that are part of the graph.
        inputs: Data that goes in, with sizes; a word stands for any size.
        outputs: What comes out.
        weights: By role.
    """

    nodes: tuple[Any, ...]
    constants: tuple[Any, ...]
    inputs: Mapping[str, Size]
    outputs: Mapping[str, Size]
    weights: Mapping[str, Tensor]

    def external(self) -> bytes:
        """Serialise with weights as initialisers whose values come from outside."""
        onnx = importlib.import_module("onnx")
        found = []
        for role, tensor in self.weights.items():
            proto = onnx.TensorProto(
                name=role,
                data_type=onnx.TensorProto.FLOAT,
                dims=list(tensor.shape),
                data_location=onnx.TensorProto.EXTERNAL,
            )
            size = 4 * tensor.numel()
            for key, value in (("location", "memory"), ("offset", "0"), ("length", str(size))):
                proto.external_data.add(key=key, value=value)
            found.append(proto)
        return self._serialise(self.inputs, found)

    def parametric(self) -> bytes:
        """Serialise with weights as inputs."""
        sizes: dict[str, Size] = {role: tuple(t.shape) for role, t in self.weights.items()}
        return self._serialise({**self.inputs, **sizes}, [])

    def _serialise(self, inputs: Mapping[str, Size], initialisers: Sequence[Any]) -> bytes:
        helper = importlib.import_module("onnx").helper
        infos = [
            [helper.make_tensor_value_info(name, 1, list(size)) for name, size in sizes.items()]
            for sizes in (inputs, self.outputs)
        ]
        graph = helper.make_graph(self.nodes, "operator", *infos, [*initialisers, *self.constants])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)])
        model.ir_version = _IR_VERSION
        found: bytes = model.SerializeToString()
        return found


def operator_graph(
    shape: OperatorShape, weights: Mapping[str, Tensor], eps: float, *, backend: str
) -> OperatorGraph:
    """Write an operator or segment down as a graph.

    Args:
        shape: Of an operator or segment.
        weights: By role, checked.
        eps: Of its norms.
        backend: Who asks, for messages.

    Raises:
        BackendUnavailable: onnx is not installed.
        OpUnsupported: No graph for this kind or function.
    """
    if shape.is_fixed:
        raise OpUnsupported(f"backend {backend!r} does not run {shape.kind!r}: it stays on torch")
    import_runtime("onnx", backend=backend, extra="onnx")
    return _Builder(shape, weights, eps).build()


class _Builder:
    """Nodes of one graph; methods take and return names of values."""

    def __init__(self, shape: OperatorShape, weights: Mapping[str, Tensor], eps: float) -> None:
        onnx = importlib.import_module("onnx")
        self._helper, self._numpy_helper = onnx.helper, onnx.numpy_helper
        self.shape, self.weights, self.eps = shape, weights, eps
        self.nodes: list[Any] = []
        self.constants: dict[str, Any] = {}
        self._numbers = itertools.count()

    def build(self) -> OperatorGraph:
        s = self.shape
        if s.kind == "layer":
            return self._layer()
        wide = s.k if s.kind in {"mlp", "norm_mlp"} else s.n
        sizes: tuple[Size, Size] = (("rows", s.k), ("rows", wide))
        if s.kind == "activation":
            sizes = (("size",), ("size",))
        self._finish(self._rows("x"), "y")
        return self._graph({"x": sizes[0]}, {"y": sizes[1]})

    def _graph(self, inputs: Mapping[str, Size], outputs: Mapping[str, Size]) -> OperatorGraph:
        return OperatorGraph(
            nodes=tuple(self.nodes),
            constants=tuple(self.constants.values()),
            inputs=inputs,
            outputs=outputs,
            weights=self.weights,
        )

    def _rows(self, x: str) -> str:  # noqa: PLR0911 - a table
        s = self.shape
        match s.kind:
            case "linear":
                return self.linear(x, "weight", "bias")
            case "activation":
                return self.activation(s.function, x)
            case "rmsnorm":
                return self.rms_norm(x, "weight")
            case "layernorm":
                return self.layer_norm(x, "weight", "bias")
            case "norm_linear":
                return self.linear(self.norm(x, s.function), "weight", "bias")
            case "mlp":
                return self.mlp(x)
            case _:
                norm = "layernorm" if s.function == "gelu-packed" else "rmsnorm"
                return self.mlp(self.norm(x, norm))

    # --- one node each ---

    def op(self, kind: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        """Append a node; returns its output's name, or the names of several."""
        names = [f"v{next(self._numbers)}" for _ in range(outputs)]
        self.nodes.append(self._helper.make_node(kind, list(inputs), names, **attributes))
        return names[0] if outputs == 1 else names

    def _finish(self, value: str, name: str) -> None:
        """Give the output of the graph its name."""
        for node in self.nodes:
            for names in (node.input, node.output):
                names[:] = [name if found == value else found for found in names]

    def constant(self, values: Any, dtype: str) -> str:
        """Name of a small constant."""
        import numpy as np

        array = np.asarray(values, dtype=dtype)
        name = f"c_{dtype}_{array.tolist()}"
        self.constants[name] = self._numpy_helper.from_array(array, name)
        return name

    def linear(self, x: str, weight: str, bias: str = "") -> str:
        found: str = self.op("Gemm", x, weight, *([bias] if bias in self.weights else []), transB=1)
        return found

    def activation(self, function: str, x: str) -> str:
        match function:
            case "silu":
                return str(self.op("Mul", x, self.op("Sigmoid", x)))
            case "gelu":
                return str(self.op("Gelu", x))
            case _:
                raise OpUnsupported(f"activations are silu and gelu; found {function!r}")

    def norm(self, x: str, kind: str) -> str:
        if kind == "layernorm":
            return self.layer_norm(x, "norm.weight", "norm.bias")
        return self.rms_norm(x, "norm.weight")

    def rms_norm(self, x: str, weight: str) -> str:
        # The spelling that runtimes recognise and compute as one.
        square = self.op("Pow", x, self.constant(2.0, "float32"))
        mean = self.op("ReduceMean", square, self.constant([-1], "int64"), keepdims=1)
        root = self.op("Sqrt", self.op("Add", mean, self.constant(self.eps, "float32")))
        found: str = self.op("Mul", self.op("Div", x, root), weight)
        return found

    def layer_norm(self, x: str, weight: str, bias: str) -> str:
        biases = [bias] if bias in self.weights else []
        found: str = self.op("LayerNormalization", x, weight, *biases, axis=-1, epsilon=self.eps)
        return found

    def mlp(self, x: str) -> str:
        match self.shape.function:
            case "silu-gated":
                gate = self.activation("silu", self.linear(x, "gate"))
                both = self.op("Mul", gate, self.linear(x, "up"))
            case "gelu-packed":
                halves = self.linear(x, "gate_up")
                active, gate = self.op("Split", halves, outputs=2, axis=-1, num_outputs=2)
                both = self.op("Mul", self.activation("gelu", active), gate)
            case other:
                raise OpUnsupported(f"MLPs are silu-gated or gelu-packed; found {other!r}")
        return self.linear(both, "down")

    # --- a decoder layer ---

    def _layer(self) -> OperatorGraph:
        s, a = self.shape, attention_of(self.shape)
        y = "hidden" if a.post_norm else self.rms_norm("hidden", "input_norm")
        q = self._rope(self._heads(y, "q", a.heads, a))
        k = self._rope(self._heads(y, "k", a.kv_heads, a))
        v = self._heads(y, "v", a.kv_heads, a)
        y = self.linear(self._attention(q, k, v, a), "o")
        x = self.op("Add", "hidden", self.rms_norm(y, "input_norm") if a.post_norm else y)
        y = self.mlp(x if a.post_norm else self.rms_norm(x, "post_norm"))
        x = self.op("Add", x, self.rms_norm(y, "post_norm") if a.post_norm else y)
        for value, name in ((x, "y"), (k, "new_keys"), (v, "new_values")):
            self._finish(value, name)
        cache: Size = (1, a.kv_heads, "past", a.head_dim)
        new: Size = (1, a.kv_heads, "rows", a.head_dim)
        angle: Size = ("rows", a.head_dim)
        inputs: dict[str, Size] = {
            "hidden": ("rows", s.k),
            "cos": angle,
            "sin": angle,
            "mask": ("rows", "total"),
            "past_keys": cache,
            "past_values": cache,
        }
        return self._graph(inputs, {"y": ("rows", s.k), "new_keys": new, "new_values": new})

    def reshape(self, x: str, *size: int) -> str:
        found: str = self.op("Reshape", x, self.constant(size, "int64"))
        return found

    def _heads(self, x: str, role: str, heads: int, a: AttentionShape) -> str:
        """Queries, keys or values [1, heads, M, head_dim]."""
        y, normed = self.linear(x, role, f"{role}.bias"), role != "v"
        if normed and a.qk_norm == "full":
            y = self.rms_norm(y, f"{role}_norm")
        y = self.reshape(y, 1, -1, heads, a.head_dim)
        if normed and a.qk_norm == "head":
            y = self.rms_norm(y, f"{role}_norm")
        return str(self.op("Transpose", y, perm=[0, 2, 1, 3]))

    def _rope(self, x: str) -> str:
        """Rotate by angles [M, head_dim]; halves are the pairs, as in transformers."""
        first, second = self.op("Split", x, outputs=2, axis=-1, num_outputs=2)
        turned = self.op("Concat", self.op("Neg", second), first, axis=-1)
        both = self.op("Mul", x, "cos"), self.op("Mul", turned, "sin")
        return str(self.op("Add", *both))

    def _attention(self, q: str, k: str, v: str, a: AttentionShape) -> str:
        """Attend over past and new keys; queries of one group are rows of one product."""
        groups = a.heads // a.kv_heads
        k = self.op("Concat", "past_keys", k, axis=2)
        v = self.op("Concat", "past_values", v, axis=2)
        q = self.op("Mul", q, self.constant(a.head_dim**-0.5, "float32"))
        q = self.reshape(q, 1, a.kv_heads, -1, a.head_dim)  # [1, kv, groups * M, head_dim]
        scores = self.op("MatMul", q, self.op("Transpose", k, perm=[0, 1, 3, 2]))
        if groups > 1:
            # Masks are per token: groups and tokens are told apart for a moment.
            shape = self.op("Shape", "mask")
            split = self.op("Concat", self.constant([a.kv_heads, groups], "int64"), shape, axis=0)
            masked = self.op("Add", self.op("Reshape", scores, split), "mask")
            total = self.op("Gather", shape, self.constant([1], "int64"), axis=0)
            lead = self.constant([1, a.kv_heads, -1], "int64")
            merged = self.op("Concat", lead, total, axis=0)
            scores = self.op("Reshape", self.op("Softmax", masked, axis=-1), merged)
        else:
            scores = self.op("Softmax", self.op("Add", scores, "mask"), axis=-1)
        y = self.op("MatMul", scores, v)  # [1, kv, groups * M, head_dim]
        y = self.reshape(y, 1, a.heads, -1, a.head_dim)
        y = self.op("Transpose", y, perm=[0, 2, 1, 3])
        return self.reshape(y, -1, a.heads * a.head_dim)
