"""Where a language model comes from: a name, a Hugging Face folder or a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgewise.errors import ConfigError, nearest_names
from edgewise.frontends.language.folder import check_fits, load_folder, out_of_memory
from edgewise.frontends.language.gguf_file import GgufFile
from edgewise.frontends.language.pull import PUBLISHED, pull_model
from edgewise.frontends.language.tokenizer import gguf_tokenizer_files, read_tokenizer
from edgewise.frontends.language.weights import (
    check_finite,
    complete,
    weight_shapes,
    weights_digest,
)
from edgewise.model.language import LanguageModel

Float32 = npt.NDArray[np.float32]


def load_language_model(model: str | Path, *, cache: Path | None = None) -> LanguageModel:
    """Load a model.

    A name is converted first where that was not done yet; a conversion that is damaged is made
    anew.

    Args:
        model: A name that `edgewise pull` knows, a Hugging Face folder or a GGUF file.
        cache: Where converted models are kept; the user's cache by default.

    Raises:
        ConfigError: Nothing of that name.
        ModelError: A family, quantisation or file that is not supported, or damaged; more weights
            than memory.
        BackendUnavailable: A package is not installed.
    """
    try:
        return _load(model, cache)
    except MemoryError:
        pass
    raise out_of_memory(str(model))


def load_gguf(path: Path) -> LanguageModel:
    """Read a GGUF file; its weights become float32.

    Raises:
        ModelError: An architecture, quantisation or tokenizer that is not supported; a truncated or
            damaged file; more weights than memory.
        BackendUnavailable: A package is not installed.
    """
    file = GgufFile(path)
    architecture = file.architecture
    tokenizer = read_tokenizer(
        gguf_tokenizer_files(file.metadata, path).get,
        where=str(path),
        vocab_size=architecture.vocab_size,
    )
    shapes = weight_shapes(architecture)
    check_fits(sum(4 * math.prod(s) for s in shapes.values()), where=str(path))

    def read() -> Iterator[tuple[str, Float32]]:
        for name in sorted(shapes):
            array = file.read(name)
            check_finite(name, array, where=str(path))
            yield name, array

    weights = complete(read(), architecture)
    return LanguageModel(
        name=path.stem,
        architecture=architecture,
        weights=weights,
        digest=weights_digest(architecture, weights),
        context_length=file.context_length,
        tokenizer=tokenizer,
    )


def _load(model: str | Path, cache: Path | None) -> LanguageModel:
    name, path = str(model), Path(model)
    if name.lower() in PUBLISHED:
        return load_folder(pull_model(name, cache=cache).folder)
    if path.is_dir():
        return load_folder(path)
    if path.is_file():
        return load_gguf(path)
    raise ConfigError(
        f"{name!r} is neither a model to pull nor a folder or a GGUF file",
        help=nearest_names(name.lower(), PUBLISHED),
    )
