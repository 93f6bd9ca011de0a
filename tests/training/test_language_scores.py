"""Scores of exits on text."""

from __future__ import annotations

import numpy as np
import pytest

from edgewise import scores
from edgewise.training.language_scores import (
    AGREES,
    CONFIDENCE,
    GATE,
    LISTED,
    LOSS,
    PLAIN,
    best_temperature,
    perplexity,
    record_answers,
    score_exit,
    temperature_losses,
)
from edgewise.training.temperature import fit_temperature, negative_log_likelihood

RNG = np.random.default_rng(0)
LOGITS = (RNG.standard_normal((40, 12)) * 3).astype(np.float32)
ANSWERS = np.where(RNG.random(40) < 0.8, LOGITS.argmax(axis=1), RNG.integers(0, 12, 40))


def test_a_record_holds_what_softmax_says() -> None:
    following, listed = RNG.integers(0, 12, 39), np.array([3, 5, 1])

    record = record_answers(
        LOGITS, answers=ANSWERS, following=following, temperature=2.0, listed=listed
    )

    np.testing.assert_array_equal(record[AGREES], LOGITS.argmax(axis=1) == ANSWERS)
    np.testing.assert_allclose(record[PLAIN], scores.top1_confidence(LOGITS), rtol=1e-5)
    np.testing.assert_allclose(
        record[CONFIDENCE], scores.top1_confidence(LOGITS, temperature=2.0), rtol=1e-5
    )
    own = -np.log(scores.softmax(LOGITS)[np.arange(39), following])
    np.testing.assert_allclose(record[LOSS, :-1], own, rtol=1e-4)
    assert np.isnan(record[LOSS, -1])
    best_listed = np.array([listed[row[listed].argmax()] for row in LOGITS])
    np.testing.assert_array_equal(record[LISTED], best_listed == ANSWERS)


def test_the_temperature_is_the_one_a_fine_search_finds() -> None:
    grid = [float(t) for t in np.geomspace(0.25, 4, 13)]
    losses = temperature_losses(LOGITS, ANSWERS, grid)

    np.testing.assert_allclose(
        losses / 40, [negative_log_likelihood(LOGITS, ANSWERS, t) for t in grid], rtol=1e-5
    )
    assert best_temperature(grid, losses) == pytest.approx(
        fit_temperature(LOGITS, ANSWERS), rel=0.02
    )


def test_a_temperature_stays_within_its_range() -> None:
    grid = [float(t) for t in np.geomspace(0.25, 4, 13)]

    assert best_temperature(grid, np.arange(13.0)) == pytest.approx(0.25)
    assert best_temperature(grid, -np.arange(13.0)) == pytest.approx(4.0)


def test_a_score_counts_what_a_threshold_lets_through() -> None:
    record = np.full((6, 4), np.nan, dtype=np.float32)
    record[AGREES] = [1, 1, 0, 0]
    record[CONFIDENCE] = [0.9, 0.6, 0.7, 0.1]
    record[PLAIN] = 0.4
    record[LOSS] = [np.log(2), np.log(8), np.nan, np.nan]
    record[LISTED] = [1, 0, 0, 0]
    record[GATE] = [0.95, 0.85, 0.3, 0.6]

    found = score_exit(3, record, temperature=1.5, shortlist=True, gate=True)

    assert (found.layer, found.tokens, found.agreement) == (3, 4, 0.5)
    assert found.perplexity == pytest.approx(4.0)
    assert [(a.share, a.agreement) for a in found.confident] == [(0.75, 2 / 3), (0.25, 1.0)]
    assert [(a.share, a.agreement) for a in found.confident_before] == [(0, None), (0, None)]
    assert found.ece_before == pytest.approx(0.1)
    assert found.shortlist_agreement == 0.25
    assert found.gate is not None
    assert found.gate.auc == 1.0
    assert [(a.share, a.agreement) for a in found.gate.above] == [
        (0.75, 2 / 3),
        (0.5, 1.0),
        (0.25, 1.0),
    ]


def test_what_there_is_not_is_unknown() -> None:
    record = np.full((6, 2), np.nan, dtype=np.float32)
    record[[AGREES, CONFIDENCE, PLAIN]] = 1

    found = score_exit(1, record, temperature=1.0, shortlist=False, gate=False)

    assert found.perplexity is None
    assert found.shortlist_agreement is None
    assert found.gate is None
    assert perplexity(np.array([np.nan], dtype=np.float32)) is None
