"""What a converted folder was made of, so that half of one, or a changed one, is never used."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgewise.errors import ModelError

MANIFEST = "edgewise.json"
FORMAT = "edgewise-language-model"
SCHEMA_VERSION = 1  # of the folder and of the way it is made; raise it when either changes
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A converted folder's contents.

    Attributes:
        name: Of the model.
        weights_digest: As :class:`edgewise.frontends.language.weights.WeightsDigest` computes it.
        source: Package, file and SHA-256 of what was converted.
        files: By name: ``sha256``, ``size_bytes``, and ``mtime_ns`` at which that was true.
    """

    name: str
    weights_digest: str
    source: Mapping[str, str]
    files: Mapping[str, Mapping[str, Any]] = field(repr=False)


def write_manifest(
    folder: Path,
    *,
    name: str,
    weights_digest: str,
    source: Mapping[str, str],
    sha256: Mapping[str, str],
) -> Manifest:
    """Write the manifest of files that are there.

    Args:
        folder: Where they are.
        name: Of the model.
        weights_digest: Of its weights.
        source: What was converted.
        sha256: Of each file, by name.
    """
    files = {}
    for file, digest in sha256.items():
        stat = (folder / file).stat()
        files[file] = {
            "sha256": digest,
            "size_bytes": stat.st_size,
            "mtime_ns": stat.st_mtime_ns,
        }
    document: dict[str, Any] = {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "name": name,
        "weights_digest": weights_digest,
        "source": dict(source),
        "files": files,
    }
    document["digest"] = _digest(document)
    write_file(folder / MANIFEST, (json.dumps(document, indent=1) + "\n").encode())
    return Manifest(name=name, weights_digest=weights_digest, source=source, files=files)


def read_manifest(folder: Path) -> Manifest | None:
    """Read a folder's manifest; ``None`` where it has none.

    Raises:
        ModelError: It is damaged or of another version.
    """
    path = folder / MANIFEST
    try:
        with path.open("rb") as stream:
            document = json.loads(stream.read(_MAX_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError:
        raise ModelError(f"{path} is truncated or damaged") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ModelError(f"{path} is no manifest of a converted model")
    if document.get("schema_version") != SCHEMA_VERSION:
        raise ModelError(
            f"{folder} was converted by version {document.get('schema_version')!r}, this program"
            f" reads {SCHEMA_VERSION}"
        )
    if document.get("digest") != _digest(document):
        raise ModelError(f"{path} was changed after it was written: its digest does not match")
    return Manifest(
        name=document["name"],
        weights_digest=document["weights_digest"],
        source=document["source"],
        files=document["files"],
    )


def check_files(folder: Path, manifest: Manifest, *, whole: bool = False) -> None:
    """Check the files of a folder.

    One whose size and time of change are those of the manifest is taken as it is; another's
    checksum is computed.

    Args:
        folder: Where they are.
        manifest: What is expected.
        whole: Compute every checksum.

    Raises:
        ModelError: A file is missing or not what was written.
    """
    for name, facts in manifest.files.items():
        path = folder / name
        try:
            stat = path.stat()
            if stat.st_size != facts["size_bytes"]:
                raise ModelError(
                    f"{path} has {stat.st_size} bytes, {facts['size_bytes']} were written"
                )
            if not whole and stat.st_mtime_ns == facts["mtime_ns"]:
                continue
            if file_sha256(path) != facts["sha256"]:
                raise ModelError(
                    f"{path} was changed after it was written: its SHA-256 does not match"
                )
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror or error}") from error


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_file(path: Path, data: bytes) -> str:
    """Write a file down to the disk; SHA-256 of its bytes, in hexadecimal."""
    with path.open("wb") as sink:
        sink.write(data)
        sink.flush()
        os.fsync(sink.fileno())
    return hashlib.sha256(data).hexdigest()


def _digest(document: Mapping[str, Any]) -> str:
    rest = {k: v for k, v in document.items() if k != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
