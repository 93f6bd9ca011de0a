"""A model's matrices in few bits, kept in files of the user's cache: packing takes long.

A file is of one model's layers or head, at one precision. It is written under another name and then
moved, so that it is there whole or not at all; a file that is damaged, or of something else, is
made anew. Nothing depends on it: where it cannot be written, the next start packs again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from edgewise.backends.decoder import quantise
from edgewise.backends.decoder.layers import head_weight, layer_weights
from edgewise.backends.decoder.quantise import BITS, BLOCK, Packed
from edgewise.device.user_cache import user_cache

if TYPE_CHECKING:
    from edgewise.backends.decoder.base import Precision
    from edgewise.model.language import LanguageModel

_log = logging.getLogger(__name__)
Float32 = npt.NDArray[np.float32]
Part = Literal["layers", "head"]

VERSION = 1  # of these files and of the way they are made; raise it when either changes
_FACTS = "facts"
# Smaller models are packed before a file is found.
_WORTH_BYTES = 32 * 1024**2


def packed_folder(model: LanguageModel) -> Path | None:
    """Where packed weights of a model are kept; ``None`` for one that is packed at once."""
    size = sum(w.nbytes for w in model.weights.values())
    return user_cache() / "models" / "packed" if size >= _WORTH_BYTES else None


def packed_matrices(
    model: LanguageModel,
    part: Part,
    precision: Precision,
    *,
    backend: str,
    folder: Path | None,
) -> dict[str, Packed]:
    """The matrices of a model's layers, or its head, in few bits.

    Args:
        model: Weights and sizes.
        part: ``"layers"``: ``"3.qkv"``, ``"3.o"``, ``"3.gate_up"`` and ``"3.down"`` of layer 3, and
            so on, projections that read the same state joined; ``"head"``: ``"head"``.
        precision: ``"int8"`` or ``"int4"``.
        backend: Who asks, for messages.
        folder: Where files of them are kept; ``None`` keeps none.

    Raises:
        BackendUnavailable: The quantiser, or a package that it needs, is not installed.
    """

    def make() -> dict[str, Packed]:
        return {
            name: quantise.pack(matrix(), precision, backend=backend)
            for name, matrix in _matrices(model, part).items()
        }

    if folder is None:
        return make()
    facts = {
        "format": "edgewise-packed-weights",
        "version": VERSION,
        "weights": model.digest,
        "part": part,
        "bits": BITS[precision],
        "block": BLOCK,
    }
    path = folder / f"{model.digest[:32]}-{part}-{precision}.npz"
    found = _read(path, facts)
    if found is not None:
        return found
    _log.info("packing the %s of %r to %s, once", part, model.name, precision)
    made = make()
    try:
        _write(path, facts, made)
    except OSError as error:
        _log.info("packed weights are not kept: %s", error)
    return made


def _matrices(model: LanguageModel, part: Part) -> Mapping[str, Callable[[], Float32]]:
    if part == "head":
        return {"head": lambda: head_weight(model)}
    found: dict[str, Callable[[], Float32]] = {}
    for i in range(model.architecture.num_hidden_layers):
        w = layer_weights(model, i)
        found[f"{i}.qkv"] = lambda w=w: np.concatenate([w.q, w.k, w.v])  # type: ignore[misc]
        found[f"{i}.o"] = lambda w=w: w.o  # type: ignore[misc]
        found[f"{i}.gate_up"] = lambda w=w: np.concatenate([w.gate, w.up])  # type: ignore[misc]
        found[f"{i}.down"] = lambda w=w: w.down  # type: ignore[misc]
    return found


def _read(path: Path, facts: Mapping[str, Any]) -> dict[str, Packed] | None:
    """What a file holds; ``None`` where there is none, or not a whole one of these facts."""
    try:
        with (
            path.open("rb") as stream,
            np.load(stream, allow_pickle=False) as file,
        ):  # checks each array's CRC
            held = json.loads(str(file[_FACTS]))
            sizes = held.pop("sizes")
            if held != facts:
                raise ValueError(f"it holds {held}")  # noqa: TRY301 - as any other damage
            return {name: _taken_out(file, name, *size) for name, size in sizes.items()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        _log.warning("%s cannot be used and is made anew: %s", path, error)
        return None


def _taken_out(file: Any, name: str, bits: int, inputs: int, means: int) -> Packed:
    zeros = f"{name}.zero_points"
    return Packed(
        bits=bits,
        inputs=inputs,
        means=means,
        steps=file[f"{name}.steps"],
        scales=file[f"{name}.scales"],
        zero_points=file.get(zeros),
    )


def _write(path: Path, facts: Mapping[str, Any], matrices: Mapping[str, Packed]) -> None:
    sizes = {name: (p.bits, p.inputs, p.means) for name, p in matrices.items()}
    arrays: dict[str, npt.NDArray[Any]] = {_FACTS: np.array(json.dumps({**facts, "sizes": sizes}))}
    for name, p in matrices.items():
        arrays |= {f"{name}.steps": p.steps, f"{name}.scales": p.scales}
        if p.zero_points is not None:
            arrays[f"{name}.zero_points"] = p.zero_points
    path.parent.mkdir(parents=True, exist_ok=True)
    # Threads and processes may write the same at once.
    part = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        with part.open("wb") as sink:
            _save(sink, arrays)
        part.replace(path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def _save(sink: IO[bytes], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    np.savez(sink, allow_pickle=False, **arrays)
    sink.flush()
    os.fsync(sink.fileno())
