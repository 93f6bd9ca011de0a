"""LiteRT on the CPU: one interpreter per piece, its kernels being XNNPACK's where it has them."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgewise.backends.base import import_runtime
from edgewise.backends.piece import Array, ArraySpec, Piece
from edgewise.errors import BackendError

NAME = "litert:CPU"


def load(model: bytes, *, threads: int = 1) -> Piece:
    """Load a TFLite file.

    Args:
        model: Content of the file, with one input and one output.
        threads: Of each call; fixed once, since the kernels do not hear of a later change.

    Raises:
        BackendUnavailable: ai-edge-litert is not installed.
        BackendError: It refuses the model.
    """
    runtime = import_runtime(
        "ai_edge_litert.interpreter", backend=NAME, extra="litert", said="ai-edge-litert"
    )
    return LiteRtPiece(runtime, model, threads=threads)


class LiteRtPiece(Piece):
    """One interpreter. Its memory is its own, so pieces run beside each other in threads."""

    backend = NAME

    def __init__(self, runtime: Any, model: bytes, *, threads: int) -> None:
        self.threads = threads
        try:
            self._interpreter = runtime.Interpreter(model_content=model, num_threads=threads)
            self._interpreter.allocate_tensors()
        except (RuntimeError, ValueError) as error:
            raise BackendError(f"LiteRT refuses the model: {_first_line(error)}") from error
        ends = (self._interpreter.get_input_details(), self._interpreter.get_output_details())
        if [len(end) for end in ends] != [1, 1]:
            raise BackendError(
                f"expected a model with one input and one output, found {len(ends[0])} and"
                f" {len(ends[1])}"
            )
        self.input, self.output = (_spec(end[0]) for end in ends)
        self._input, self._output = (int(end[0]["index"]) for end in ends)

    def run(self, x: Array) -> Array:
        """Compute the piece, as `Piece.run`."""
        self.check(x)
        if self._interpreter is None:
            raise BackendError("this piece is closed")
        try:
            self._interpreter.set_tensor(self._input, x)
            self._interpreter.invoke()
            found: Array = self._interpreter.get_tensor(self._output)
        except (RuntimeError, ValueError) as error:
            raise BackendError(f"LiteRT failed: {_first_line(error)}") from error
        if found.shape != self.output.shape:
            raise BackendError(
                f"expected an answer of shape {self.output.shape}, found {found.shape}"
            )
        return found

    def close(self) -> None:
        """Give the interpreter's memory back."""
        self._interpreter = None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _spec(details: Any) -> ArraySpec:
    shape = tuple(int(size) for size in details["shape"])
    return ArraySpec(shape=shape, dtype=np.dtype(details["dtype"]).name)
