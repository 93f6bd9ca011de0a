"""Choose samples so that every class keeps its share."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

Split = Literal["train", "test"]

HOLDOUT_RATIO = 0.2
"""Share of each class that becomes the test split of data that comes without one."""


def stratified_sample(
    labels: npt.NDArray[np.int64], n: int, *, rng: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Draw ``n`` positions without replacement, each class in proportion to its size.

    Shares that are not whole go to the classes with the largest remainder, so a class differs
    from its exact share by less than one sample.

    Args:
        labels: [N], the class of each sample.
        n: How many to draw, at most N.
        rng: Decides which samples of a class are drawn.

    Returns:
        [n] positions, ascending.
    """
    classes, counts = np.unique(labels, return_counts=True)
    wanted = counts * n // labels.size
    remainder = counts * n % labels.size
    # Remainders are whole numbers and stable sorting breaks ties: no float decides a sample.
    extra = np.argsort(-remainder, kind="stable")[: n - int(wanted.sum())]
    wanted[extra] += 1
    drawn = [
        rng.permutation(np.flatnonzero(labels == label))[:count]
        for label, count in zip(classes, wanted, strict=True)
    ]
    return np.sort(np.concatenate(drawn)).astype(np.int64)


def stratified_split(
    labels: npt.NDArray[np.int64], *, split: Split, seed: int = 0
) -> npt.NDArray[np.int64]:
    """Positions of one split of data that comes without splits.

    ``HOLDOUT_RATIO`` of each class, rounded, is the test split and the rest is the train split;
    the two never overlap and depend on the labels and the seed only.

    Args:
        labels: [N], the class of each sample.
        split: Which part to return.
        seed: Decides which samples are held out.

    Returns:
        Positions, ascending; empty where no class is large enough to hold one out.
    """
    rng = np.random.default_rng(seed)
    held_out = np.zeros(labels.size, dtype=bool)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        held_out[members[: round(HOLDOUT_RATIO * members.size)]] = True
    return np.flatnonzero(held_out if split == "test" else ~held_out).astype(np.int64)
