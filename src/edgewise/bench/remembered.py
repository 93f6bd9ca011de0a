"""Outputs of every prefix for a few inputs, computed before a play.

A simulated accelerator computes real outputs on the CPU. While a workload is played, those cores
belong to the suffixes; so a pool of inputs goes through each model once, piece by piece, and what
crosses at each place is kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from edgewise.backends.piece import Array, Piece, load_piece
from edgewise.runtime.tenants.records import Cuttable


def make_inputs(model: Cuttable, *, count: int, rng: np.random.Generator) -> tuple[Array, ...]:
    """Draw inputs that a model accepts: uniform over integers' range, or over 0 to 1.

    Args:
        model: Its place 0 says shape and type.
        count: How many.
        rng: Chance.
    """
    place = model.places[0]
    dtype = np.dtype(place.dtype)
    if np.issubdtype(dtype, np.integer):
        ends = np.iinfo(dtype)
        draw = (
            rng.integers(ends.min, ends.max, place.shape, dtype=dtype, endpoint=True)
            for _ in range(count)
        )
        return tuple(draw)
    return tuple(rng.random(place.shape).astype(dtype) for _ in range(count))


class RememberedModel:
    """A `Cuttable` that knows what its prefixes answer to the pool's inputs.

    Args:
        model: The model.
        inputs: The pool.
        load: Loads a piece.

    Attributes:
        name: Of the model.
        last: P.
        format: Of its pieces.
        places: Of the model.
    """

    def __init__(
        self, model: Cuttable, inputs: Sequence[Array], *, load: Callable[..., Piece] = load_piece
    ) -> None:
        self.name = model.name
        self.last = model.last
        self.format = model.format
        self.places = model.places
        self._model = model
        self._files: dict[bytes, int] = {}  # digest of a prefix's file to its place
        self._outputs: list[dict[bytes, Array]] = [{} for _ in model.places]
        crossing = list(inputs)
        for place in range(1, model.last + 1):
            piece = load(model.segment(place - 1, place), model.format, threads=1)
            crossing = [piece.run(x) for x in crossing]
            piece.close()
            pairs = zip(inputs, crossing, strict=True)
            self._outputs[place] = {_digest(x): y for x, y in pairs}

    def segment(self, start: int, stop: int) -> bytes:
        """Content of the model file between two places."""
        content = self._model.segment(start, stop)
        if start == 0:
            self._files[hashlib.sha256(content).digest()] = stop
        return content

    def __getattr__(self, name: str) -> Any:
        """What only some models have: exits, and suffixes of their own."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._model, name)

    def outputs_of(self, content: bytes) -> Mapping[bytes, Array] | None:
        """What a prefix answers, by digest of its input; ``None`` for other files."""
        place = self._files.get(hashlib.sha256(content).digest())
        return None if place is None else self._outputs[place]


class _Remembered(Piece):
    def __init__(self, piece: Piece, outputs: Mapping[bytes, Array]) -> None:
        self.backend, self.threads = piece.backend, piece.threads
        self.input, self.output = piece.input, piece.output
        self._piece = piece
        self._outputs = outputs

    def run(self, x: Array) -> Array:
        self.check(x)
        known = self._outputs.get(_digest(x))
        return self._piece.run(x) if known is None else known.copy()

    def close(self) -> None:
        self._piece.close()


def remembered_loader(
    models: Sequence[RememberedModel], *, load: Callable[..., Piece] = load_piece
) -> Callable[..., Piece]:
    """Make a loader whose prefixes answer the pool's inputs without computing.

    Args:
        models: Whose prefixes.
        load: Loads a piece, for everything else.
    """

    def load_remembered(content: bytes, format: Any, *, threads: int = 1) -> Piece:  # noqa: A002
        piece = load(content, format, threads=threads)
        found = (outputs for m in models if (outputs := m.outputs_of(content)) is not None)
        outputs = next(found, None)
        return piece if outputs is None else _Remembered(piece, outputs)

    return load_remembered


def _digest(x: Array) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(x).tobytes(), digest_size=16).digest()
