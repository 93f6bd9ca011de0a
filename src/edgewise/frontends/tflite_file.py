"""TFLite models: the same graph for cuts, and pieces of the model between two tensors.

Stateful models and those with control flow are refused: a state cannot be on both sides of a cut.
"""

from __future__ import annotations

import copy
import importlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgewise.errors import BackendUnavailable, ModelError
from edgewise.model.graph import Graph, Op, TensorSpec

_SCHEMA = "ai_edge_litert.schema_py_generated"
_EDGE_TPU_OP = "edgetpu-custom-op"
_VIEWS = frozenset({
    "RESHAPE", "SQUEEZE", "EXPAND_DIMS", "TRANSPOSE", "SLICE", "STRIDED_SLICE", "SPLIT", "SPLIT_V",
    "UNPACK", "SHAPE", "BROADCAST_TO",
})  # fmt: skip
# Place of the weights among the inputs, and which of their axes are summed over per result.
_SUMMED = {
    "CONV_2D": (1, (1, 2, 3)),  # [out, height, width, in]
    "DEPTHWISE_CONV_2D": (1, (1, 2)),  # [1, height, width, out]
    "FULLY_CONNECTED": (1, (1,)),  # [out, in]
    "CONV_3D": (1, (0, 1, 2, 3)),  # [depth, height, width, in, out]
}
_CONTRACTIONS = {*_SUMMED, "TRANSPOSE_CONV", "BATCH_MATMUL"}
_ROLES = ("inputs", "outputs", "intermediates")
_STATEFUL = frozenset({"VAR_HANDLE", "ASSIGN_VARIABLE", "READ_VARIABLE", "CALL_ONCE"})
_DTYPES = {
    "FLOAT64": "float64", "FLOAT32": "float32", "FLOAT16": "float16", "BOOL": "bool",
    "INT64": "int64", "INT32": "int32", "INT16": "int16", "INT8": "int8",
    "UINT64": "uint64", "UINT32": "uint32", "UINT16": "uint16", "UINT8": "uint8",
}  # fmt: skip


def import_schema() -> Any:
    """Import LiteRT's flatbuffer schema, or say which extra to install."""
    try:
        importlib.import_module("flatbuffers")
        return importlib.import_module(_SCHEMA)
    except ImportError as error:
        raise BackendUnavailable(
            f"the ai-edge-litert package is not installed ({error})",
            help="pip install 'edgewise[litert]'",
        ) from error


class TfliteSource:
    """A TFLite model in memory.

    Args:
        content: Of the file.
        name: For people.

    Attributes:
        graph: Operators, for cuts and costs.

    Raises:
        BackendUnavailable: The ``ai-edge-litert`` package is not installed.
        ModelError: The content is no such model, is damaged, or cannot be cut.
    """

    def __init__(self, content: bytes, *, name: str) -> None:
        self._schema = import_schema()
        self.content = content
        self.name = name
        if content[4:8] != b"TFL3":
            raise ModelError(
                f"{name!r} is not a TFLite model: expected the mark 'TFL3' at byte 4",
                help="export it again, or check that the download is complete",
            )
        try:
            self._model = self._schema.ModelT.InitFromPackedBuf(content, 0)
            self._refuse_what_cannot_be_cut()
            self._subgraph = self._model.subgraphs[0]
            self._data = [self._bytes_of(b) for b in self._model.buffers or ()]
            self.graph = self._describe()
        except ModelError:
            raise
        except Exception as error:  # the flatbuffer reader checks nothing and fails anyhow
            raise ModelError(
                f"the TFLite model {name!r} is damaged: {type(error).__name__}: {error}",
                help="export it again; a truncated copy is the usual cause",
            ) from error

    @classmethod
    def read(cls, path: str | Path) -> TfliteSource:
        """Read a file.

        Raises:
            ModelError: The file is missing, or as the class says.
        """
        path = Path(path)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ModelError(
                f"cannot read the TFLite model {path}: {error.strerror}", help="check the path"
            ) from error
        return cls(content, name=path.stem)

    def segment(self, start: str, stop: str) -> bytes:
        """Content of a complete file that computes one tensor from another.

        Constants that both halves of a model read are in both. Signatures and metadata, which
        speak of the whole model, are left out.

        Raises:
            ModelError: ``stop`` also depends on something that does not pass through ``start``.
        """
        schema, old = self._schema, self._subgraph
        ops = [copy.copy(old.operators[i]) for i in self.graph.between(start, stop)]
        ends = [self._index[start], self._index[stop]]
        used = {i for op in ops for role in _ROLES for i in _ints(getattr(op, role))} - {-1}
        tensors = {index: k for k, index in enumerate(sorted(used | set(ends)))}
        codes = {index: k for k, index in enumerate(sorted({int(op.opcodeIndex) for op in ops}))}
        written = {i for op in ops for i in _ints(op.outputs)}
        read = {self._buffer(i) for i in tensors if i not in written}
        kept = sorted(i for i in read if self._size(i))
        buffers = {index: k + 1 for k, index in enumerate(kept)}  # 0 is the empty one

        new = schema.SubGraphT()
        new.name = b"main"
        new.inputs, new.outputs = [tensors[ends[0]]], [tensors[ends[1]]]
        new.tensors = [copy.copy(old.tensors[i]) for i in tensors]
        for tensor in new.tensors:
            tensor.buffer = buffers.get(int(tensor.buffer), 0)
        new.operators = ops
        for op in ops:
            op.opcodeIndex = codes[int(op.opcodeIndex)]
            op.debugMetadataIndex = -1
            for role in _ROLES:
                indices = [tensors.get(i, -1) for i in _ints(getattr(op, role))]
                setattr(op, role, indices or None)
        model = schema.ModelT()
        model.version = self._model.version
        model.description = self._model.description
        model.operatorCodes = [self._model.operatorCodes[i] for i in codes]
        model.subgraphs = [new]
        model.buffers = [_Buffer(schema, None), *(_Buffer(schema, self._data[i]) for i in buffers)]
        builder = importlib.import_module("flatbuffers").Builder(1 << 16)
        builder.Finish(model.Pack(builder), b"TFL3")
        return bytes(builder.Output())

    def constants(self, start: str, stop: str) -> Mapping[int, int]:
        """Parameters that the piece between two tensors reads: number of the buffer, bytes."""
        reads = {
            self._buffer(i)
            for k in self.graph.between(start, stop)
            for i in _ints(self._subgraph.operators[k].inputs)
            if i in self._constant
        }
        return {buffer: self._size(buffer) for buffer in reads}

    def _refuse_what_cannot_be_cut(self) -> None:
        kinds = [_kind(self._schema, code) for code in self._model.operatorCodes or ()]
        if _EDGE_TPU_OP in kinds:
            raise ModelError(
                f"{self.name!r} is compiled for the Edge TPU: its operators are sealed in one"
                f" {_EDGE_TPU_OP!r}, which cannot be cut",
                help="give the file that the compiler was given, without '_edgetpu' in its name",
            )
        if len(self._model.subgraphs) != 1:
            raise ModelError(
                f"expected one graph in {self.name!r}, found {len(self._model.subgraphs)}:"
                " control flow cannot be cut",
            )
        stateful = _STATEFUL.intersection(kinds)
        if stateful or any(t.isVariable for t in self._model.subgraphs[0].tensors):
            raise ModelError(f"{self.name!r} keeps a state between calls, which cannot be cut")

    def _bytes_of(self, buffer: Any) -> npt.NDArray[np.uint8] | None:
        if buffer.offset > 1:  # big models keep their data behind the flatbuffer
            found = self.content[buffer.offset : buffer.offset + buffer.size]
            if len(found) < buffer.size:
                raise ValueError(f"{len(found)} of {buffer.size} bytes of a constant")
            return np.frombuffer(found, dtype=np.uint8)
        data: npt.NDArray[np.uint8] | None = buffer.data
        return data

    def _size(self, buffer: int) -> int:
        data = self._data[buffer] if buffer < len(self._data) else None
        return 0 if data is None else len(data)

    def _buffer(self, tensor: int) -> int:
        return int(self._subgraph.tensors[tensor].buffer)

    def _describe(self) -> Graph:
        sub = self._subgraph
        written = {i for op in sub.operators for i in _ints(op.outputs)}
        inputs = _ints(sub.inputs)
        self._constant = set(range(len(sub.tensors))) - written - set(inputs)
        flowing = [i for i in range(len(sub.tensors)) if i not in self._constant]
        names = _names(sub.tensors, flowing)
        self._index = {name: i for i, name in names.items()}
        for i in inputs:
            _check_sizes(sub.tensors[i], names[i])
        types = {value: key for key, value in vars(self._schema.TensorType).items()}
        tensors = {}
        for i, name in names.items():
            tensor = sub.tensors[i]
            dtype = _DTYPES.get(types.get(int(tensor.type), ""))
            # An axis that the runtime settles by itself; the first is the batch, which is 1.
            if dtype is not None and all(d >= 0 for d in _signature(tensor)[1:]):
                tensors[name] = TensorSpec(name=name, shape=tuple(_ints(tensor.shape)), dtype=dtype)
        return Graph(
            inputs=tuple(names[i] for i in inputs),
            outputs=tuple(names[i] for i in _ints(sub.outputs)),
            ops=tuple(self._describe_op(k, op, names) for k, op in enumerate(sub.operators)),
            tensors=tensors,
        )

    def _describe_op(self, number: int, op: Any, names: Mapping[int, str]) -> Op:
        kind = _kind(self._schema, self._model.operatorCodes[op.opcodeIndex])
        reads = _ints(op.inputs)
        weights = {self._buffer(i) for i in reads if i in self._constant}
        outputs = tuple(names[i] for i in _ints(op.outputs))
        return Op(
            name=f"{kind}_{number}",
            kind=kind,
            inputs=tuple(names[i] for i in reads if i in names),
            outputs=outputs,
            flops=self._flops(kind, op),
            weight_bytes=sum(self._size(i) for i in weights),
            scope=outputs[0].replace("/", ".") if outputs else "",
            is_view=kind in _VIEWS,
            is_contraction=kind in _CONTRACTIONS,
        )

    def _flops(self, kind: str, op: Any) -> float:
        """Work for one sample: 2 per multiply-add, 1 per element of anything else, 0 for views."""
        if kind in _VIEWS or not _ints(op.outputs):
            return 0.0

        def shape(index: int) -> list[int]:
            return _ints(self._subgraph.tensors[op.inputs[index]].shape)

        size = float(math.prod(_ints(self._subgraph.tensors[op.outputs[0]].shape)))
        if kind in _SUMMED:
            place, axes = _SUMMED[kind]
            return 2.0 * size * math.prod(shape(place)[axis] for axis in axes)
        if kind == "TRANSPOSE_CONV":  # each input element times [out, height, width]
            return 2.0 * math.prod(shape(2)) * math.prod(shape(1)[:3])
        if kind == "BATCH_MATMUL":
            return 2.0 * size * shape(0)[-2 if op.builtinOptions.adjX else -1]
        return size


class _Buffer:
    """A constant as the schema wants it, at a multiple of 16 bytes; its own writer forgets that."""

    def __init__(self, schema: Any, data: npt.NDArray[np.uint8] | None) -> None:
        self._schema, self._data = schema, data

    def Pack(self, builder: Any) -> Any:  # noqa: N802 - the schema's name
        vector = None
        if self._data is not None:
            builder.Prep(16, len(self._data))
            vector = builder.CreateNumpyVector(self._data)
        self._schema.BufferStart(builder)
        if vector is not None:
            self._schema.BufferAddData(builder, vector)
        return self._schema.BufferEnd(builder)


def _kind(schema: Any, code: Any) -> str:
    """Name of an operator; the code was once one byte, in another field."""
    number = max(code.builtinCode, code.deprecatedBuiltinCode)
    if number == schema.BuiltinOperator.CUSTOM or code.customCode:
        return str((code.customCode or b"CUSTOM").decode())
    known = {value: key for key, value in vars(schema.BuiltinOperator).items()}
    return str(known.get(number, f"OPERATOR_{number}"))


def _ints(vector: Any) -> list[int]:
    """A vector of the flatbuffer, which is ``None`` where the file leaves it out."""
    return [] if vector is None else [int(i) for i in vector]


def _signature(tensor: Any) -> list[int]:
    """The shape with -1 for axes that are not fixed."""
    return _ints(tensor.shapeSignature) or _ints(tensor.shape)


def _check_sizes(tensor: Any, name: str) -> None:
    if any(d < 0 for d in _signature(tensor)[1:]):
        raise ModelError(
            f"expected input {name!r} with fixed sizes after the batch axis, found"
            f" {_signature(tensor)}",
            help="export it for one input size; only the first axis may be open",
        )


def _names(tensors: Sequence[Any], indices: Sequence[int]) -> dict[int, str]:
    """Short unique names: a converter joins the names of all that it fused with semicolons."""
    first = {}
    for i in indices:
        full = (tensors[i].name or b"").decode(errors="replace")
        first[i] = full.partition(";")[0] or f"tensor_{i}"
    count = Counter(first.values())
    return {i: name if count[name] == 1 else f"{name}#{i}" for i, name in first.items()}
