"""Gradient-boosted trees of scikit-learn, as a reference for the accuracy that can be had.

Too slow for the request path, and not kept in files: its trees would have to be pickled.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from edgewise.errors import ConfigError, ProfileError
from edgewise.predict.features import require_some_feature, training_table, unit_groups
from edgewise.predict.predictor import Predictor
from edgewise.predict.state_samples import StateSamples

Float64 = npt.NDArray[np.float64]

_STATES_NEEDED = 64
_MAX_ROWS = 60_000


class BoostedTrees(Predictor):
    """One model for stages and one for heads; inputs are the features and the unit's number.

    Args:
        models: By group.
        features: [F].
        units: [U].
    """

    kind = "boosted"

    def __init__(
        self, models: Mapping[str, Any], *, features: tuple[str, ...], units: tuple[str, ...]
    ) -> None:
        self.features = features
        self.units = units
        self._models = dict(models)

    @property
    def num_bytes(self) -> int:
        """Memory of the trees, as long as they are when pickled."""
        stream = io.BytesIO()
        pickle.dump(self._models, stream)
        return stream.tell()

    def predict(self, state: Float64) -> Float64:
        """One batch of all units for each model."""
        states = np.atleast_2d(state)
        seconds = np.empty((len(states), len(self.units)))
        for group, where in unit_groups(self.units).items():
            count = where.stop - where.start
            logs = self._models[group].predict(_rows(states, np.arange(count)))
            seconds[:, where] = np.exp(logs).reshape(len(states), count)
        return seconds if state.ndim > 1 else seconds[0]

    def to_arrays(self) -> NoReturn:
        """Refused.

        Raises:
            ProfileError: Always.
        """
        _refuse()


def _refuse() -> NoReturn:
    raise ProfileError(
        "boosted trees are a reference and are not kept in files, since that would take pickle",
        help="fit kind physical or mlp",
    )


def _rows(states: Float64, units: npt.NDArray[np.integer]) -> Float64:
    """Each state with each unit's number: [N·U, F + 1]."""
    return np.column_stack([np.repeat(states, len(units), axis=0), np.tile(units, len(states))])


def states_needed(features: tuple[str, ...]) -> int:  # noqa: ARG001 - the same for every kind
    """Fewest states it can be fitted to."""
    return _STATES_NEEDED


def fit(
    samples: StateSamples, *, seed: int = 0, max_rows: int = _MAX_ROWS, iterations: int = 300
) -> BoostedTrees:
    """Fit to the logarithm of the seconds.

    Args:
        samples: What to fit to.
        seed: Of the states drawn, where there are more than wanted, and of the trees.
        max_rows: Rows, a state and a unit each, of one model.
        iterations: Trees of one model.

    Raises:
        ConfigError: scikit-learn is not installed.
    """
    try:
        from sklearn.ensemble import HistGradientBoostingRegressor
    except ImportError as error:
        raise ConfigError(
            "predictor 'boosted' needs scikit-learn, which is not installed",
            help="pip install 'edgewise[data]'",
        ) from error
    features, states, costs = training_table(samples, kind="boosted", needed=_STATES_NEEDED)
    require_some_feature(features, kind="boosted")
    rng = np.random.default_rng(seed)
    models = {}
    for group, where in unit_groups(samples.units).items():
        count = where.stop - where.start
        chosen = rng.permutation(len(states))[: max(1, max_rows // count)]
        logs = np.log(costs[chosen, where])
        models[group] = HistGradientBoostingRegressor(
            max_iter=iterations, learning_rate=0.1, max_leaf_nodes=63, random_state=seed
        ).fit(_rows(states[chosen], np.arange(count)), logs.ravel())
    return BoostedTrees(models, features=features, units=samples.units)


def restore(
    arrays: Mapping[str, npt.NDArray[Any]],  # noqa: ARG001
    *,
    features: tuple[str, ...],  # noqa: ARG001
    units: tuple[str, ...],  # noqa: ARG001
) -> BoostedTrees:
    """Refused, as `BoostedTrees.to_arrays` is."""
    _refuse()
