"""The record every loader returns: images, labels and where they came from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from edgewise.data.split import Split, stratified_sample, stratified_split
from edgewise.errors import ConfigError, DataError, ShapeError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dataset:
    """Images with their labels, as stored: neither resized nor normalised.

    Attributes:
        name: How the user called it, e.g. ``"fashion-mnist"``.
        images: uint8 [N, H, W, C], C = 1 (grey) or 3 (RGB), 0 is black.
        labels: int64 [N], positions in ``class_names``; ``None`` where nobody said.
        class_names: One name per class; empty where there are no labels.
        split: Which part this is; ``"all"`` for data without labels, which is never split.
        source: A sentence: where the data came from and how it was split.
        licence: The licence's name; ``None`` where it is not known.
    """

    name: str
    images: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64] | None
    class_names: tuple[str, ...]
    split: Literal["train", "test", "all"]
    source: str
    licence: str | None

    def __post_init__(self) -> None:
        _check_images(self.images, where=f"data set {self.name!r}")
        if self.labels is not None:
            self._check_labels(self.labels)
        if len(set(self.class_names)) != len(self.class_names):
            raise DataError(
                f"data set {self.name!r} names a class twice: {', '.join(self.class_names)}",
                help="give every class its own name",
            )

    def __len__(self) -> int:
        return len(self.images)

    def take(self, n: int, *, seed: int) -> Dataset:
        """A smaller set in which every class keeps its share.

        Args:
            n: How many samples, 1 to ``len(self)``.
            seed: Decides which samples; the same seed draws the same ones.

        Returns:
            A data set of ``n`` samples in their present order. Without labels they are drawn
            uniformly.

        Raises:
            ConfigError: ``n`` is not a whole number from 1 to ``len(self)``.
        """
        if type(n) is not int or not 1 <= n <= len(self):
            raise ConfigError(
                f"expected 1 to {len(self)} samples of data set {self.name!r}, found {n!r}",
                help=f"ask for a whole number from 1 to {len(self)}",
            )
        rng = np.random.default_rng(seed)
        if self.labels is None:
            chosen = np.sort(rng.permutation(len(self))[:n])
            return replace(self, images=self.images[chosen])
        chosen = stratified_sample(self.labels, n, rng=rng)
        return replace(self, images=self.images[chosen], labels=self.labels[chosen])

    def hold_out(self, split: Split) -> Dataset:
        """The train or the test part of labelled data that comes without splits.

        A fifth of each class is the test part, the same samples every time.

        Args:
            split: The part to keep.

        Raises:
            DataError: There are no labels, or no class is large enough to hold a sample out.
        """
        if self.labels is None:
            raise DataError(
                f"data set {self.name!r} has no labels, so it cannot be split by class",
                help="use all of it, or add labels",
            )
        chosen = stratified_split(self.labels, split=split)
        if chosen.size == 0:
            raise DataError(
                f"data set {self.name!r} has {len(self)} images in "
                f"{np.unique(self.labels).size} classes: too few to hold out a test split",
                help="give each class at least three images, or bring your own test data",
            )
        return replace(
            self,
            images=self.images[chosen],
            labels=self.labels[chosen],
            split=split,
            source=f"{self.source}; no split of its own, a fifth of each class is held out",
        )

    def _check_labels(self, labels: npt.NDArray[np.int64]) -> None:
        if labels.dtype != np.int64 or labels.shape != (len(self.images),):
            raise ShapeError(
                f"labels of data set {self.name!r}: expected int64 [{len(self.images)}], one per "
                f"image, found {labels.dtype} {list(labels.shape)}",
                help="store one whole number per image",
            )
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= len(self.class_names):
            raise DataError(
                f"labels of data set {self.name!r}: expected 0 to {len(self.class_names) - 1} "
                f"({len(self.class_names)} classes), found {low} to {high}",
                help="number the classes from 0, and name each of them",
            )


def _check_images(images: npt.NDArray[np.uint8], *, where: str) -> None:
    if images.ndim != 4 or images.shape[-1] not in {1, 3} or images.dtype != np.uint8:
        raise ShapeError(
            f"images of {where}: expected uint8 [N, H, W, C] with C 1 or 3, "
            f"found {images.dtype} {list(images.shape)}",
            help="store pixels 0..255 with the channel last",
        )
    if images.size == 0:
        raise ShapeError(
            f"images of {where}: expected at least one image, found shape {list(images.shape)}",
            help="check that the file or folder is the one you meant",
        )
