"""ONNX Runtime on the CPU for pieces of any element type: one session each, no spinning threads."""

from __future__ import annotations

from typing import Any

from edgewise.backends.base import import_runtime
from edgewise.backends.piece import Array, ArraySpec, Piece
from edgewise.backends.threads import onnxruntime_options
from edgewise.errors import BackendError

NAME = "onnxruntime:CPU"
_DTYPES = {
    "float": "float32", "double": "float64", "float16": "float16", "bool": "bool",
    "int8": "int8", "int16": "int16", "int32": "int32", "int64": "int64",
    "uint8": "uint8", "uint16": "uint16", "uint32": "uint32", "uint64": "uint64",
}  # fmt: skip


def load(model: bytes, *, threads: int = 1) -> Piece:
    """Load an ONNX file.

    Args:
        model: Content of the file, with one input and one output.
        threads: Intra-op threads of each call.

    Raises:
        BackendUnavailable: onnxruntime is not installed.
        BackendError: It refuses the model.
    """
    runtime = import_runtime("onnxruntime", backend=NAME, extra="onnx")
    return OnnxRuntimePiece(runtime, model, threads=threads)


class OnnxRuntimePiece(Piece):
    """One session."""

    backend = NAME

    def __init__(self, runtime: Any, model: bytes, *, threads: int) -> None:
        self.threads = threads
        try:
            self._session = _session(runtime, model, threads, precise=True)
        except Exception:  # noqa: BLE001 - its errors have no common ancestor
            try:
                self._session = _session(runtime, model, threads, precise=False)
            except Exception as error:
                raise BackendError(f"ONNX Runtime refuses the model: {error}") from error
        ends = (self._session.get_inputs(), self._session.get_outputs())
        if [len(end) for end in ends] != [1, 1]:
            raise BackendError(
                f"expected a model with one input and one output, found {len(ends[0])} and"
                f" {len(ends[1])}"
            )
        self.input, self.output = (_spec(end[0]) for end in ends)
        self._input, self._output = (end[0].name for end in ends)

    def run(self, x: Array) -> Array:
        """Compute the piece, as `Piece.run`."""
        self.check(x)
        if self._session is None:
            raise BackendError("this piece is closed")
        try:
            found: Array = self._session.run([self._output], {self._input: x})[0]
        except Exception as error:  # its errors have no common ancestor
            raise BackendError(f"ONNX Runtime failed: {error}") from error
        return found

    def close(self) -> None:
        """Give the session's memory back."""
        self._session = None


def _session(runtime: Any, model: bytes, threads: int, *, precise: bool) -> Any:
    """Make a session.

    On x86 without VNNI products of 8 bits saturate (a quarter of the largest answer of a
    MobileNetV2 was lost), and where depends on what is fused, so on the cuts. ``precise`` avoids
    that, but ONNX Runtime 1.32 then refuses a model in which two operators share 8-bit weights.
    """
    options = onnxruntime_options(threads, log_severity=4)  # errors arrive as exceptions
    options.add_session_config_entry("session.x64quantprecision", "1" if precise else "0")
    return runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _spec(value: Any) -> ArraySpec:
    dtype = _DTYPES.get(value.type.removeprefix("tensor(").removesuffix(")"))
    if dtype is None or not all(isinstance(size, int) for size in value.shape):
        raise BackendError(
            f"expected {value.name!r} to be an array of fixed size, found {value.type}"
            f" {value.shape}",
            help="export the model for one input size and one sample",
        )
    return ArraySpec(shape=tuple(value.shape), dtype=dtype)
