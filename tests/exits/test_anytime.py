from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgewise.exits.anytime import (
    caching_anytime,
    drop_shares,
    exit_probabilities,
    product_anytime,
)
from edgewise.scores import softmax


def random_logits(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.5, 2.0, size=(4, 20, 5))


@given(seed=st.integers(0, 10_000))
def test_the_cached_answer_is_the_most_confident_of_the_exits_so_far(seed: int) -> None:
    logits = random_logits(seed)
    each = exit_probabilities(logits)

    cached = caching_anytime(logits)

    for k in range(4):
        for n in range(20):
            best = max(range(k + 1), key=lambda j: each[j, n].max())
            assert cached[k, n].tolist() == each[best, n].tolist()


@given(seed=st.integers(0, 10_000))
def test_products_are_probabilities_and_multiply_positive_logits(seed: int) -> None:
    logits = random_logits(seed)

    product = product_anytime(logits)

    assert product.sum(axis=2) == pytest.approx(np.ones((4, 20)))
    for k in range(4):
        raw = np.prod(np.maximum(logits[: k + 1], 0.0), axis=0)
        for n in np.flatnonzero(raw.sum(axis=1) > 0):
            assert product[k, n] == pytest.approx(raw[n] / raw[n].sum())


def test_a_product_in_which_no_class_is_left_falls_back_to_the_exits_own_answer() -> None:
    logits = np.array([[[1.0, -1.0]], [[-1.0, 3.0]]])

    product = product_anytime(logits)

    assert product[0, 0].tolist() == [1.0, 0.0]
    assert product[1, 0].tolist() == pytest.approx(softmax(logits[1, 0]).tolist())


def test_a_weight_of_zero_leaves_an_exit_out_where_its_logits_are_positive() -> None:
    logits = np.array([[[1.0, 3.0]], [[2.0, 2.0]]])

    assert product_anytime(logits, weights=[0.0, 1.0])[1, 0].tolist() == [0.5, 0.5]


def test_a_drop_counts_from_the_best_earlier_exit_and_not_only_between_neighbours() -> None:
    right = np.array([0.9, 0.7, 0.5])  # 0.2 between neighbours, 0.4 in all
    probabilities = np.stack([right, 1 - right], axis=1)[:, None, :]

    assert drop_shares(probabilities, np.array([0]), [0.3, 0.45]).tolist() == [1.0, 0.0]


def test_confidence_that_only_rises_never_drops() -> None:
    right = np.linspace(0.1, 0.9, 5)
    probabilities = np.stack([right, 1 - right], axis=1)[:, None, :]

    assert drop_shares(probabilities, np.array([0]), [0.0, 0.01]).tolist() == [0.0, 0.0]
