"""Costs as physics has them: work divided by clocks, made longer by those who share them.

A unit launches (CPU), computes (GPU) and moves data (memory), so its time is a sum of work over
clock; neighbours and a CPU quota take a share of each. Every term and weight is non-negative: no
clock that rises, and no load that falls, can make a unit slower.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from edgewise.predict.features import training_table
from edgewise.predict.predictor import Predictor
from edgewise.predict.state_samples import StateSamples

Float64 = npt.NDArray[np.float64]

_CLOCKS = ("cpu.frequency_ratio", "gpu.frequency_ratio", "emc.frequency_ratio")
_QUOTA = "cpu.quota_ratio"
_LOADS = ("cpu.utilisation_ratio", "gpu.utilisation_ratio")
_LEAST_RATIO = 1e-3  # a clock or quota below it is a sensor's mistake, not a divisor
_FEWEST_S = 1e-9


class PhysicalModel(Predictor):
    """Non-negative weights of terms in clocks, quota and utilisation.

    Args:
        weights: [P, U], seconds per term.
        features: [F].
        units: [U].
    """

    kind = "physical"

    def __init__(
        self, weights: Float64, *, features: tuple[str, ...], units: tuple[str, ...]
    ) -> None:
        self.features = features
        self.units = units
        self._weights = np.ascontiguousarray(weights, dtype=np.float64)
        self._terms = Terms(features)

    def predict(self, state: Float64) -> Float64:
        """Terms of the state times the weights."""
        terms = self._terms.one(state.tolist()) if state.ndim == 1 else self._terms(state)
        seconds: Float64 = terms @ self._weights
        return np.maximum(seconds, _FEWEST_S, out=seconds)

    def to_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The weights."""
        return {"weights": self._weights}


class Terms:
    """The terms of a state: {1, 1/f of each clock, 1/quota, 1/(f_cpu·quota)} × {1, loads, loads²}.

    The squares bend the straight line in a load the way 1/(1 − load) bends.

    Args:
        features: [F]; terms of features that are absent are left out.
    """

    def __init__(self, features: tuple[str, ...]) -> None:
        self._slow = [k for k, n in enumerate(features) if n in _CLOCKS or n == _QUOTA]
        self._loads = [k for k, n in enumerate(features) if n in _LOADS]
        slow = [features[k] for k in self._slow]
        self._pair = (
            (slow.index(_CLOCKS[0]), slow.index(_QUOTA))
            if _CLOCKS[0] in slow and _QUOTA in slow
            else None
        )
        self._bases = 1 + len(slow) + (self._pair is not None)
        self._factors = 1 + 2 * len(self._loads)

    def __len__(self) -> int:
        return self._bases * self._factors

    def one(self, state: list[float]) -> Float64:
        """Terms of one state; for so few numbers Python is faster than numpy."""
        bases = [1.0, *(1.0 / max(state[k], _LEAST_RATIO) for k in self._slow)]
        if self._pair is not None:
            bases.append(bases[1 + self._pair[0]] * bases[1 + self._pair[1]])
        loads = [state[k] for k in self._loads]
        factors = [1.0, *loads, *(load * load for load in loads)]
        return np.array([base * factor for base in bases for factor in factors])

    def __call__(self, states: Float64) -> Float64:
        """Terms of states [N, F]: [N, P]."""
        bases = np.ones((len(states), self._bases))
        slow, loads = len(self._slow), len(self._loads)
        np.divide(1.0, np.maximum(states[:, self._slow], _LEAST_RATIO), out=bases[:, 1 : 1 + slow])
        if self._pair is not None:
            first, second = self._pair
            bases[:, -1] = bases[:, 1 + first] * bases[:, 1 + second]
        if not loads:
            return bases
        factors = np.ones((len(states), self._factors))
        load = states[:, self._loads]
        factors[:, 1 : 1 + loads] = load
        np.multiply(load, load, out=factors[:, 1 + loads :])
        terms = bases[:, :, None] * factors[:, None, :]
        return terms.reshape(len(states), len(self))


def states_needed(features: tuple[str, ...]) -> int:
    """Fewest states it can be fitted to: one more than it has terms."""
    return len(Terms(features)) + 1


def fit(samples: StateSamples, *, seed: int = 0) -> PhysicalModel:  # noqa: ARG001 - nothing is drawn
    """Fit the weights of each unit by non-negative least squares on relative errors.

    Twice: residuals are divided by the observed cost, then by the cost so predicted, since the
    first pass leans towards states that happened to be fast.

    Source:
        Lawson and Hanson, Solving Least Squares Problems (1974), ch. 23 (NNLS).
    """
    features, states, costs = training_table(samples, kind="physical", needed=1)
    training_table(samples, kind="physical", needed=states_needed(features))
    terms = Terms(features)(states)  # [N, P]
    weights = np.zeros((terms.shape[1], costs.shape[1]))
    for unit, seconds in enumerate(costs.T):
        scale = seconds
        for _ in range(2):
            weights[:, unit] = _solve(terms / scale[:, None], seconds / scale)
            scale = np.maximum(terms @ weights[:, unit], 1e-3 * seconds)
    return PhysicalModel(weights, features=features, units=samples.units)


def _solve(matrix: Float64, target: Float64) -> Float64:
    """Non-negative least squares; the triangle of a QR has the same solution and few rows."""
    size = np.linalg.norm(matrix, axis=0)
    size[size == 0] = 1.0
    both = np.column_stack([matrix / size, target])
    triangle = cast("Float64", np.linalg.qr(both, mode="r"))
    found: Float64 = nnls(triangle[:, :-1], triangle[:, -1], maxiter=30 * matrix.shape[1])[0]
    weights: Float64 = found / size
    return weights


def restore(
    arrays: Mapping[str, npt.NDArray[Any]], *, features: tuple[str, ...], units: tuple[str, ...]
) -> PhysicalModel:
    """Make it again from its arrays."""
    return PhysicalModel(arrays["weights"], features=features, units=units)
