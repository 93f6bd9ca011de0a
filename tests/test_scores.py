from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgewise.scores import (
    expected_calibration_error,
    normalised_entropy,
    softmax,
    top1_confidence,
)

rows = st.lists(st.floats(-50, 50), min_size=2, max_size=8).map(np.array)


@settings(deadline=None)  # the machine may be busy
@given(logits=rows, shift=st.floats(-1e3, 1e3), temperature=st.floats(0.1, 10))
def test_probabilities_sum_to_one_and_do_not_change_with_a_shift(
    logits: np.ndarray, shift: float, temperature: float
) -> None:
    found = softmax(logits, temperature=temperature)

    assert found.sum() == pytest.approx(1.0)
    # A shift of 1000 costs three digits; the temperature may cost another.
    assert softmax(logits + shift, temperature=temperature) == pytest.approx(found, abs=1e-10)


def test_probabilities_are_exponentials_over_their_sum() -> None:
    found = softmax(np.array([[0.0, 1.0], [2.0, 0.0]]), temperature=2.0)

    assert found[0, 1] == pytest.approx(math.exp(0.5) / (1 + math.exp(0.5)))
    assert found[1, 0] == pytest.approx(math.exp(1.0) / (1 + math.exp(1.0)))


def test_huge_logits_do_not_overflow() -> None:
    assert softmax(np.array([1e30, 0.0], dtype=np.float32)).tolist() == [1.0, 0.0]


def test_float32_logits_are_summed_in_double_precision() -> None:
    found = softmax(np.zeros(100_000, dtype=np.float32))

    assert found.dtype == np.float64
    assert found.sum() == pytest.approx(1.0, abs=1e-12)


def test_confidence_is_the_largest_probability() -> None:
    logits = np.array([[[0.0, 1.0, 0.5], [3.0, 0.0, 0.0]]])

    assert top1_confidence(logits).tolist() == softmax(logits).max(axis=-1).tolist()


@settings(deadline=None)  # the machine may be busy
@given(logits=rows)
def test_entropy_lies_between_sure_and_clueless(logits: np.ndarray) -> None:
    shares = softmax(logits)
    expected = -sum(p * math.log(p) for p in shares if p > 0) / math.log(len(logits))

    found = float(normalised_entropy(logits))

    assert 0.0 <= found <= 1.0
    assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("classes", [2, 10, 1000])
def test_one_threshold_means_the_same_for_any_number_of_classes(classes: int) -> None:
    assert normalised_entropy(np.zeros(classes)) == pytest.approx(1.0)
    assert normalised_entropy(np.eye(classes)[0] * 1e4) == 0.0


def test_a_single_class_is_always_sure() -> None:
    assert normalised_entropy(np.zeros((3, 1))).tolist() == [0.0, 0.0, 0.0]


def test_a_higher_temperature_is_less_sure() -> None:
    logits = np.array([2.0, 1.0, 0.0])

    entropy = [float(normalised_entropy(logits, temperature=t)) for t in (0.5, 1.0, 2.0)]

    assert entropy == sorted(entropy)


def test_calibration_error_is_the_gap_between_promise_and_truth() -> None:
    # Bin around 0.9: promised 0.9, true 0.5; bin around 0.6: promised 0.6, true 1.
    confidence = np.array([0.9, 0.9, 0.6, 0.6])
    correct = np.array([True, False, True, True])

    assert expected_calibration_error(confidence, correct) == pytest.approx(0.4)


def test_calibration_error_weighs_bins_by_their_size() -> None:
    confidence = np.array([0.9] * 9 + [0.1])
    correct = np.array([True] * 9 + [True])

    assert expected_calibration_error(confidence, correct) == pytest.approx(0.9 * 0.1 + 0.1 * 0.9)


@settings(deadline=None)  # the machine may be busy
@given(
    samples=st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=60),
    bins=st.integers(1, 20),
)
def test_calibration_error_agrees_with_a_loop_over_bins(
    samples: list[tuple[float, bool]], bins: int
) -> None:
    total = 0.0
    for b in range(bins):
        inside = [s for s in samples if min(int(s[0] * bins), bins - 1) == b]
        total += abs(sum(c for c, _ in inside) - sum(r for _, r in inside))

    found = expected_calibration_error(
        np.array([c for c, _ in samples]), np.array([r for _, r in samples]), bins=bins
    )

    assert found == pytest.approx(total / len(samples))
    assert 0.0 <= found <= 1.0


def test_no_samples_are_calibrated() -> None:
    assert expected_calibration_error(np.array([]), np.array([], dtype=bool)) == 0.0
