"""Models that can be cut in two: every place with one tensor crossing, both halves as files.

Read by format: ONNX here through `onnx_file`, TFLite through `tflite_file`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from edgewise.errors import ModelError

PieceFormat = Literal["onnx", "tflite"]

_READERS = {
    ".onnx": "edgewise.frontends.onnx_partition",
    ".tflite": "edgewise.frontends.tflite_partition",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A place to cut, with what lies before it.

    Attributes:
        tensor: Name of the tensor that crosses.
        shape: Of that tensor, the batch axis being 1.
        dtype: numpy's name of its element type.
        nbytes: What crosses, bytes.
        prefix_bytes: Parameters before it, bytes, as stored in the file.
        flops: Work before it; a multiply-add counts two.
        depth_ratio: That work as a share of the whole, 0 to 1.
    """

    tensor: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    prefix_bytes: int
    flops: float
    depth_ratio: float


class Cutter(Protocol):
    """Makes the halves of one model; what a reader returns inside a `PartitionedModel`."""

    def segment(self, start: str, stop: str) -> bytes:
        """Content of a complete model file that computes one tensor from another."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionedModel:
    """One model and its P + 1 places: 0 is its input, P its answer.

    Attributes:
        name: For people and profiles.
        version: SHA-256 of the file.
        format: Of the file and of both halves.
        places: In order; inputs first, answer last.
        cutter: Makes the halves.
    """

    name: str
    version: str
    format: PieceFormat
    places: tuple[Place, ...]
    cutter: Cutter = field(repr=False)

    @property
    def last(self) -> int:
        """P."""
        return len(self.places) - 1

    def prefix(self, place: int) -> bytes:
        """Content of the model file before a place; ``place`` is 1 to P."""
        return self.segment(0, place)

    def suffix(self, place: int) -> bytes:
        """Content of the model file after a place; ``place`` is 0 to P - 1."""
        return self.segment(place, self.last)

    def segment(self, start: int, stop: int) -> bytes:
        """Content of the model file between two places.

        Raises:
            ModelError: The places are not in order, or that piece cannot be written.
        """
        if not 0 <= start < stop <= self.last:
            raise ModelError(
                f"model {self.name!r} has the places 0 to {self.last}; found a piece from {start}"
                f" to {stop}"
            )
        return self.cutter.segment(self.places[start].tensor, self.places[stop].tensor)


def read_partitioned(
    path: str | Path, *, places: int | Sequence[str] | None = None
) -> PartitionedModel:
    """Read a model file and find where it can be cut.

    Args:
        path: An ``.onnx`` or ``.tflite`` file.
        places: How many inner places at most, at about equal steps of work; names of tensors to
            cut at; ``None`` for every place that differs in work.

    Raises:
        ModelError: The file is missing, damaged, of another format, or has several inputs or
            answers.
        BackendUnavailable: A package that reads it is not installed.
        ConfigError: A name is no place to cut.
    """
    path = Path(path)
    module = _READERS.get(path.suffix.lower())
    if module is None:
        raise ModelError(
            f"cannot cut {path.name!r}: expected one of {', '.join(_READERS)}",
            help="export the model to ONNX or TFLite",
        )
    found: PartitionedModel = importlib.import_module(module).read(path, places=places)
    return found
