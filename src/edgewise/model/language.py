"""A decoder language model as data: sizes, weights by their usual names, and its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgewise.model.transformer import Architecture

Float32 = npt.NDArray[np.float32]


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without any that the model's chat template would add."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids; special tokens are left out."""
        ...

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation by the model's template, ready for the answer.

        Raises:
            ModelError: The model has no chat template.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LanguageModel:
    """Weights and sizes; nothing that a request could change.

    Attributes:
        name: For people and profiles.
        architecture: Sizes and family.
        weights: By the names transformers gives them, such as
            ``"model.layers.0.self_attn.q_proj.weight"``; float32, read-only, matrices [out, in].
            Where the embedding is tied, ``"lm_head.weight"`` is the same array as
            ``"model.embed_tokens.weight"``.
        digest: SHA-256 over the weights and sizes.
        context_length: Most tokens it was trained for.
        folder: Where it was read from; ``None`` for one that was built.
        tokenizer: ``None`` where the source has none.
    """

    name: str
    architecture: Architecture
    weights: Mapping[str, Float32] = field(repr=False)
    digest: str
    context_length: int
    folder: Path | None = None
    tokenizer: Tokenizer | None = field(default=None, repr=False)
