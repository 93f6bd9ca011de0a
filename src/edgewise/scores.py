"""Scores of answers: probabilities, confidence, entropy and how well they are calibrated."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]
Float64 = npt.NDArray[np.float64]


def softmax(logits: Floats, *, temperature: float = 1.0) -> Float64:
    """Probabilities over the last axis.

    Args:
        logits: [..., C], raw scores.
        temperature: Divides the logits; above 1 is less sure.

    Returns:
        [..., C], each row summing to 1.

    Example:
        >>> softmax(np.array([0.0, 0.0])).tolist()
        [0.5, 0.5]
    """
    scaled = np.asarray(logits, dtype=np.float64) / temperature
    powers = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def top1_confidence(logits: Floats, *, temperature: float = 1.0) -> Float64:
    """Probability of the most likely class, over the last axis: [..., C] to [...]."""
    return np.asarray(softmax(logits, temperature=temperature).max(axis=-1))


def normalised_entropy(logits: Floats, *, temperature: float = 1.0) -> Float64:
    """Entropy of the probabilities as a share of its largest value, over the last axis.

    Returns:
        [...]: 0 for a certain answer, 1 for one that knows nothing.

    Source:
        Teerapittayanon et al., BranchyNet (2016), uses the entropy; dividing by log C makes one
        threshold mean the same for any number of classes, as FastBERT (2020) does.

    Example:
        >>> round(float(normalised_entropy(np.zeros(10))), 9)
        1.0
    """
    p = softmax(logits, temperature=temperature)
    terms = np.where(p > 0, p * np.log(np.where(p > 0, p, 1.0)), 0.0)
    return np.asarray(np.clip(-terms.sum(axis=-1) / np.log(max(p.shape[-1], 2)), 0.0, 1.0))


def expected_calibration_error(
    confidence: Floats, correct: npt.NDArray[np.bool_], *, bins: int = 15
) -> float:
    """Mean gap between confidence and accuracy over equal-width bins, weighted by their size.

    Args:
        confidence: [N], 0 to 1.
        correct: [N].
        bins: Equal-width bins over 0 to 1.

    Returns:
        0 for a calibrated score, at most 1; 0 for no samples.

    Source:
        Guo et al., On Calibration of Modern Neural Networks (2017), eq. 3.

    Example:
        >>> expected_calibration_error(np.array([0.75] * 4), np.array([True, True, True, False]))
        0.0
    """
    if confidence.size == 0:
        return 0.0
    index = np.minimum((confidence * bins).astype(int), bins - 1)
    size = np.bincount(index, minlength=bins)
    gap = np.abs(
        np.bincount(index, weights=confidence, minlength=bins)
        - np.bincount(index, weights=correct.astype(float), minlength=bins)
    )
    return float(gap[size > 0].sum() / confidence.size)
