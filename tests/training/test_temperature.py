from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgewise.errors import ShapeError
from edgewise.training.temperature import (
    expected_calibration_error,
    fit_temperature,
    log_softmax,
    negative_log_likelihood,
)

# 4000 labels drawn from 5 classes: T̂ spreads by a few per cent, so 15 % is far outside chance.
_COUNT = 4000


def _calibrated(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits, and labels drawn from the very softmax of these logits."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((_COUNT, 5)) * 2
    p = np.exp(log_softmax(logits))
    labels = (p.cumsum(axis=1) > rng.uniform(size=(_COUNT, 1))).argmax(axis=1)
    return logits, labels


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000))
def test_calibrated_logits_keep_a_temperature_of_one(seed: int) -> None:
    assert fit_temperature(*_calibrated(seed)) == pytest.approx(1.0, rel=0.15)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000), scale=st.floats(0.3, 5.0))
def test_a_wrong_scale_is_found_and_undone(seed: int, scale: float) -> None:
    logits, labels = _calibrated(seed)

    assert fit_temperature(logits * scale, labels) == pytest.approx(scale, rel=0.15)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000), scale=st.floats(0.2, 6.0))
def test_calibration_error_gets_no_worse_beyond_the_noise_of_its_bins(
    seed: int, scale: float
) -> None:
    logits, labels = _calibrated(seed)
    logits = logits * scale
    t = fit_temperature(logits, labels)

    # The error of calibrated samples is about sqrt(15 bins / 4000 samples) / 4 = 0.015.
    after = expected_calibration_error(logits, labels, t)
    assert after <= expected_calibration_error(logits, labels) + 0.02


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), classes=st.integers(2, 6))
def test_no_temperature_nearby_fits_better(seed: int, classes: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((60, classes)) * rng.uniform(0.1, 8)
    labels = rng.integers(classes, size=60)
    t = fit_temperature(logits, labels)
    found = negative_log_likelihood(logits, labels, t)

    for other in np.clip([t * 0.9, t * 1.1], 0.02, 50):
        assert found <= negative_log_likelihood(logits, labels, float(other)) + 1e-6


def test_one_sample_gets_a_finite_temperature() -> None:
    assert 0.02 <= fit_temperature(np.array([[3.0, 1.0]]), np.array([0])) <= 50


def test_huge_logits_do_not_overflow() -> None:
    logits = np.array([[1e4, 0.0], [0.0, 1e4]])

    assert np.isfinite(negative_log_likelihood(logits, np.array([0, 0])))
    assert expected_calibration_error(logits, np.array([0, 0])) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("logits", "labels"),
    [
        pytest.param(np.zeros((3, 2)), np.zeros(2, dtype=int), id="another count of labels"),
        pytest.param(np.zeros((0, 2)), np.zeros(0, dtype=int), id="no sample"),
        pytest.param(np.zeros(3), np.zeros(3, dtype=int), id="no class axis"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(logits: np.ndarray, labels: np.ndarray) -> None:
    with pytest.raises(ShapeError, match="expected logits"):
        fit_temperature(logits, labels)
