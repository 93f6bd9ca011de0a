"""A piece of a model, loaded where it runs: one array in, one array out, any element type."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from edgewise.errors import ConfigError, ShapeError

Array = npt.NDArray[Any]
PieceFormat = Literal["onnx", "tflite"]

_LOADERS = {
    "onnx": "edgewise.backends.onnxruntime_piece",
    "tflite": "edgewise.backends.litert",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySpec:
    """Shape and element type of what goes in or comes out.

    Attributes:
        shape: With the batch axis, which is 1.
        dtype: numpy's name, for example ``"int8"``.
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Size, bytes."""
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


class Piece(ABC):
    """Not for two threads at once: load one for each worker.

    Attributes:
        backend: Runtime on device.
        threads: Threads of each call.
        input: What goes in.
        output: What comes out.
    """

    backend: str
    threads: int
    input: ArraySpec
    output: ArraySpec

    @abstractmethod
    def run(self, x: Array) -> Array:
        """Compute the piece.

        Args:
            x: Of the input's shape and type; only read.

        Returns:
            A fresh array of the output's shape and type.

        Raises:
            ShapeError: ``x`` does not fit.
            BackendError: The runtime failed; its own message is the cause.
        """

    def close(self) -> None:  # noqa: B027 - nothing to give back, by default
        """Give the runtime's memory back; the piece cannot run afterwards."""

    def check(self, x: Array) -> None:
        """Raise `ShapeError` unless ``x`` fits the input."""
        if x.shape != self.input.shape or x.dtype.name != self.input.dtype:
            raise ShapeError(
                f"expected an array of {self.input.dtype} {self.input.shape}, found"
                f" {x.dtype.name} {x.shape}"
            )


def load_piece(model: bytes, format: PieceFormat, *, threads: int = 1) -> Piece:  # noqa: A002
    """Load a piece on the CPU runtime that reads its format.

    Args:
        model: Content of a complete model file with one input and one output.
        format: Of that file.
        threads: Threads of each call; none of them spins while idle.

    Raises:
        BackendUnavailable: The runtime is not installed.
        BackendError: It refuses the model.
        ConfigError: The format is unknown, or there are no threads.
    """
    if format not in _LOADERS:
        raise ConfigError(f"unknown format of a piece {format!r}; known: {', '.join(_LOADERS)}")
    if threads < 1:
        raise ConfigError(f"expected at least one thread, found {threads}")
    piece: Piece = importlib.import_module(_LOADERS[format]).load(model, threads=threads)
    return piece
