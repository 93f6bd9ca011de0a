"""A Hugging Face folder as a language model: ``config.json``, safetensors and a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgewise.device.memory import Memory, read_memory
from edgewise.errors import ModelError
from edgewise.frontends.language.manifest import check_files, read_manifest
from edgewise.frontends.language.safetensors_file import SafetensorsFile
from edgewise.frontends.language.tokenizer import CONFIG, read_tokenizer
from edgewise.frontends.language.weights import (
    check_finite,
    check_shapes,
    complete,
    decoder_architecture,
    weight_shapes,
    weights_digest,
)
from edgewise.model.language import LanguageModel
from edgewise.units import format_bytes

Float32 = npt.NDArray[np.float32]

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_COPY_AGAIN = "copy the folder again from where it came"
_MAX_TEXT_BYTES = 256 * 1024**2


def load_folder(folder: Path) -> LanguageModel:
    """Read a folder that transformers wrote, or that was converted here.

    Weights stored as float32 stay in their file, mapped; others are copied to float32. The digest
    of a converted folder is the one in its manifest.

    Args:
        folder: With ``config.json``.

    Raises:
        ModelError: A family or a kind of file that is not supported; a file that is missing,
            truncated or damaged; more weights than memory.
        BackendUnavailable: tokenizers is not installed.
    """
    manifest = read_manifest(folder)
    if manifest is not None:
        check_files(folder, manifest)
    name = folder.resolve().name if manifest is None else manifest.name
    config = read_text(folder, CONFIG)
    if config is None:
        raise ModelError(
            f"{folder} is no language model: it has no {CONFIG}",
            help="name a folder with config.json, safetensors and tokenizer.json, or a GGUF file",
        )
    try:
        document = json.loads(config)
    except ValueError as error:
        raise ModelError(f"{folder / CONFIG} is damaged: {error}", help=_COPY_AGAIN) from error
    architecture, context = decoder_architecture(document, name=name, where=str(folder / CONFIG))
    tokenizer = read_tokenizer(
        lambda file: read_text(folder, file), where=str(folder), vocab_size=architecture.vocab_size
    )
    places = _places(folder)
    check_shapes(
        {n: file.stored[n].shape for n, file in places.items()}, architecture, where=str(folder)
    )
    wanted = weight_shapes(architecture)
    check_fits(
        sum(4 * int(np.prod(s)) for n, s in wanted.items() if places[n].stored[n].dtype != "F32"),
        where=str(folder),
    )

    def read() -> Iterator[tuple[str, Float32]]:
        for each in sorted(wanted):
            array = places[each].read(each)
            if manifest is None:
                check_finite(each, array, where=str(folder))
            yield each, array

    weights = complete(read(), architecture)
    return LanguageModel(
        name=name,
        architecture=architecture,
        weights=weights,
        digest=weights_digest(architecture, weights)
        if manifest is None
        else manifest.weights_digest,
        context_length=context,
        folder=folder,
        tokenizer=tokenizer,
    )


def read_text(folder: Path, name: str) -> str | None:
    """Text of a file in a folder; ``None`` where it is not there.

    Raises:
        ModelError: It cannot be read, is no UTF-8 or is absurdly long.
    """
    path = folder / name
    try:
        with path.open("rb") as stream:
            data = stream.read(_MAX_TEXT_BYTES + 1)
        if len(data) > _MAX_TEXT_BYTES:
            raise ModelError(f"{path} has more than {format_bytes(_MAX_TEXT_BYTES)}")
        return data.decode()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is damaged: it is no UTF-8", help=_COPY_AGAIN) from error


def check_fits(need_bytes: int, *, where: str, memory: Memory | None = None) -> None:
    """Refuse weights that the machine's memory cannot hold, before the system kills the process.

    Args:
        need_bytes: What will be taken.
        where: The model, for messages.
        memory: Of the machine; read by default.

    Raises:
        ModelError: Too much.
    """
    memory = memory or read_memory()
    known = [b for b in (memory.available_bytes, memory.limit_bytes) if b is not None]
    if known and need_bytes > min(known):
        raise ModelError(
            f"{where} takes {format_bytes(need_bytes)} of memory as float32,"
            f" {format_bytes(min(known))} are free",
            help="close other programs, or take a smaller model",
        )


def out_of_memory(what: str) -> ModelError:
    """Say that memory ran out.

    Raise it outside of the handler: as its context, the ``MemoryError`` would keep alive what was
    read so far.
    """
    return ModelError(
        f"{what} does not fit into the memory that is free",
        help="close other programs, or take a smaller model",
    )


def _places(folder: Path) -> dict[str, SafetensorsFile]:
    """Which file holds each weight."""
    index = read_text(folder, INDEX)
    if index is None:
        if not (folder / WEIGHTS).is_file():
            raise ModelError(
                f"{folder} has neither {WEIGHTS} nor {INDEX}",
                help="other kinds of weights are not read; save_pretrained() of transformers"
                " writes safetensors",
            )
        file = SafetensorsFile(folder / WEIGHTS)
        return dict.fromkeys(file.stored, file)
    try:
        named = json.loads(index)["weight_map"].items()
        shards = {str(shard) for _, shard in named}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{folder / INDEX} is damaged: {error}", help=_COPY_AGAIN) from error
    foreign = [s for s in shards if Path(s).name != s]
    if foreign:
        raise ModelError(f"{folder / INDEX} names a file outside its folder: {foreign[0]!r}")
    files = {shard: SafetensorsFile(folder / shard) for shard in sorted(shards)}
    for name, shard in named:
        if name not in files[shard].stored:
            raise ModelError(f"{folder / shard} has no {name!r}, which {INDEX} puts there")
    return {str(name): files[shard] for name, shard in named}
