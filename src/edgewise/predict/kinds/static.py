"""The static table: one median per unit over all states, as profile-once methods use it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from edgewise.predict.features import training_table
from edgewise.predict.predictor import Predictor
from edgewise.predict.state_samples import StateSamples

Float64 = npt.NDArray[np.float64]


class StaticTable(Predictor):
    """Predicts the same in every state.

    Args:
        seconds: [U], medians.
        units: [U], their names.
    """

    kind = "static"

    def __init__(self, seconds: Float64, *, units: tuple[str, ...]) -> None:
        self.features = ()
        self.units = units
        self._seconds = np.asarray(seconds, dtype=np.float64)

    def predict(self, state: Float64) -> Float64:
        """The table, once for each state."""
        return np.broadcast_to(self._seconds, (*np.shape(state)[:-1], len(self.units)))

    def to_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The medians."""
        return {"seconds": self._seconds}


def states_needed(features: tuple[str, ...]) -> int:  # noqa: ARG001 - the same for every kind
    """Fewest states it can be fitted to."""
    return 1


def fit(samples: StateSamples, *, seed: int = 0) -> StaticTable:  # noqa: ARG001 - nothing is drawn
    """Take the median of each unit over all states."""
    _, _, costs = training_table(samples, kind="static", needed=1)
    return StaticTable(np.median(costs, axis=0), units=samples.units)


def restore(
    arrays: Mapping[str, npt.NDArray[Any]],
    *,
    features: tuple[str, ...],  # noqa: ARG001 - it reads none
    units: tuple[str, ...],
) -> StaticTable:
    """Make it again from its arrays."""
    return StaticTable(arrays["seconds"], units=units)
