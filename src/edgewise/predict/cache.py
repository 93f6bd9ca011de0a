"""The paper's cache of predictions: least recently used, one entry per unit and exact state.

Kept as a baseline. Predicting all units once per state makes it unnecessary.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from typing import Any

import numpy as np
import numpy.typing as npt

from edgewise.errors import ConfigError
from edgewise.predict.features import unit_groups
from edgewise.predict.predictor import Predictor

Float64 = npt.NDArray[np.float64]
Key = tuple[str | float, ...]


class PredictionCache(Predictor):
    """A predictor behind a cache of the paper's size and keys.

    Attributes:
        hits: Units answered from the cache.
        misses: Units predicted.

    Args:
        predictor: What to ask for a unit that is not in the cache.
        workload: First part of each key.
        capacity: Entries; the least recently used leaves first.
        unit_id: Whether keys have the unit's number, as for CNNs. Without it all stages share one
            entry per state, and all heads another, which is right only where ``predictor`` gives
            them the same.

    Source:
        The UniExit paper, section 5.2: 128 entries; the key is workload, kind of unit and the full
        vector of features, neither rounded nor binned.
    """

    def __init__(
        self,
        predictor: Predictor,
        *,
        workload: str = "",
        capacity: int = 128,
        unit_id: bool = True,
    ) -> None:
        if capacity < 1:
            raise ConfigError(f"expected a cache of at least 1 entry, found {capacity}")
        self.kind = predictor.kind
        self.features = predictor.features
        self.units = predictor.units
        self.hits = 0
        self.misses = 0
        self._predictor = predictor
        self._capacity = capacity
        self._entries: OrderedDict[Key, float] = OrderedDict()
        self._lock = threading.Lock()
        self._names: list[Key] = []
        for group, where in unit_groups(self.units).items():
            count = where.stop - where.start
            self._names += [
                (workload, group, *((k / max(1, count - 1),) if unit_id else ()))
                for k in range(count)
            ]

    def __len__(self) -> int:
        return len(self._entries)

    def unit_s(self, state: Float64, unit: int) -> float:
        """Median seconds of one unit, from the cache if it is there.

        Args:
            state: [F].
            unit: Its place in ``units``.
        """
        key = (*self._names[unit], *state.tolist())
        with self._lock:
            found = self._entries.get(key)
            if found is not None:
                self._entries.move_to_end(key)
                self.hits += 1
                return found
            self.misses += 1
            seconds = float(self._predictor.predict(state)[unit])
            self._entries[key] = seconds
            if len(self._entries) > self._capacity:
                self._entries.popitem(last=False)
            return seconds

    def predict(self, state: Float64) -> Float64:
        """Every unit through the cache, one after the other."""
        if state.ndim == 1:
            return np.array([self.unit_s(state, unit) for unit in range(len(self.units))])
        return np.stack([self.predict(row) for row in state])

    def to_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Those of the predictor; the cache is not kept."""
        return self._predictor.to_arrays()

    @property
    def num_bytes(self) -> int:
        """Memory of the predictor and of the entries as they are now, keys included."""
        return self._predictor.num_bytes + self.cache_bytes

    @property
    def cache_bytes(self) -> int:
        """Memory of the entries alone: table, keys and the numbers they hold.

        Names of workload and kind are shared by all keys and not counted.
        """
        with self._lock:
            size = sys.getsizeof(self._entries)
            for key, seconds in self._entries.items():
                size += sys.getsizeof(key) + sys.getsizeof(seconds)
                size += sum(sys.getsizeof(part) for part in key if isinstance(part, float))
            return size
