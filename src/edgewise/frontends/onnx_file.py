"""ONNX models: the same graph for cuts, and pieces of the model between two tensors."""

from __future__ import annotations

import hashlib
import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from edgewise.errors import BackendUnavailable, ModelError
from edgewise.model.graph import Graph, Op, TensorSpec, einsum_flops

_VIEWS = frozenset({
    "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Split", "Identity",
    "Expand", "Dropout", "Shape", "Constant",
})  # fmt: skip
_WEIGHT_OF_CONVOLUTION = {"Conv": 1, "ConvInteger": 1, "QLinearConv": 3}
_PRODUCTS = frozenset({"MatMul", "MatMulInteger", "QLinearMatMul"})
_CONTRACTIONS = {*_WEIGHT_OF_CONVOLUTION, *_PRODUCTS, "ConvTranspose", "Gemm", "Einsum"}


def import_onnx() -> Any:
    """Import onnx, or say which extra to install."""
    try:
        return importlib.import_module("onnx")
    except ImportError as error:
        raise BackendUnavailable(
            f"the onnx package is not installed ({error})", help="pip install 'edgewise[onnx]'"
        ) from error


class OnnxSource:
    """An ONNX model in memory.

    Args:
        proto: An ``onnx.ModelProto``; nodes without a name are given one.
        name: For people.
        answer: The output that is the logits, where the other outputs are to be had as well; by
            default the first of rank two, else the first, and the others are dropped.

    Attributes:
        graph: Operators, for cuts and costs.
        name: From the file.
        dynamic_batch: Whether the first axis of the input is symbolic.
    """

    def __init__(self, proto: Any, *, name: str, answer: str | None = None) -> None:
        self.proto = proto
        self.name = name
        self._initialisers = {t.name: t for t in proto.graph.initializer}
        self._answer = answer or _answer(proto.graph)
        kept = {self._answer} if answer is None else {v.name for v in proto.graph.output}
        self._nodes = _needed([_node_with_name(n, i) for i, n in enumerate(proto.graph.node)], kept)
        written = [name for node in self._nodes for name in node.output if name]
        if len(set(written)) < len(written):
            twice = next(name for name in written if written.count(name) > 1)
            raise ModelError(f"the ONNX model {name!r} writes {twice!r} twice")
        # An exporter that finds two values equal keeps one and copies it to the other's name.
        self._same_as: dict[str, str] = {}
        for node in self._nodes:
            if node.op_type == "Identity":
                source = node.input[0]
                self._same_as[node.output[0]] = self._same_as.get(source, source)
        self.dynamic_batch = False
        self.graph = self._describe()

    @classmethod
    def read(cls, path: str | Path) -> OnnxSource:
        """Read a file.

        Raises:
            BackendUnavailable: The ``onnx`` package is not installed.
            ModelError: The file is missing, not ONNX, truncated, or breaks ONNX's rules.
        """
        onnx = import_onnx()
        path = Path(path)
        try:
            proto = onnx.load(path)
            onnx.checker.check_model(proto)
        except FileNotFoundError as error:
            raise ModelError(
                f"expected an ONNX file at {path}, found nothing", help="check the path"
            ) from error
        except Exception as error:
            raise ModelError(
                f"{path} is not a usable ONNX model: {_first_line(error)}",
                help="export it again; a truncated copy or missing external data is the usual"
                " cause",
            ) from error
        return cls(proto, name=path.stem)

    def _describe(self) -> Graph:
        onnx = import_onnx()
        inputs = [v for v in self.proto.graph.input if v.name not in self._initialisers]
        self.dynamic_batch = any(_is_open(d) for v in inputs for d in _dims(v)[:1])
        if len(inputs) == 1:  # more are refused where the model is staged
            _check_sizes(inputs[0])
        one = _infer_shapes(onnx, self.proto, self._initialisers, batch=1)
        two = _infer_shapes(onnx, self.proto, self._initialisers, batch=2)
        # Tensors whose first axis is the batch: these may cross a cut.
        by_sample = {
            name: spec
            for name, spec in one.items()
            if name not in self._initialisers
            and spec.shape[:1] == (1,)
            and (
                not self.dynamic_batch or (name in two and two[name].shape == (2, *spec.shape[1:]))
            )
        }
        self._shapes = {name: spec.shape for name, spec in one.items()}
        # Axes that grow with the batch, by how much.
        self._growth = {
            name: tuple(b - a for a, b in zip(spec.shape, two[name].shape, strict=True))
            for name, spec in one.items()
            if name in two and len(spec.shape) == len(two[name].shape)
        }
        ops = tuple(
            _describe_op(node, one, self._initialisers, free=self._is_known_shape(node))
            for node in self._nodes
        )
        return Graph(
            inputs=tuple(v.name for v in inputs),
            outputs=(self._answer,),
            ops=ops,
            tensors=by_sample,
        )

    def _is_known_shape(self, node: Any) -> bool:
        """Whether a node asks for a shape that inference knows, so that no data crosses for it."""
        return node.op_type == "Shape" and node.input[0] in self._growth

    def _shape_constant(self, onnx: Any, node: Any, batch: int) -> Any:
        import numpy as np

        name = node.input[0]
        full = [
            size + growth * (batch - 1)
            for size, growth in zip(self._shapes[name], self._growth[name], strict=True)
        ]
        bounds = {a.name: a.i for a in node.attribute}
        part = full[bounds.get("start", 0) : bounds.get("end", len(full))]
        value = onnx.numpy_helper.from_array(np.array(part, dtype=np.int64))
        return onnx.helper.make_node("Constant", [], list(node.output), name=node.name, value=value)

    def onnx_segment(self, start: str, stop: str, *, batch: int = 1) -> Any:
        """Return the piece between two tensors as a complete model for a fixed batch size.

        Raises:
            ModelError: ``stop`` cannot be computed from ``start`` alone, or the model was exported
                for one sample and ``batch`` is another.
        """
        onnx = import_onnx()
        if batch != 1 and not self.dynamic_batch:
            raise ModelError(
                f"the ONNX model {self.name!r} was exported for one sample, found a batch of"
                f" {batch}",
                help="export it with a symbolic first axis",
            )
        start = self._same_as.get(start, start)
        nodes = [
            self._shape_constant(onnx, node, batch) if self._is_known_shape(node) else node
            for node in (self._nodes[i] for i in self.graph.between(start, stop))
        ]
        used = {name for node in nodes for name in _reads(node)}
        graph = onnx.helper.make_graph(
            nodes,
            f"{start}..{stop}",
            [self._value_info(onnx, start, batch)],
            [self._value_info(onnx, stop, batch)],
            [t for name, t in self._initialisers.items() if name in used],
        )
        model = onnx.helper.make_model(graph, opset_imports=list(self.proto.opset_import))
        model.ir_version = self.proto.ir_version
        model.functions.extend(self.proto.functions)
        return model

    def _value_info(self, onnx: Any, name: str, batch: int) -> Any:
        spec = self.graph.tensors[name]
        element = onnx.helper.np_dtype_to_tensor_dtype(_numpy_dtype(spec.dtype))
        return onnx.helper.make_tensor_value_info(name, element, [batch, *spec.shape[1:]])

    def torch_segment(self, start: str, stop: str) -> Callable[[Any], Any] | None:  # noqa: ARG002
        """ONNX has no torch form: always ``None``."""
        return None

    def weights_digest(self) -> str:
        """SHA-256 over operators and initialisers, independent of how the file stores them."""
        onnx = import_onnx()
        digest = hashlib.sha256()
        for opset in sorted(self.proto.opset_import, key=lambda o: o.domain):
            digest.update(f"{opset.domain}={opset.version}|".encode())
        for node in self._nodes:
            _digest_node(onnx, digest, node)
        for function in self.proto.functions:
            digest.update(f"{function.domain}.{function.name}|{list(function.input)}|".encode())
            for node in function.node:
                _digest_node(onnx, digest, node)
        read = {name for node in self._nodes for name in _reads(node)}
        for name in sorted(read & self._initialisers.keys()):
            digest.update(f"{name}|".encode())
            _digest_array(onnx, digest, self._initialisers[name])
        return digest.hexdigest()


def _digest_array(onnx: Any, digest: Any, tensor: Any) -> None:
    array = onnx.numpy_helper.to_array(tensor)
    digest.update(f"{array.dtype}|{array.shape}|".encode())
    digest.update(array.tobytes())


def _digest_node(onnx: Any, digest: Any, node: Any) -> None:
    """What a node computes; not its name, comments, or how its constants are stored."""
    digest.update(f"{node.domain}.{node.op_type}|{list(node.input)}|{list(node.output)}|".encode())
    for attribute in sorted(node.attribute, key=lambda a: a.name):
        digest.update(f"{attribute.name}|".encode())
        if attribute.HasField("t"):
            _digest_array(onnx, digest, attribute.t)
        elif attribute.HasField("g"):
            for tensor in attribute.g.initializer:
                _digest_array(onnx, digest, tensor)
            for inner in attribute.g.node:
                _digest_node(onnx, digest, inner)
        else:
            digest.update(attribute.SerializeToString(deterministic=True))


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _dims(value: Any) -> list[Any]:
    return list(value.type.tensor_type.shape.dim)


def _is_open(dim: Any) -> bool:
    """Whether an axis has no fixed size; some exporters write -1 for that."""
    return not dim.HasField("dim_value") or dim.dim_value < 1


def _check_sizes(value: Any) -> None:
    """Refuse an input whose axes other than the batch's are open, or that takes several samples.

    Raises:
        ModelError: So it is.
    """
    dims = _dims(value)
    shape = [d.dim_param or d.dim_value or "?" for d in dims]
    if len(dims) < 2 or any(_is_open(d) for d in dims[1:]):
        raise ModelError(
            f"expected input {value.name!r} with fixed sizes after the batch axis, found {shape}",
            help="export it for one input size; only the first axis may be symbolic",
        )
    if not _is_open(dims[0]) and dims[0].dim_value != 1:
        raise ModelError(
            f"expected input {value.name!r} for one sample or a symbolic batch, found {shape}",
            help="export it again with a symbolic first axis",
        )


def _answer(graph: Any) -> str:
    """Name of the output that is the logits: the first of rank two, else the first."""
    if not graph.output:
        raise ModelError("the ONNX model has no output")
    matrices = [v.name for v in graph.output if len(_dims(v)) == 2]
    return str((matrices or [graph.output[0].name])[0])


def _needed(nodes: list[Any], outputs: set[str]) -> list[Any]:
    """The nodes that some outputs depend on, in their order."""
    wanted = set(outputs)
    kept = []
    for node in reversed(nodes):
        if not wanted.isdisjoint(node.output):
            wanted.update(_reads(node))
            kept.append(node)
    return kept[::-1]


def _numpy_dtype(name: str) -> Any:
    import numpy as np

    return np.dtype(name)


def _node_with_name(node: Any, index: int) -> Any:
    if not node.name:
        node.name = f"{node.op_type}_{index}"
    return node


def _subgraph_reads(node: Any) -> Iterator[str]:
    """Outer tensors that the branches of an If or Loop capture."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            written = {n for inner in attribute.g.node for n in inner.output}
            written |= {v.name for v in attribute.g.input}
            written |= {t.name for t in attribute.g.initializer}
            for inner in attribute.g.node:
                for name in [*inner.input, *_subgraph_reads(inner)]:
                    if name and name not in written:
                        yield name


def _reads(node: Any) -> list[str]:
    return [n for n in [*node.input, *_subgraph_reads(node)] if n]


def rename_values(graph: Any, rename: Callable[[str], str]) -> None:
    """Rename every value of an ONNX graph, in place; branches of its nodes included."""
    for value in [*graph.input, *graph.output, *graph.value_info, *graph.initializer]:
        value.name = rename(value.name)
    for node in graph.node:
        node.input[:] = [rename(name) for name in node.input]
        node.output[:] = [rename(name) for name in node.output]
        for attribute in node.attribute:
            if attribute.HasField("g"):
                rename_values(attribute.g, rename)


def _infer_shapes(
    onnx: Any,
    proto: Any,
    initialisers: Mapping[str, Any],
    *,
    batch: int,
) -> dict[str, TensorSpec]:
    """Shape of every tensor for a batch size, by ONNX's own inference."""
    single = onnx.ModelProto()
    single.CopyFrom(proto)
    for value in single.graph.input:
        dims = value.type.tensor_type.shape.dim
        if value.name not in initialisers and dims and _is_open(dims[0]):
            dims[0].Clear()
            dims[0].dim_value = batch
    del single.graph.value_info[:]
    for value in single.graph.output:
        value.type.tensor_type.ClearField("shape")
    try:
        inferred = onnx.shape_inference.infer_shapes(single, data_prop=True)
    except Exception as error:
        raise ModelError(
            f"ONNX cannot infer the shapes of this model: {_first_line(error)}"
        ) from error
    tensors: dict[str, TensorSpec] = {}
    for value in [*inferred.graph.input, *inferred.graph.value_info, *inferred.graph.output]:
        kind = value.type.tensor_type
        dims = [d.dim_value if d.HasField("dim_value") else -1 for d in kind.shape.dim]
        if not kind.elem_type or any(d < 0 for d in dims) or not dims:
            continue
        try:
            dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type).name
        except KeyError:
            continue
        tensors[value.name] = TensorSpec(name=value.name, shape=tuple(dims), dtype=dtype)
    return tensors


def _describe_op(
    node: Any,
    tensors: Mapping[str, TensorSpec],
    initialisers: Mapping[str, Any],
    *,
    free: bool,
) -> Op:
    reads = _reads(node)
    sizes = {r: _nbytes(initialisers[r]) for r in reads if r in initialisers}
    return Op(
        name=node.name,
        kind=node.op_type,
        inputs=() if free else tuple(r for r in reads if r not in initialisers),
        outputs=tuple(o for o in node.output if o),
        flops=_flops(node, tensors, initialisers),
        weight_bytes=sum(sizes.values()),
        scope=node.name.strip("/").replace("/", "."),
        is_view=node.op_type in _VIEWS,
        is_contraction=node.op_type in _CONTRACTIONS,
    )


def _nbytes(tensor: Any) -> int:
    dtype = import_onnx().helper.tensor_dtype_to_np_dtype(tensor.data_type)
    return int(math.prod(tensor.dims) * dtype.itemsize)


def _flops(node: Any, tensors: Mapping[str, TensorSpec], initialisers: Mapping[str, Any]) -> float:
    """Work for one sample: 2 per multiply-add, 1 per element of anything else, 0 for views."""
    out = tensors.get(node.output[0])
    if out is None or node.op_type in _VIEWS or not node.input:
        return 0.0
    size = float(math.prod(out.shape))

    def shape(i: int) -> tuple[int, ...]:
        name = node.input[i]
        if name in initialisers:
            return tuple(initialisers[name].dims)
        return tensors[name].shape if name in tensors else (1,)

    flops = size
    if node.op_type in _WEIGHT_OF_CONVOLUTION:
        flops = 2.0 * size * math.prod(shape(_WEIGHT_OF_CONVOLUTION[node.op_type])[1:])
    elif node.op_type == "ConvTranspose":
        flops = 2.0 * math.prod(shape(0)) * math.prod(shape(1)[1:])
    elif node.op_type == "Gemm":
        transposed = any(a.name == "transA" and a.i for a in node.attribute)
        flops = 2.0 * size * shape(0)[0 if transposed else -1]
    elif node.op_type in _PRODUCTS:
        flops = 2.0 * size * shape(0)[-1]
    elif node.op_type == "Einsum":
        equation = next(a.s.decode() for a in node.attribute if a.name == "equation")
        flops = einsum_flops(equation, [shape(i) for i in range(len(node.input))]) or size
    return flops
