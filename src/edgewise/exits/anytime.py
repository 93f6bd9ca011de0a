"""Anytime answers without training: combined exits whose confidence does not fall with depth.

Pure functions of validation logits [E, N, C]; competitors of training for monotone exits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgewise.scores import softmax

Float64 = npt.NDArray[np.float64]


def exit_probabilities(
    logits: npt.NDArray[np.floating], *, temperatures: Sequence[float] | None = None
) -> Float64:
    """[E, N, C]: what each exit says by itself.

    Args:
        logits: [E, N, C].
        temperatures: [E]; ones by default.
    """
    known = [1.0] * len(logits) if temperatures is None else temperatures
    return np.stack([softmax(z, temperature=t) for z, t in zip(logits, known, strict=True)])


def caching_anytime(
    logits: npt.NDArray[np.floating], *, temperatures: Sequence[float] | None = None
) -> Float64:
    """[E, N, C]: at each depth the most confident answer so far.

    Args:
        logits: [E, N, C].
        temperatures: [E]; ones by default.

    Returns:
        Probabilities; the largest one never falls with depth, and of equals the earlier stays.

    Source:
        Jazbec et al., Towards Anytime Classification in Early-Exit Architectures (NeurIPS 2023),
        the caching baseline.

    Example:
        >>> z = np.array([[[0.0, 3.0]], [[1.0, 0.0]]])  # the second exit is less sure
        >>> caching_anytime(z).argmax(axis=2).ravel().tolist()
        [1, 1]
    """
    kept = exit_probabilities(logits, temperatures=temperatures)
    for k in range(1, len(kept)):
        worse = kept[k].max(axis=-1) <= kept[k - 1].max(axis=-1)
        kept[k][worse] = kept[k - 1][worse]
    return kept


def product_anytime(
    logits: npt.NDArray[np.floating], *, weights: Sequence[float] | None = None
) -> Float64:
    """[E, N, C]: at each depth the normalised product of positive logits so far.

    A class that any exit so far gives a logit of zero or less is out. Where all are out the product
    says nothing, and the exit's own softmax stands there.

    Args:
        logits: [E, N, C].
        weights: [E], exponent of each exit; ones by default.

    Source:
        Jazbec et al., Towards Anytime Classification in Early-Exit Architectures (NeurIPS 2023),
        the product of experts with ReLU as the activation.

    Example:
        >>> product_anytime(np.array([[[1.0, 3.0]], [[1.0, 1.0]]]))[:, 0].tolist()
        [[0.25, 0.75], [0.25, 0.75]]
    """
    powers = [1.0] * len(logits) if weights is None else weights
    own = exit_probabilities(logits)
    with np.errstate(divide="ignore"):
        logs = np.log(np.maximum(np.asarray(logits, dtype=np.float64), 0.0))
    running = np.cumsum([w * z for w, z in zip(powers, logs, strict=True)], axis=0)
    top = running.max(axis=-1, keepdims=True)
    collapsed = ~np.isfinite(top)
    shares = np.exp(running - np.where(collapsed, 0.0, top))
    total = shares.sum(axis=-1, keepdims=True)
    return np.where(collapsed, own, shares / np.where(collapsed, 1.0, total))


def drop_shares(
    probabilities: Float64, labels: npt.NDArray[np.integer], thresholds: Sequence[float]
) -> Float64:
    """[T]: share of samples whose right class loses more than a threshold from an exit to a later.

    Args:
        probabilities: [E, N, C].
        labels: [N].
        thresholds: [T].

    Source:
        UniExit, Figure 19; the same check as in Jazbec et al. (2023).

    Example:
        >>> p = np.array([[[0.9, 0.1]], [[0.95, 0.05]], [[0.6, 0.4]]])
        >>> drop_shares(p, np.array([0]), [0.3, 0.5]).tolist()
        [1.0, 0.0]
    """
    right = probabilities[:, np.arange(labels.size), labels]  # [E, N]
    drop = (np.maximum.accumulate(right, axis=0) - right).max(axis=0)
    return np.array([float((drop > t).mean()) for t in thresholds])
