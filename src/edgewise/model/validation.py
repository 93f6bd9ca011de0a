"""What each exit answered on labelled samples it was not fitted on."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from edgewise.errors import ShapeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Logits of every exit on held-out samples; policies choose thresholds from it.

    Attributes:
        logits: [E, N, C], raw, not divided by a temperature.
        labels: [N], class indices.
        source: Which data, which split, for people.

    Raises:
        ShapeError: The arrays do not fit each other.
    """

    logits: npt.NDArray[np.floating] = field(repr=False)
    labels: npt.NDArray[np.integer] = field(repr=False)
    source: str = ""

    def __post_init__(self) -> None:
        if self.logits.ndim != 3 or self.labels.shape != self.logits.shape[1:2]:
            raise ShapeError(
                f"expected logits [E, N, C] and labels [N], found {self.logits.shape} and"
                f" {self.labels.shape}"
            )

    @property
    def correct(self) -> npt.NDArray[np.bool_]:
        """[E, N]: whether exit e answers sample n rightly."""
        return np.asarray(self.logits.argmax(axis=2) == self.labels)

    def accuracy(self) -> npt.NDArray[np.float64]:
        """[E]: share of samples answered rightly at each exit."""
        return np.asarray(self.correct.mean(axis=1))
