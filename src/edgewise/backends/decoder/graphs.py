"""Decoder layers, key and value projections, and heads as ONNX graphs of fused operators.

Attention reads and writes a request's own keys and values where they lie: no call copies them.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edgewise.backends.decoder.layers import (
    final_norm,
    form_of,
    head_weight,
    layer_weights,
)
from edgewise.backends.decoder.quantise import BLOCK, Packed
from edgewise.model.language import LanguageModel

Float32 = npt.NDArray[np.float32]
Spec = tuple[int, Sequence[int | str]]

_OPSET = 20
_IR_VERSION = 9
_CONTRIB = "com.microsoft"
_FLOAT, _INT32, _INT64, _BOOL = 1, 6, 7, 9  # of onnx.TensorProto
_IN_INTEGERS = 4  # MatMulNBits rounds activations to 8 bits
PackedMatrices = Mapping[str, Packed]
"""By name: ``"3.qkv"``, ``"3.o"``, ``"3.gate_up"`` and ``"3.down"`` of layer 3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderGraph:
    """A graph, complete but for the matrices that stay where they are.

    Attributes:
        proto: ``onnx.ModelProto``.
        outside: Matrices by name that the runtime is to read in place.
    """

    proto: Any
    outside: Mapping[str, Float32]


def layers_graph(
    model: LanguageModel, start: int, stop: int, *, packed: PackedMatrices | None = None
) -> DecoderGraph:
    """Layers from one exit to the next.

    Inputs are ``hidden`` [1, M, H], ``places`` [1, M] in the text, ``cos`` and ``sin`` [T,
    head_dim / 2], and for each layer ``before_l`` and ``total_l`` [1], cells attended to by the
    last token, less one and all, and ``key_l``, ``value_l`` [1, kv_heads, C, head_dim]. Outputs are
    ``out`` and ``new_key_l``, ``new_value_l``, to be bound to the memory of ``key_l``, ``value_l``.

    Args:
        model: Sizes and weights.
        start: First layer.
        stop: After the last.
        packed: Matrices in few bits; without them, the model's own stay where they are.
    """
    builder, a = _Builder(model, packed), model.architecture
    x, y = "hidden", ""
    for layer in range(start, stop):
        x, y = builder.layer(layer, x, y)
    builder.finish(builder.op("Add", x, y), "out")
    hidden: Spec = (_FLOAT, (1, "rows", a.hidden_size))
    angles: Spec = (_FLOAT, ("length", a.head_dim // 2))
    cells: Spec = (_FLOAT, (1, a.num_key_value_heads, "capacity", a.head_dim))
    layers = range(start, stop)
    counts = {f"{n}_{i}": (_INT32, (1,)) for i in layers for n in ("before", "total")}
    old = {f"{n}_{i}": cells for i in layers for n in ("key", "value")}
    places: Spec = (_INT64, (1, "rows"))
    inputs = {"hidden": hidden, "places": places, "cos": angles, "sin": angles, **counts, **old}
    return builder.graph(inputs, {"out": hidden, **{f"new_{n}": s for n, s in old.items()}})


def projection_graph(
    model: LanguageModel, start: int, stop: int, *, packed: PackedMatrices | None = None
) -> DecoderGraph:
    """Keys and values of several layers from one state, before norms, biases and rotation.

    ``hidden`` [1, M, 1, H] to ``out`` [1, M, 1, layers * 2 * kv_heads * head_dim]. Norms are not
    made part of the matrices: rounded to few bits, these would be others than the layers' own.

    Args:
        model: Sizes and weights.
        start: First layer.
        stop: After the last.
        packed: Matrices in few bits.
    """
    builder, a = _Builder(model, packed), model.architecture
    layers = {i: layer_weights(model, i) for i in range(start, stop)}
    x, own = "hidden", form_of(model).norms_first  # whether each layer reads a state of its own
    if own:
        # One node for all layers' weights of the norm: small nodes take longer than products.
        normed = builder.norm(x, "norm", np.ones(a.hidden_size, np.float32))
        weights = np.stack([w.attention_norm for w in layers.values()])
        x = builder.op("Mul", normed, builder.constant("norms", weights))
    read = builder.apart(x, len(layers), own=own)
    found = []
    if packed is None:
        for (i, w), state in zip(layers.items(), read, strict=True):
            found += [builder.linear(state, f"{i}.{n}", m) for n, m in (("k", w.k), ("v", w.v))]
    else:
        matrices = {i: packed[f"{i}.qkv"].rows(slice(len(w.q), None)) for i, w in layers.items()}
        if any(matrix.means for matrix in matrices.values()):
            wider = builder.apart(builder.with_means(x, (1, BLOCK)), len(layers), own=own)
        for i, matrix in matrices.items():
            state = (wider if matrix.means else read)[i - start]
            found.append(builder.multiplied(state, f"{i}.kv", matrix))
    builder.finish(builder.op("Concat", *found, axis=-1), "out")
    width = len(layers) * 2 * a.num_key_value_heads * a.head_dim
    sizes: list[Spec] = [(_FLOAT, (1, "rows", 1, n)) for n in (a.hidden_size, width)]
    return builder.graph({"hidden": sizes[0]}, {"out": sizes[1]})


def head_graph(
    model: LanguageModel,
    *,
    packed: Packed | None = None,
    tokens: npt.NDArray[np.int64] | None = None,
) -> DecoderGraph:
    """Last norm, an affine map where ``mapped`` is true, and the head.

    Inputs are ``hidden`` [1, M, H], ``mapped``, ``weight`` [H, H] and ``bias`` [H], so that all
    exits share one head; the output is ``logits`` [1, M, V].

    Args:
        model: Sizes and weights.
        packed: The head in few bits.
        tokens: Only these, in this order.
    """
    builder, width = _Builder(model, None), model.architecture.hidden_size
    normed = builder.norm("hidden", "norm", final_norm(model))
    fused = {"domain": _CONTRIB, "transB": 1}
    mapped = builder.choice(
        "mapped",
        ("FusedMatMul", [normed, "weight"], fused),
        ("Identity", [normed], {}),
    )
    mapped = builder.op("Add", mapped, "bias")
    rows = slice(None) if tokens is None else tokens
    if packed is None:
        logits = builder.linear(mapped, "head", head_weight(model)[rows])
    else:
        logits = builder.product(mapped, "head", packed.rows(rows))
    builder.finish(logits, "logits")
    size = model.architecture.vocab_size if tokens is None else len(tokens)
    inputs: dict[str, Spec] = {
        "hidden": (_FLOAT, (1, "rows", width)),
        "mapped": (_BOOL, ()),
        "weight": (_FLOAT, (width, width)),
        "bias": (_FLOAT, (width,)),
    }
    return builder.graph(inputs, {"logits": (_FLOAT, (1, "rows", size))})


class _Builder:
    """Nodes of one graph; methods take and return names of values."""

    def __init__(self, model: LanguageModel, packed: PackedMatrices | None) -> None:
        self._onnx: Any = importlib.import_module("onnx")
        self._model, self._a, self._form = model, model.architecture, form_of(model)
        self._packed = packed
        self._nodes: list[Any] = []
        self._inside: dict[str, Any] = {}
        self._outside: dict[str, Float32] = {}
        self._numbers = itertools.count()

    def graph(self, inputs: Mapping[str, Spec], outputs: Mapping[str, Spec]) -> DecoderGraph:
        helper = self._onnx.helper
        infos = [
            [helper.make_tensor_value_info(n, kind, list(size)) for n, (kind, size) in some.items()]
            for some in (inputs, outputs)
        ]
        outside = [self._elsewhere(name, array) for name, array in self._outside.items()]
        weights = [*self._inside.values(), *outside]
        graph = helper.make_graph(self._nodes, "decoder", *infos, weights)
        opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid(_CONTRIB, 1)]
        proto = helper.make_model(graph, opset_imports=opsets)
        proto.ir_version = _IR_VERSION
        return DecoderGraph(proto=proto, outside=self._outside)

    def _elsewhere(self, name: str, array: Float32) -> Any:
        proto = self._onnx.TensorProto(
            name=name,
            data_type=_FLOAT,
            dims=list(array.shape),
            data_location=self._onnx.TensorProto.EXTERNAL,
        )
        for key, value in (("location", "memory"), ("offset", 0), ("length", array.nbytes)):
            proto.external_data.add(key=key, value=str(value))
        return proto

    # --- one node each ---

    def op(self, kind: str, *inputs: str, outputs: int = 1, domain: str = "", **more: Any) -> Any:
        """Append a node; returns its output's name, or the names of several."""
        names = [f"v{next(self._numbers)}" for _ in range(outputs)]
        node = self._onnx.helper.make_node(kind, list(inputs), names, domain=domain, **more)
        self._nodes.append(node)
        return names[0] if outputs == 1 else names

    def finish(self, value: str, name: str) -> None:
        """Give an output of the graph its name."""
        for node in self._nodes:
            for names in (node.input, node.output):
                names[:] = [name if found == value else found for found in names]

    def choice(
        self, condition: str, yes: tuple[str, list[str], Any], no: tuple[str, list[str], Any]
    ) -> str:
        """One node or another."""
        helper, branches = self._onnx.helper, []
        for branch, (kind, inputs, attributes) in (("yes", yes), ("no", no)):
            node = helper.make_node(kind, inputs, [branch], **attributes)
            info = helper.make_tensor_value_info(branch, _FLOAT, None)
            branches.append(helper.make_graph([node], branch, [], [info]))
        return str(self.op("If", condition, then_branch=branches[0], else_branch=branches[1]))

    def constant(self, name: str, array: npt.NDArray[Any]) -> str:
        """Put an array into the graph."""
        array = np.ascontiguousarray(array)
        self._inside[name] = self._onnx.numpy_helper.from_array(array, name)
        return name

    def linear(self, x: str, name: str, weight: Float32, bias: Float32 | None = None) -> str:
        """Multiply by a matrix [out, in] where it lies; add a bias."""
        self._outside[name] = np.ascontiguousarray(weight)
        y = self.op("FusedMatMul", x, name, domain=_CONTRIB, transB=1)
        return str(y) if bias is None else self.add(y, f"{name}.bias", bias)

    def add(self, x: str, name: str, bias: Float32) -> str:
        return str(self.op("Add", x, self.constant(name, bias)))

    def product(self, x: str, name: str, weight: Packed) -> str:
        """Multiply [1, M, in] by a packed matrix."""
        return self.multiplied(self.with_means(x) if weight.means else x, name, weight)

    def with_means(self, x: str, block: tuple[int, ...] = (BLOCK,)) -> str:
        """Put the means of its blocks behind a state."""
        means = self.op("AveragePool", x, kernel_shape=list(block), strides=list(block))
        return str(self.op("Concat", x, means, axis=-1))

    def multiplied(self, x: str, name: str, weight: Packed) -> str:
        """Multiply [..., in] by a packed matrix, the means it reads among its inputs."""
        inputs = [
            self.constant(f"{name}.{part}", array)
            for part, array in (
                ("steps", weight.steps),
                ("scales", weight.scales),
                ("zero_points", weight.zero_points),
            )
            if array is not None
        ]
        return str(
            self.op(
                "MatMulNBits",
                *(x, *inputs),
                domain=_CONTRIB,
                K=weight.inputs,
                N=len(weight.scales),
                bits=weight.bits,
                block_size=BLOCK,
                accuracy_level=_IN_INTEGERS,
            )
        )

    def norm(self, x: str, name: str, weight: Float32) -> str:
        scale, eps = self.constant(name, weight), self._a.rms_norm_eps
        return str(self.op("SimplifiedLayerNormalization", x, scale, axis=-1, epsilon=eps))

    def add_norm(self, x: str, y: str, name: str, weight: Float32) -> tuple[str, str]:
        """Add to the state what is still to be added, and norm it; returns the state and that."""
        if not y:
            return x, self.norm(x, name, weight)
        kind, eps = "SkipSimplifiedLayerNormalization", self._a.rms_norm_eps
        scale = self.constant(name, weight)
        found = self.op(kind, x, y, scale, domain=_CONTRIB, outputs=4, epsilon=eps)
        self._nodes[-1].output[1:3] = ["", ""]  # mean and deviation
        return found[3], found[0]

    # --- a layer ---

    def layer(self, layer: int, x: str, y: str) -> tuple[str, str]:
        """Append a layer to the state ``x`` + ``y``; returns the same of its output."""
        w = layer_weights(self._model, layer)
        names = f"{layer}.attention_norm", f"{layer}.mlp_norm"
        if self._form.norms_first:
            x, read = self.add_norm(x, y, names[0], w.attention_norm)
            y = self.attention(layer, read)
            x, read = self.add_norm(x, y, names[1], w.mlp_norm)
            return x, self.mlp(layer, read)
        x = self.op("Add", x, y) if y else x
        y = self.norm(self.attention(layer, x), names[0], w.attention_norm)
        x = self.op("Add", x, y)
        return x, self.norm(self.mlp(layer, x), names[1], w.mlp_norm)

    def attention(self, layer: int, x: str) -> str:
        w, a, kind = layer_weights(self._model, layer), self._a, self._form.qk_norm
        matrices, biases = (w.q, w.k, w.v), (w.q_bias, w.k_bias, w.v_bias)
        if self._packed is None:
            parts = [
                self.linear(x, f"{layer}.{role}", matrix, bias)
                for role, matrix, bias in zip("qkv", matrices, biases, strict=True)
            ]
        else:
            joined = self.product(x, f"{layer}.qkv", self._packed[f"{layer}.qkv"])
            bias = np.concatenate(
                [
                    np.zeros(len(m), np.float32) if b is None else b
                    for m, b in zip(matrices, biases, strict=True)
                ]
            )
            if bias.any():
                joined = self.add(joined, f"{layer}.qkv.bias", bias)
            # Attention splits by itself where nothing stands between.
            parts = [joined, "", ""] if kind == "none" else self.split(joined, layer, matrices)
        if w.q_norm is not None and w.k_norm is not None:
            parts[0] = self.norm_heads(parts[0], f"{layer}.q_norm", w.q_norm)
            parts[1] = self.norm_heads(parts[1], f"{layer}.k_norm", w.k_norm)
        inputs = [f"{n}_{layer}" for n in ("key", "value", "before", "total")]
        found = self.op(
            "GroupQueryAttention",
            *(*parts, *inputs, "cos", "sin", "places"),
            domain=_CONTRIB,
            outputs=3,
            num_heads=a.num_attention_heads,
            kv_num_heads=a.num_key_value_heads,
            do_rotary=1,
        )
        self.finish(found[1], f"new_key_{layer}")
        self.finish(found[2], f"new_value_{layer}")
        return self.matrix(found[0], layer, "o", w.o)

    def matrix(self, x: str, layer: int, role: str, weight: Float32) -> str:
        """Multiply by a layer's matrix, packed where it is."""
        name = f"{layer}.{role}"
        if self._packed is None:
            return self.linear(x, name, weight)
        return self.product(x, name, self._packed[name])

    def split(self, x: str, layer: int, matrices: Sequence[Float32]) -> list[str]:
        sizes = np.array([len(m) for m in matrices], np.int64)
        name = self.constant(f"{layer}.sizes_{len(sizes)}", sizes)
        found: list[str] = self.op("Split", x, name, axis=-1, outputs=len(sizes))
        return found

    def apart(self, x: str, layers: int, *, own: bool) -> list[str]:
        """Each layer's part of [1, M, layers, in], if it has one of its own."""
        if not own or layers == 1:
            return [x] * layers
        sizes = self.constant("ones", np.ones(layers, np.int64))
        found: list[str] = self.op("Split", x, sizes, axis=2, outputs=layers)
        return found

    def norm_heads(self, x: str, name: str, weight: Float32) -> str:
        """Norm queries or keys over what the weight covers: a head, or the whole width."""
        if self._form.qk_norm == "width":
            return self.norm(x, name, weight)
        by_head = self.constant("by_head", np.array([0, 0, -1, self._a.head_dim], np.int64))
        flat = self.constant("flat", np.array([0, 0, -1], np.int64))
        return str(
            self.op("Reshape", self.norm(self.op("Reshape", x, by_head), name, weight), flat)
        )

    def mlp(self, layer: int, x: str) -> str:
        w = layer_weights(self._model, layer)
        if self._packed is None:
            gate = self.linear(x, f"{layer}.gate", w.gate)
            up = self.linear(x, f"{layer}.up", w.up)
        else:
            joined = self.product(x, f"{layer}.gate_up", self._packed[f"{layer}.gate_up"])
            gate, up = self.split(joined, layer, [w.gate, w.up])
        if self._a.hidden_act == "silu":
            gate = self.op("QuickGelu", gate, domain=_CONTRIB, alpha=1.0)  # x sigmoid(alpha x)
        else:
            gate = self.op("Gelu", gate)
        return self.matrix(self.op("Mul", gate, up), layer, "down", w.down)
