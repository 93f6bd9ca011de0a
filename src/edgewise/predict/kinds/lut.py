"""A table indexed by state: what was profiled is looked up, what was not is the nearest state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.spatial import cKDTree

from edgewise.predict.features import require_some_feature, training_table
from edgewise.predict.predictor import Predictor
from edgewise.predict.state_samples import StateSamples

Float64 = npt.NDArray[np.float64]


class StateTable(Predictor):
    """Profiled states and their costs.

    Args:
        states: [N, F], distinct.
        seconds: [N, U].
        features: [F].
        units: [U].
    """

    kind = "lut"

    def __init__(
        self,
        states: Float64,
        seconds: npt.NDArray[np.floating],
        *,
        features: tuple[str, ...],
        units: tuple[str, ...],
    ) -> None:
        self.features = features
        self.units = units
        self._states = np.ascontiguousarray(states, dtype=np.float64)
        self._seconds = np.asarray(seconds, dtype=np.float32)
        self._rows = {state.tobytes(): row for row, state in enumerate(self._states)}
        # All features run from 0 to 1, but few use that range.
        spread = np.ptp(self._states, axis=0)
        self._scale = np.where(spread > 0, spread, 1.0)
        self._tree = cKDTree(self._states / self._scale)

    def predict(self, state: Float64) -> Float64:
        """Look the state up, or else the nearest one in features scaled to the same range."""
        rows: Any = None
        if state.ndim == 1:
            rows = self._rows.get(np.asarray(state, dtype=np.float64).tobytes())
        if rows is None:
            rows = self._tree.query(state / self._scale)[1]
        found: Float64 = self._seconds[rows].astype(np.float64)
        return found

    def to_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """States and costs."""
        return {"states": self._states, "seconds": self._seconds}


def table_bytes(
    num_states: int, num_units: int, *, cpu_levels: int = 1, independent_clusters: int = 1
) -> int:
    """Memory of a full table whose keys are positions: one FP32 number per state and unit.

    Args:
        num_states: With all CPU clusters at one clock.
        num_units: Stages and heads.
        cpu_levels: Clocks a CPU cluster can take.
        independent_clusters: Clusters that take them independently; each beyond the first is one
            more dimension of the table.

    Source:
        The UniExit paper, table 3: independent scaling takes 22.0 times the memory of synchronised
        scaling, and 22 is the number of CPU levels of its device. Its 7.80 MiB for 17,600 states
        are 465 bytes per state; how it lays a state out is not said, so only ratios compare.

    Example:
        >>> table_bytes(17_600, 24)
        1689600
        >>> table_bytes(17_600, 24, cpu_levels=22, independent_clusters=2) // 1689600
        22
    """
    size: int = 4 * num_states * num_units * cpu_levels ** (independent_clusters - 1)
    return size


def states_needed(features: tuple[str, ...]) -> int:  # noqa: ARG001 - the same for every kind
    """Fewest states it can be fitted to."""
    return 2


def fit(samples: StateSamples, *, seed: int = 0) -> StateTable:  # noqa: ARG001 - nothing is drawn
    """Keep every state; states that are equal become one with their median."""
    features, states, costs = training_table(samples, kind="lut", needed=2)
    require_some_feature(features, kind="lut")
    distinct, which = np.unique(states, axis=0, return_inverse=True)
    which = which.reshape(-1)
    if len(distinct) == len(costs):
        merged = np.empty_like(costs)
        merged[which] = costs
    else:
        merged = np.array([np.median(costs[which == k], axis=0) for k in range(len(distinct))])
    return StateTable(distinct, merged, features=features, units=samples.units)


def restore(
    arrays: Mapping[str, npt.NDArray[Any]], *, features: tuple[str, ...], units: tuple[str, ...]
) -> StateTable:
    """Make it again from its arrays."""
    return StateTable(arrays["states"], arrays["seconds"], features=features, units=units)
