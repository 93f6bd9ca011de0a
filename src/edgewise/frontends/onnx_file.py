"""ONNX models: the same graph for cuts, and pieces of the model between two tensors."""

from __future__ import annotations

import hashlib
import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from edgewise.errors import BackendUnavailable, ModelError
from edgewise.model.graph import Graph, Op, TensorSpec

_VIEWS = frozenset({
    "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Split", "Identity", "Expand",
})  # fmt: skip
_CONTRACTIONS = frozenset({"Conv", "Gemm", "MatMul", "Einsum", "ConvInteger", "QLinearConv"})


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

    Attributes:
        graph: Operators, for cuts and costs.
        name: From the file.
        dynamic_batch: Whether the first axis of the input is symbolic.
    """

    def __init__(self, proto: Any, *, name: str) -> None:
        self.proto = proto
        self.name = name
        self._initialisers = {t.name: t for t in proto.graph.initializer}
        self._nodes = [_node_with_name(n, i) for i, n in enumerate(proto.graph.node)]
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
                f"{path} is not a usable ONNX model: {str(error).strip().splitlines()[0]}",
                help="export it again; a truncated copy or missing external data is the usual cause",
            ) from error
        return cls(proto, name=path.stem)

    def _describe(self) -> Graph:
        onnx = import_onnx()
        inputs = [v for v in self.proto.graph.input if v.name not in self._initialisers]
        self.dynamic_batch = any(
            bool(v.type.tensor_type.shape.dim) and bool(v.type.tensor_type.shape.dim[0].dim_param)
            for v in inputs
        )
        one = _infer_shapes(onnx, self.proto, self._initialisers, batch=1)
        two = _infer_shapes(onnx, self.proto, self._initialisers, batch=2)
        # Tensors whose first axis is the batch: these may cross a cut.
        by_sample = {
            name: spec
            for name, spec in one.items()
            if name not in self._initialisers
            and spec.shape[:1] == (1,)
            and (not self.dynamic_batch or (name in two and two[name].shape[0] == 2))
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
            outputs=tuple(v.name for v in self.proto.graph.output),
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
                f"this ONNX model was exported for one sample, found a batch of {batch}",
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
        for node in self._nodes:
            digest.update(node.SerializeToString(deterministic=True))
        for name in sorted(self._initialisers):
            array = onnx.numpy_helper.to_array(self._initialisers[name])
            digest.update(f"{name}|{array.dtype}|{array.shape}".encode())
            digest.update(array.tobytes())
        return digest.hexdigest()


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
        if value.name not in initialisers and dims and dims[0].dim_param:
            dims[0].Clear()
            dims[0].dim_value = batch
    del single.graph.value_info[:]
    for value in single.graph.output:
        value.type.tensor_type.ClearField("shape")
    try:
        inferred = onnx.shape_inference.infer_shapes(single, data_prop=True)
    except Exception as error:
        raise ModelError(
            f"ONNX cannot infer the shapes of this model: {str(error).strip().splitlines()[0]}"
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
    sizes = {
        r: math.prod(initialisers[r].dims) * 4 for r in dict.fromkeys(reads) if r in initialisers
    }
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
        return tensors[name].shape if name in tensors else ()

    if node.op_type in ("Conv", "ConvInteger"):
        return 2.0 * size * math.prod(shape(1)[1:])
    if node.op_type == "Gemm":
        transposed = any(a.name == "transA" and a.i for a in node.attribute)
        left = shape(0)
        return 2.0 * size * (left[0] if transposed else left[-1]) if left else size
    if node.op_type == "MatMul":
        left = shape(0)
        return 2.0 * size * left[-1] if left else size
    return size
