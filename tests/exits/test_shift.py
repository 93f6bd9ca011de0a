"""Features, networks and schedule of the probability shift, each by hand."""

from __future__ import annotations

import numpy as np
import pytest

from edgewise.errors import ShapeError
from edgewise.exits.shift import (
    LayerSchedule,
    ShiftPredictor,
    covering_layers,
    shift_features,
    top_candidates,
)


def test_candidates_are_the_largest_logits_largest_first() -> None:
    logits = np.array([0.5, 3.0, -1.0, 2.0, 9.0, 0.0], dtype=np.float32)

    assert top_candidates(logits).tolist() == [4, 1, 3, 0]
    assert top_candidates(logits[:2]).tolist() == [1, 0]


def test_features_are_logits_probabilities_and_their_shift() -> None:
    first = np.log(np.array([0.1, 0.2, 0.3, 0.4], dtype=np.float32))
    second = np.log(np.array([0.4, 0.4, 0.1, 0.1], dtype=np.float32)) + 5
    at_first, q = shift_features(first, None)
    at_second, _ = shift_features(second, q)

    assert at_first.shape == (12,)
    np.testing.assert_allclose(at_first, [*first, *[0.1, 0.2, 0.3, 0.4] * 2], atol=1e-6)
    np.testing.assert_allclose(at_second[4:8], [0.4, 0.4, 0.1, 0.1], atol=1e-6)
    np.testing.assert_allclose(at_second[8:], [0.3, 0.2, -0.2, -0.3], atol=1e-6)


def predictor() -> ShiftPredictor:
    """Two hidden units: one likes the first feature, one dislikes it."""
    first = np.zeros((12, 2), dtype=np.float32)
    first[0] = [1.0, -1.0]
    return ShiftPredictor(
        first={3: first},
        first_bias={3: np.array([0.0, 0.5], dtype=np.float32)},
        second={3: np.array([2.0, -4.0], dtype=np.float32)},
        second_bias={3: 0.25},
        draft_layer=1,
        scheduled=(3,),
    )


@pytest.mark.parametrize(("value", "score"), [(2.0, 4.25), (-1.0, -5.75), (0.0, -1.75)])
def test_a_chance_is_that_of_the_network_by_hand(value: float, score: float) -> None:
    features = np.zeros(12, dtype=np.float32)
    features[0] = value

    assert predictor().chance(3, features) == pytest.approx(1 / (1 + np.exp(-score)), rel=1e-6)


def test_features_of_another_length_are_refused() -> None:
    with pytest.raises(ShapeError):
        predictor().chance(3, np.zeros(9, dtype=np.float32))


def test_neighbours_of_the_last_five_exits_are_asked_too_once_there_are_five() -> None:
    schedule = LayerSchedule((10, 20), range(1, 30))
    for layer in (15, 15, 28, 15):
        schedule.observe(layer)
    before = schedule.active()
    schedule.observe(15)

    assert before == {10, 20}
    assert schedule.active() == {10, 20, 13, 15, 17, 26, 28}  # 30 is no exit
    for _ in range(5):
        schedule.observe(5)
    assert schedule.active() == {10, 20, 3, 5, 7}


def test_the_fewest_layers_that_cover_a_share_are_chosen() -> None:
    exits = {4: 10, 8: 60, 12: 25, 16: 5, 20: 0}

    assert covering_layers(exits) == (4, 8, 12)
    assert covering_layers(exits, share=0.6) == (8,)
    assert covering_layers(exits, share=1.0) == (4, 8, 12, 16)
    assert covering_layers({4: 0}) == ()
