"""How much of the full depth's text is kept: four measures, from token ids and logits alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgewise.errors import ShapeError

Floats = npt.NDArray[np.floating]
Float64 = npt.NDArray[np.float64]
Tokens = Sequence[int] | npt.NDArray[np.integer]


def relative_accuracy(found: Tokens, reference: Tokens) -> float:
    """Share of positions at which a text has the token that full depth has there.

    One early difference may spoil all that follows, as both texts run freely: read it beside
    :func:`first_divergence` and :func:`teacher_forced_agreement`.

    Args:
        found: Token ids.
        reference: Token ids of full depth; of texts of other lengths what one lacks is wrong.

    Raises:
        ShapeError: Both texts are empty.

    Source:
        UniExit (2026), section 6: relative accuracy, position by position.

    Example:
        >>> relative_accuracy([5, 6, 7, 9], [5, 6, 8, 9])
        0.75
    """
    length = max(len(found), len(reference))
    if not length:
        raise ShapeError("expected tokens to compare, found none")
    same = sum(int(a) == int(b) for a, b in zip(found, reference, strict=False))
    return same / length


def first_divergence(found: Tokens, reference: Tokens) -> int | None:
    """The first position at which two texts differ, from 0; ``None`` if they are the same.

    Where one text ends early they differ at its end.

    Example:
        >>> first_divergence([5, 6, 7], [5, 6, 8, 9])
        2
    """
    pairs = zip(found, reference, strict=False)
    differs = (i for i, (a, b) in enumerate(pairs) if int(a) != int(b))
    shorter = min(len(found), len(reference))
    return next(differs, None if len(found) == len(reference) else shorter)


def teacher_forced_agreement(found: Floats, reference: Floats) -> float:
    """Share of positions of one given text at which both name the same next token.

    Args:
        found: Logits [N, V], every position having read the same text.
        reference: Of full depth, the same.

    Raises:
        ShapeError: They are not both [N, V], or empty.
    """
    if found.ndim != 2 or found.shape != reference.shape or not len(found):
        raise ShapeError(f"expected logits [N, V], found {found.shape} and {reference.shape}")
    return float((found.argmax(axis=1) == reference.argmax(axis=1)).mean())


def token_losses(logits: Floats, tokens: Tokens) -> Float64:
    """-log p of the token that followed at each position, nats.

    Args:
        logits: [N, V].
        tokens: [N], what followed.

    Raises:
        ShapeError: Other shapes.
    """
    ids = np.asarray(tokens)
    if logits.ndim != 2 or ids.shape != logits.shape[:1] or not len(logits):
        raise ShapeError(f"expected logits [N, V] and N tokens, found {logits.shape}, {ids.shape}")
    wide = logits.astype(np.float64)
    top = wide.max(axis=1)
    total = top + np.log(np.exp(wide - top[:, None]).sum(axis=1))
    return np.asarray(total - wide[np.arange(len(ids)), ids])


def perplexity(logits: Floats, tokens: Tokens) -> float:
    """Exp of the mean loss: among how many tokens the model is torn.

    Args:
        logits: [N, V].
        tokens: [N], what followed.

    Returns:
        At least 1; ``math.inf`` where a token had no chance.

    Raises:
        ShapeError: Other shapes.
    """
    mean = float(token_losses(logits, tokens).mean())
    return math.exp(mean) if mean < math.log(np.finfo(np.float64).max) else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class TextQuality:
    """Several texts beside those of full depth.

    Attributes:
        texts: How many.
        relative_accuracy: Mean over texts.
        identical: Share of texts that are the same throughout.
        first_divergence: Median position over texts that differ; ``None`` where none does.
    """

    texts: int
    relative_accuracy: float
    identical: float
    first_divergence: float | None


def compare_texts(found: Sequence[Tokens], reference: Sequence[Tokens]) -> TextQuality:
    """Summarise texts beside those of full depth.

    Raises:
        ShapeError: Another number of texts, none, or two empty ones.
    """
    if len(found) != len(reference) or not found:
        raise ShapeError(f"expected as many texts, found {len(found)} and {len(reference)}")
    pairs = list(zip(found, reference, strict=True))
    places = [first_divergence(a, b) for a, b in pairs]
    apart = [p for p in places if p is not None]
    return TextQuality(
        texts=len(pairs),
        relative_accuracy=math.fsum(relative_accuracy(a, b) for a, b in pairs) / len(pairs),
        identical=1 - len(apart) / len(pairs),
        first_divergence=float(np.median(apart)) if apart else None,
    )
