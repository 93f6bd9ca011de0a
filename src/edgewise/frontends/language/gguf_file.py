"""A GGUF file of a supported family as configuration, float32 weights and tokenizer.

The header is read here: the reader of the ``gguf`` package makes an array of every token of the
vocabulary, which takes seconds. The package gives the names of tensors and takes the weights out
of their blocks.

Source:
    https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgewise.errors import BackendUnavailable, ModelError
from edgewise.frontends.language.safetensors_file import mapped_bytes
from edgewise.frontends.language.weights import (
    FAMILIES,
    HEAD,
    SUPPORTED,
    check_shapes,
    decoder_architecture,
    weight_shapes,
)
from edgewise.model.transformer import Architecture

Float32 = npt.NDArray[np.float32]
Shape = tuple[int, ...]

# Each of them the package can take out of its blocks.
QUANTISATIONS = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "MXFP4", "IQ4_NL", "IQ4_XS"),
    *("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M"),
)

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_ALIGNMENT = 32
_COPY_AGAIN = "copy the file again from where it came"


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where one tensor lies and how its numbers are packed.

    Attributes:
        quantisation: Number of the type, as the ``gguf`` package has it.
        shape: Of the numbers, slowest first as numpy has it.
        start: First byte in the file.
        row_bytes: Of one row of numbers.
    """

    quantisation: int
    shape: Shape
    start: int
    row_bytes: int

    @property
    def stop(self) -> int:
        """One past its last byte."""
        return self.start + math.prod(self.shape[:-1]) * self.row_bytes


class GgufFile:
    """A GGUF file, mapped into memory and checked before any weight is read.

    Args:
        path: The file.

    Attributes:
        path: The file.
        metadata: Its keys and values.
        config: Configuration of the model, as transformers writes it.
        architecture: Sizes and family.
        context_length: Most tokens it was trained for.

    Raises:
        ModelError: Not such a file, truncated or damaged; an architecture or a quantisation that is
            not supported.
        BackendUnavailable: The ``gguf`` package is not installed.
    """

    def __init__(self, path: Path) -> None:
        self._gguf = _import_gguf()
        self.path = path
        self._bytes = mapped_bytes(path)
        header = _Header(path, self._bytes.data)
        self.metadata = header.metadata
        family = self.metadata.get("general.architecture")
        if family not in FAMILIES:
            raise ModelError(
                f"{path}: the architecture {family!r} is not supported", help=SUPPORTED
            )
        tensors = {n: self._located(n, header, facts) for n, facts in header.tensors.items()}
        _check_order(tensors.values(), header, size=len(self._bytes))
        self.config = _config(self.metadata, tensors, path)
        self.architecture, self.context_length = decoder_architecture(
            self.config, name=path.stem, where=str(path)
        )
        self._tensors = self._renamed(tensors)
        check_shapes(
            {n: t.shape for n, t in self._tensors.items()}, self.architecture, where=str(path)
        )

    def read(self, name: str) -> Float32:
        """One weight by the name transformers gives it, as float32.

        Raises:
            ModelError: The package cannot take it out of its blocks.
        """
        tensor = self._tensors[name]
        rows = math.prod(tensor.shape[:-1])
        packed = self._bytes[tensor.start : tensor.stop]
        kind = self._gguf.GGMLQuantizationType(tensor.quantisation)
        with np.errstate(all="ignore"):  # a tampered scale; what comes of it is refused later
            array: Float32 = self._gguf.quants.dequantize(
                packed.reshape(rows, tensor.row_bytes), kind
            )
        array = array.reshape(tensor.shape)
        if self.architecture.model_type == "llama":
            return _llama_order(name, array, self.architecture)
        return array

    def _located(self, name: str, header: _Header, facts: tuple[Shape, int, int]) -> Tensor:
        shape, quantisation, offset = facts
        kinds = {kind.value: kind for kind in self._gguf.GGMLQuantizationType}
        kind = kinds.get(quantisation)
        if kind is None or kind.name not in QUANTISATIONS:
            said = f"number {quantisation}" if kind is None else kind.name
            raise ModelError(
                f"{self.path}: {name!r} is quantised as {said}, which is not supported",
                help=f"supported are {', '.join(QUANTISATIONS)}",
            )
        block, block_bytes = self._gguf.GGML_QUANT_SIZES[kind]
        if not shape or min(shape) < 1 or shape[-1] % block:
            raise header.damaged(f"{name!r} of {list(shape)} is no whole number of blocks")
        row_bytes = shape[-1] // block * block_bytes
        tensor = Tensor(quantisation, shape, header.data_start + offset, row_bytes)
        if tensor.stop > len(self._bytes):
            raise header.damaged(
                f"it is truncated: {name!r} ends at byte {tensor.stop}, the file at"
                f" {len(self._bytes)}"
            )
        if tensor.start % 4:
            raise header.damaged(f"{name!r} starts at the odd byte {tensor.start}")
        return tensor

    def _renamed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """By the names of transformers; what the family does not have keeps its own."""
        a = self.architecture
        kinds = {name: kind for kind, name in self._gguf.MODEL_ARCH_NAMES.items()}
        names = self._gguf.get_tensor_name_map(kinds[a.model_type], a.num_hidden_layers)
        theirs = {}
        for ours in (*weight_shapes(a), HEAD):
            theirs[names.get_name(ours, try_suffixes=(".weight", ".bias"))] = ours
        return {theirs.get(name, name): tensor for name, tensor in tensors.items()}


def _check_order(tensors: Iterable[Tensor], header: _Header, *, size: int) -> None:
    """Refuse a gap: one whose kind or place was changed no longer ends where the next begins."""
    expected = header.data_start
    for tensor in sorted(tensors, key=lambda t: t.start):
        if tensor.start != expected:
            raise header.damaged(
                f"the tensor at byte {tensor.start} was expected at {expected}, behind the last"
            )
        expected = header.aligned(tensor.stop)
    if size > expected:
        raise header.damaged(f"its tensors end at byte {expected}, the file at {size}")


class _Header:
    """Metadata and table of tensors; every length is held against the file's."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self._path, self._data, self._at = path, data, 0
        if bytes(self._take(4)) != b"GGUF":
            raise ModelError(
                f"{path} is no GGUF file", help="name a .gguf file or a model's folder"
            )
        (version,) = self._numbers("I")
        if version not in {2, 3}:
            raise ModelError(
                f"{path}: GGUF version {version} is not supported",
                help="versions 2 and 3 are, little-endian",
            )
        tensors, keys = self._numbers("QQ")
        self.metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._string()
            if key in self.metadata:
                raise self.damaged(f"the key {key!r} is there twice")
            self.metadata[key] = self._value(self._numbers("I")[0])
        self.tensors: dict[str, tuple[Shape, int, int]] = {}
        for _ in range(tensors):
            name = self._string()
            (dimensions,) = self._numbers("I")
            if dimensions > _MAX_DIMENSIONS or name in self.tensors:
                raise self.damaged(f"{name!r} has {dimensions} dimensions, or is there twice")
            shape = tuple(reversed(self._numbers(f"{dimensions}Q")))
            self.tensors[name] = (shape, *self._numbers("IQ"))
        self.alignment = self.metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(self.alignment, int) or self.alignment < 1:
            raise self.damaged(f"its alignment is {self.alignment!r}")
        self.data_start = self.aligned(self._at)

    def aligned(self, at: int) -> int:
        """The next byte at which an array may start."""
        return int(-(-at // self.alignment) * self.alignment)

    def damaged(self, why: str) -> ModelError:
        return ModelError(f"{self._path} is damaged: {why}", help=_COPY_AGAIN)

    def _take(self, size: int) -> memoryview:
        piece = self._data[self._at : self._at + size]
        if len(piece) != size:
            raise self.damaged("it is truncated in its header")
        self._at += size
        return piece

    def _numbers(self, form: str) -> tuple[Any, ...]:
        form = f"<{form}"
        return struct.unpack(form, self._take(struct.calcsize(form)))

    def _string(self) -> str:
        (length,) = self._numbers("Q")
        try:
            return str(self._take(length), "utf-8")
        except UnicodeDecodeError:
            raise self.damaged("a text in its header is no UTF-8") from None

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            of, count = self._numbers("IQ")
            if of == _STRING:
                return [self._string() for _ in range(count)]
            if of in _SCALARS and count <= len(self._data):
                return list(self._numbers(f"{count}{_SCALARS[of]}"))
        if kind in _SCALARS:
            return self._numbers(_SCALARS[kind])[0]
        raise self.damaged(f"its header holds a value of the unknown type {kind}")


def _config(
    metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path
) -> dict[str, Any]:
    family = metadata["general.architecture"]

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{family}.{key}", default)

    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{path}: the tensor 'token_embd.weight' is missing", help=_COPY_AGAIN)
    heads, hidden = get("attention.head_count"), get("embedding_length")
    if not isinstance(heads, int) or not isinstance(hidden, int) or heads < 1:
        raise ModelError(
            f"{path}: expected one number of heads and a width, found {heads!r}, {hidden!r}"
        )
    head_dim = get("attention.key_length", hidden // heads)
    scaling = get("rope.scaling.type", "none")
    # Llama 3's angles are scaled by a tensor.
    rope = "scaled" if "rope_freqs.weight" in tensors else scaling
    if (
        get("rope.dimension_count", head_dim) != head_dim
        or get("attention.value_length", head_dim) != head_dim
    ):
        raise ModelError(
            f"{path}: heads whose keys, values and rotary angles differ in width are not supported",
            help=SUPPORTED,
        )
    theta, eps = get("rope.freq_base", 10000.0), get("attention.layer_norm_rms_epsilon")
    if eps is None:
        raise ModelError(f"{path}: its header gives no epsilon of the norms", help=_COPY_AGAIN)
    return {
        "architectures": [f"{_CLASSES[family]}ForCausalLM"],
        "model_type": family,
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": get("context_length"),
        "hidden_act": "silu",
        "rms_norm_eps": eps,
        "rope_theta": theta,  # where transformers 4 looks
        "rope_parameters": {
            "rope_type": "default" if rope == "none" else rope,
            "rope_theta": theta,
        },
        "layer_types": ["sliding_attention"] if get("attention.sliding_window") else None,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "dtype": "float32",
    }


_CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "olmo2": "Olmo2"}


def _llama_order(name: str, array: Float32, a: Architecture) -> Float32:
    """Undo llama.cpp's order of a Llama's queries and keys: pairs side by side become two halves.

    Source:
        ``LlamaModel.permute`` of llama.cpp's ``convert_hf_to_gguf.py``, whose inverse this is.
    """
    heads = {"q_proj": a.num_attention_heads, "k_proj": a.num_key_value_heads}.get(
        name.split(".")[-2]
    )
    if heads is None:
        return array
    pairs = array.reshape(heads, -1, 2, array.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)


def _import_gguf() -> Any:
    try:
        import gguf
        import gguf.quants
    except ImportError as error:
        raise BackendUnavailable(
            f"a GGUF file needs the package gguf: {error}", help="pip install 'edgewise[lm]'"
        ) from error
    return gguf
