"""Fitted exits as one file: arrays in the safetensors format, the rest as JSON in its header.

The header's field ``edgewise`` holds format, version, the records and a SHA-256 over them and all
arrays. A file is written under another name and then moved, so that it is there whole or not at
all.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgewise.errors import BackendUnavailable, CheckpointError, ConfigError
from edgewise.frontends.zoo_int8 import models_folder
from edgewise.model.decoding import AffineExit, Gate, LanguageExits

FORMAT = "edgewise-language-exits"
VERSION = 1
_FIT_AGAIN = "edgewise fit-exits MODEL --text FILE"

Arrays = dict[str, npt.NDArray[Any]]


def exits_path(digest: str, *, cache: Path | None = None) -> Path:
    """Where the exits of a model are kept unless told otherwise: beside converted models.

    Args:
        digest: Of the model's weights.
        cache: Where converted models are kept; the user's cache by default.
    """
    return (cache or models_folder()) / "exits" / f"{digest[:32]}.safetensors"


def find_exits(digest: str, *, cache: Path | None = None) -> LanguageExits | None:
    """The exits that are kept for a model, ``None`` where none were fitted.

    Args:
        digest: Of the model's weights.
        cache: As in :func:`exits_path`.

    Raises:
        CheckpointError: The file is damaged or newer than this program.
        ModelError: It is of other weights.
    """
    path = exits_path(digest, cache=cache)
    return load_exits(path, digest=digest) if path.is_file() else None


def save_exits(exits: LanguageExits, path: Path) -> None:
    """Write exits; what is there already stays until the new file is whole.

    Raises:
        ConfigError: A folder is in the way.
        CheckpointError: A number is NaN or infinite.
        BackendUnavailable: safetensors is not installed.
        OSError: The disk is full, or the folder cannot be written.
    """
    if path.is_dir():
        raise ConfigError(f"{path} is a folder, expected a file", help="name a file in it")
    arrays, records = _taken_apart(exits)
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise CheckpointError(f"exits of {exits.model!r}: {name} holds NaN or infinity")
    head = {"format": FORMAT, "version": VERSION, "records": records}
    head["sha256"] = _checksum(head, arrays)
    data = _safetensors().save(
        arrays, metadata={"edgewise": json.dumps(head, allow_nan=False, ensure_ascii=False)}
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def load_exits(path: Path, *, digest: str | None = None) -> LanguageExits:
    """Read exits.

    Args:
        path: The file.
        digest: Of the weights they must have been fitted for; any where ``None``.

    Raises:
        CheckpointError: Missing, damaged, not of this format, or newer than this program.
        ModelError: They are of other weights.
        BackendUnavailable: safetensors is not installed.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path}: expected a file of exits, found {error.strerror}", help=_FIT_AGAIN
        ) from error
    safetensors = _safetensors()
    head = _read_head(data, path)
    try:
        arrays = dict(safetensors.load(data))
        whole = head["sha256"] == _checksum(head, arrays)
        exits = _put_together(head["records"], arrays)
    except Exception as error:
        raise _damaged(path, str(error).strip().partition("\n")[0]) from error
    if not whole:
        raise _damaged(path, "its checksum does not fit its content")
    if digest is not None:
        exits.check(digest)
    return exits


def _read_head(data: bytes, path: Path) -> dict[str, Any]:
    try:
        size = int.from_bytes(data[:8], "little")
        head = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["edgewise"])
        kind, version = head["format"], head["version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(path, "it has no readable header") from error
    if kind != FORMAT or not isinstance(version, int):
        raise _damaged(path, f"its format is {kind!r}")
    if version > VERSION:
        raise CheckpointError(
            f"{path} has format version {version}, this program reads up to {VERSION}",
            help="pip install --upgrade edgewise",
        )
    return dict(head)


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is no whole file of exits: {why}", help=_FIT_AGAIN)


def _taken_apart(exits: LanguageExits) -> tuple[Arrays, dict[str, Any]]:
    arrays: Arrays = {}
    for layer, exit_ in exits.affine.items():
        arrays[f"affine.{layer}.weight"] = np.ascontiguousarray(exit_.weight, dtype=np.float32)
        arrays[f"affine.{layer}.bias"] = np.ascontiguousarray(exit_.bias, dtype=np.float32)
    for layer, gate in exits.gates.items():
        arrays[f"gate.{layer}.weight"] = np.ascontiguousarray(gate.weight, dtype=np.float32)
    if exits.shortlist is not None:
        arrays["shortlist"] = np.ascontiguousarray(exits.shortlist, dtype=np.int64)
    records = {
        "model": exits.model,
        "digest": exits.digest,
        "affine": [
            {"layer": k, "temperature": e.temperature, "agreement": e.agreement}
            for k, e in exits.affine.items()
        ],
        "gates": [{"layer": k, "bias": g.bias} for k, g in exits.gates.items()],
        "fitted_on": exits.fitted_on,
        "notes": exits.notes,
    }
    return arrays, records


def _put_together(records: Mapping[str, Any], arrays: Arrays) -> LanguageExits:
    for array in arrays.values():
        array.flags.writeable = False
    return LanguageExits(
        model=records["model"],
        digest=records["digest"],
        affine={
            e["layer"]: AffineExit(
                layer=e["layer"],
                weight=arrays[f"affine.{e['layer']}.weight"],
                bias=arrays[f"affine.{e['layer']}.bias"],
                temperature=e["temperature"],
                agreement=e["agreement"],
            )
            for e in records["affine"]
        },
        gates={
            g["layer"]: Gate(
                layer=g["layer"], weight=arrays[f"gate.{g['layer']}.weight"], bias=g["bias"]
            )
            for g in records["gates"]
        },
        shortlist=arrays.get("shortlist"),
        fitted_on=records["fitted_on"],
        notes=records["notes"],
    )


def _checksum(head: Mapping[str, Any], arrays: Arrays) -> str:
    told = {k: v for k, v in head.items() if k != "sha256"}
    content = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
    for name in sorted(arrays):
        array = arrays[name]
        content.update(f"{name} {array.dtype.str} {array.shape}".encode())
        content.update(np.ascontiguousarray(array).tobytes())
    return content.hexdigest()


def _safetensors() -> Any:
    try:
        return importlib.import_module("safetensors.numpy")
    except ImportError as error:
        raise BackendUnavailable(
            f"the safetensors package is not installed ({error})",
            help="pip install 'edgewise[lm]'",
        ) from error
