"""Measures of text quality on cases that can be counted by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from edgewise.bench.language_quality import (
    TextQuality,
    compare_texts,
    first_divergence,
    perplexity,
    relative_accuracy,
    teacher_forced_agreement,
    token_losses,
)
from edgewise.errors import ShapeError


@pytest.mark.parametrize(
    ("found", "reference", "accuracy", "place"),
    [
        pytest.param([1, 2, 3, 4], [1, 2, 3, 4], 1.0, None, id="the same"),
        pytest.param([1, 2, 9, 4], [1, 2, 3, 4], 0.75, 2, id="one differs"),
        pytest.param([9, 1, 2, 3], [1, 2, 3, 4], 0.0, 0, id="shifted by one"),
        pytest.param([1, 2], [1, 2, 3, 4], 0.5, 2, id="ends early"),
        pytest.param([1, 2, 3, 4], [1, 2], 0.5, 2, id="ends late"),
        pytest.param([], [1], 0.0, 0, id="nothing found"),
    ],
)
def test_texts_are_compared_position_by_position(
    found: list[int], reference: list[int], accuracy: float, place: int | None
) -> None:
    assert relative_accuracy(found, reference) == accuracy
    assert first_divergence(found, reference) == place
    assert relative_accuracy(np.array(found, dtype=np.int64), reference) == accuracy


def test_agreement_counts_positions_with_the_same_best_token() -> None:
    full = np.array([[1.0, 2.0, 0.0], [3.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 5.0, 1.0]])
    early = np.array([[0.0, 9.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.1], [0.0, 2.0, 1.9]])

    assert teacher_forced_agreement(early, full) == 0.75
    assert teacher_forced_agreement(full, full) == 1.0


def test_perplexity_of_even_odds_is_the_number_of_tokens() -> None:
    assert perplexity(np.zeros((5, 8)), [0, 1, 2, 3, 7]) == pytest.approx(8.0)


def test_perplexity_is_the_geometric_mean_of_inverse_chances() -> None:
    chances = np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]])
    logits = np.log(chances) + np.array([[3.0], [-700.0]])  # an offset says nothing

    assert token_losses(logits, [1, 0]) == pytest.approx([math.log(4), math.log(10)])
    assert perplexity(logits, [1, 0]) == pytest.approx(math.sqrt(40))


def test_a_token_without_a_chance_makes_perplexity_infinite() -> None:
    logits = np.array([[0.0, -np.inf]], dtype=np.float32)

    assert perplexity(logits, [1]) == math.inf
    assert perplexity(logits, [0]) == 1.0


def test_several_texts_are_summarised() -> None:
    reference = [[1, 2, 3, 4]] * 4
    found = [[1, 2, 3, 4], [1, 2, 3, 9], [1, 9, 3, 4], [9, 9, 9, 9]]

    assert compare_texts(found, reference) == TextQuality(
        texts=4, relative_accuracy=0.625, identical=0.25, first_divergence=1.0
    )
    assert compare_texts(reference, reference).first_divergence is None


def test_what_cannot_be_compared_is_refused() -> None:
    logits = np.zeros((2, 3))
    with pytest.raises(ShapeError):
        relative_accuracy([], [])
    with pytest.raises(ShapeError):
        compare_texts([[1]], [])
    with pytest.raises(ShapeError):
        teacher_forced_agreement(logits, np.zeros((3, 3)))
    with pytest.raises(ShapeError):
        token_losses(logits, [1])
