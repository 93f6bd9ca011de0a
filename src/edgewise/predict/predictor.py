"""What every predictor of costs does, and how kinds of predictors are found by name."""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from edgewise.errors import ConfigError, nearest_names
from edgewise.predict.state_samples import StateSamples

Float64 = npt.NDArray[np.float64]


class Predictor(ABC):
    """Predicts the cost of every unit in a state; one object serves all threads.

    Attributes:
        kind: As users write it, the name of its file.
        features: [F], what it reads; the rest of a state does not matter to it.
        units: [U], what it predicts, in the order of its answers.
    """

    kind: str
    features: tuple[str, ...]
    units: tuple[str, ...]

    @abstractmethod
    def predict(self, state: Float64) -> Float64:
        """Median seconds of every unit.

        Args:
            state: [F] or [N, F], of ``features``, finite.

        Returns:
            [U] or [N, U], above zero.
        """

    @abstractmethod
    def to_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """All that is needed to make it again, parameters and their scales."""

    @property
    def num_bytes(self) -> int:
        """Memory of its parameters, bytes."""
        return sum(int(a.nbytes) for a in self.to_arrays().values())


def predictor_kinds() -> tuple[str, ...]:
    """Every kind, by the name of its file."""
    package = importlib.import_module("edgewise.predict.kinds")
    return tuple(sorted(m.name for m in pkgutil.iter_modules(package.__path__)))


def _module(kind: str) -> Any:
    if kind not in predictor_kinds():
        raise ConfigError(
            f"unknown kind of predictor {kind!r}", help=nearest_names(kind, predictor_kinds())
        )
    return importlib.import_module(f"edgewise.predict.kinds.{kind}")


def fit_predictor(kind: str, samples: StateSamples, *, seed: int = 0, **options: Any) -> Predictor:
    """Fit a predictor to samples.

    Args:
        kind: One of `predictor_kinds`.
        samples: Columns of ``states`` that are constant or not finite are left out of
            ``features``.
        seed: Of whatever is drawn.
        options: The kind's own.

    Raises:
        ConfigError: No such kind, or an option it does not have.
        ProfileError: Too few states; the message says how many are needed.
    """
    module = _module(kind)
    try:
        found: Predictor = module.fit(samples, seed=seed, **options)
    except TypeError as error:
        raise ConfigError(
            f"predictor {kind!r} does not take these options: {error}",
            help=f"see help(edgewise.predict.kinds.{kind}.fit)",
        ) from error
    return found


def restore_predictor(
    kind: str,
    arrays: Mapping[str, npt.NDArray[Any]],
    *,
    features: tuple[str, ...],
    units: tuple[str, ...],
) -> Predictor:
    """Make a predictor again from what `Predictor.to_arrays` gave.

    Raises:
        ConfigError: No such kind.
        ProfileError: The arrays are not those of this kind.
    """
    found: Predictor = _module(kind).restore(arrays, features=features, units=units)
    return found
