"""A gate: logistic regression on a hidden state, by a few Newton steps."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgewise.errors import ShapeError
from edgewise.model.decoding import Gate

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]

PENALTIES = (0.001, 0.003, 0.01, 0.03, 0.1)
_STEPS = 25
_DONE = 1e-6


def fit_gate(layer: int, states: Float32, agrees: Bool) -> Gate:
    """Fit the chance that an exit agrees with full depth, from the state alone.

    The penalty on the weights is chosen on the last fifth of the samples, then all are used.

    Args:
        layer: Where the states are from.
        states: [N, H], normed, in the order of the text.
        agrees: [N].

    Returns:
        A gate; one that knows the share alone where all samples agree or none does.

    Raises:
        ShapeError: The arrays do not fit each other, or are empty.
    """
    if states.ndim != 2 or agrees.shape != states.shape[:1] or not len(agrees):
        raise ShapeError(
            f"expected states [N, H] and labels [N], found {states.shape} and {agrees.shape}"
        )
    mean = states.mean(axis=0, dtype=np.float64)
    scale = states.std(axis=0, dtype=np.float64)
    scale = np.where(scale > 1e-6 * (np.abs(mean) + 1e-30), scale, np.inf)
    inputs = np.ones((len(states), states.shape[1] + 1))
    inputs[:, :-1] = (states - mean) / scale
    labels = agrees.astype(np.float64)
    split = len(labels) - len(labels) // 5
    penalty = PENALTIES[-1]
    if 0 < split < len(labels):
        losses = []
        for each in PENALTIES:
            found = logistic_regression(inputs[:split], labels[:split], penalty=each)
            losses.append(_loss(inputs[split:] @ found, labels[split:]))
        penalty = PENALTIES[int(np.argmin(losses))]
    found = logistic_regression(inputs, labels, penalty=penalty)
    weight = found[:-1] / scale
    return Gate(
        layer=layer, weight=weight.astype(np.float32), bias=float(found[-1] - weight @ mean)
    )


def logistic_regression(inputs: Float64, labels: Float64, *, penalty: float) -> Float64:
    """Weights that maximise the penalised likelihood of labels 0 and 1.

    Args:
        inputs: [N, H + 1]; the last column is 1 and is not penalised.
        labels: [N].
        penalty: On half the squared weights, relative to the mean loss.

    Source:
        Newton's method for penalised logistic regression (iteratively reweighted least squares):
        Hastie, Tibshirani, Friedman, The elements of statistical learning, 2009, section 4.4.1.
    """
    from scipy.linalg import solve

    count, width = inputs.shape
    weights = np.zeros(width)
    # One sample of each kind keeps the constant finite where all are alike.
    share = (labels.sum() + 0.5) / (count + 1)
    weights[-1] = np.log(share / (1 - share))
    if labels.min() == labels.max():
        return weights
    strength = np.full(width, penalty)
    strength[-1] = 0.0
    loss = _loss(inputs @ weights, labels)
    for _ in range(_STEPS):
        chance = _logistic(inputs @ weights)
        slope = inputs.T @ (chance - labels) / count + strength * weights
        curve = (inputs * (chance * (1 - chance) / count)[:, None]).T @ inputs
        curve[np.diag_indices(width)] += strength + 1e-12
        step = solve(curve, slope, assume_a="pos")
        size, before = 1.0, loss
        while size > 1e-4:  # a full step may overshoot where the classes are nearly separable
            tried = weights - size * step
            loss = _loss(inputs @ tried, labels) + 0.5 * float(strength @ tried**2)
            if loss <= before:
                break
            size /= 2
        else:
            return weights
        weights = weights - size * step
        if before - loss < _DONE * max(before, 1e-12):
            break
    return weights


def area_under_curve(scores: Float64, labels: Bool) -> float | None:
    """Chance that a true sample scores above a false one; ``None`` where all are alike.

    Source:
        Hanley and McNeil, The meaning and use of the area under a ROC curve, Radiology 143, 1982:
        the Mann-Whitney statistic, ties counting one half.
    """
    from scipy.stats import rankdata

    positive = int(labels.sum())
    negative = len(labels) - positive
    if not positive or not negative:
        return None
    ranks = float(rankdata(scores)[labels].sum())
    return (ranks - positive * (positive + 1) / 2) / (positive * negative)


def _logistic(values: Float64) -> Float64:
    return np.asarray(0.5 * (1 + np.tanh(values / 2)))


def _loss(values: Float64, labels: Float64) -> float:
    return float((np.logaddexp(0, values) - labels * values).mean())
