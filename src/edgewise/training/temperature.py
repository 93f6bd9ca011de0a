"""One temperature per exit, so that a softmax's largest value can be read as a probability."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from edgewise import scores
from edgewise.errors import ShapeError

Logits = npt.NDArray[np.floating[Any]]
Labels = npt.NDArray[np.integer[Any]]

_LOG_RANGE = (np.log(0.02), np.log(50.0))


def log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    """Logarithm of the softmax over the last axis, without overflow."""
    shifted = np.asarray(logits, dtype=np.float64)
    shifted = shifted - shifted.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def negative_log_likelihood(logits: Logits, labels: Labels, temperature: float = 1.0) -> float:
    """Mean over samples of -log p(label), nats, at a temperature."""
    logp = log_softmax(np.asarray(logits, dtype=np.float64) / temperature)
    return float(-logp[np.arange(len(labels)), labels].mean())


def fit_temperature(logits: Logits, labels: Labels) -> float:
    """The temperature T that makes softmax(logits / T) fit the labels best.

    It divides every logit alike, so no answer changes. Where the samples cannot tell (one sample,
    or all answered rightly, so that T would run to its limit) T is held within 0.02 to 50.

    Args:
        logits: [N, C], raw.
        labels: [N], class indices.

    Returns:
        T, above zero; 1 means the logits are calibrated as they are.

    Raises:
        ShapeError: The arrays do not fit each other, or are empty.

    Source:
        Guo et al., On calibration of modern neural networks, ICML 2017 (arXiv:1706.04599), 4.2.
        The likelihood is concave in 1/T, so a bounded scalar search finds the one optimum.
    """
    _check(logits, labels)
    from scipy.optimize import minimize_scalar

    found = minimize_scalar(
        lambda log_t: negative_log_likelihood(logits, labels, float(np.exp(log_t))),
        bounds=_LOG_RANGE,
        method="bounded",
        options={"xatol": 1e-5},
    )
    return float(np.exp(found.x))


def expected_calibration_error(
    logits: Logits, labels: Labels, temperature: float = 1.0, *, bins: int = 15
) -> float:
    """How far confidence is from accuracy, averaged over bins of confidence by their size.

    Args:
        logits: [N, C], raw.
        labels: [N], class indices.
        temperature: Divides the logits.
        bins: Of equal width in confidence, 0 to 1.

    Returns:
        0 (calibrated) to 1.

    Raises:
        ShapeError: The arrays do not fit each other, or are empty.

    Source:
        Guo et al. 2017, equation 3. Biased upwards where bins hold few samples.
    """
    _check(logits, labels)
    confidence = scores.top1_confidence(logits, temperature=temperature)
    right = np.asarray(logits).argmax(axis=1) == labels
    return scores.expected_calibration_error(confidence, right, bins=bins)


def _check(logits: Logits, labels: Labels) -> None:
    if logits.ndim != 2 or labels.shape != logits.shape[:1] or logits.size == 0:
        raise ShapeError(
            f"expected logits [N, C] and labels [N], at least one sample, found"
            f" {list(logits.shape)} and {list(labels.shape)}"
        )
