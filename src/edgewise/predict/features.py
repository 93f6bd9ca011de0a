"""From states to the numbers that predictors read, and which of those numbers can be used."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgewise.device.state import DeviceState
from edgewise.errors import ProfileError
from edgewise.predict.state_samples import StateSamples

Float64 = npt.NDArray[np.float64]


def feature_vector(state: DeviceState, names: Sequence[str]) -> Float64:
    """The features of a state.

    Returns:
        [F], NaN for what is not known now.
    """
    values = [state.value(name) for name in names]
    return np.array([np.nan if v is None else v for v in values], dtype=np.float64)


def missing_features(state: DeviceState, names: Sequence[str]) -> dict[str, str]:
    """Which features a state lacks, each with its sensor's reason."""
    return {
        name: state.reason(name) or "its sensor gives no reason"
        for name in names
        if state.value(name) is None
    }


def usable_features(samples: StateSamples) -> tuple[tuple[str, ...], dict[str, str]]:
    """Which features a predictor can be fitted on.

    Returns:
        Their names in order, and for each left out the reason.
    """
    used, left_out = [], {}
    for name, column in zip(samples.features, samples.states.T, strict=True):
        known = np.isfinite(column)
        if not known.any():
            left_out[name] = "not known in any state"
        elif not known.all():
            left_out[name] = f"not known in {int((~known).sum())} of {len(column)} states"
        elif np.ptp(column) <= 1e-9:
            left_out[name] = f"the same in all states: {column[0]:.3g}"
        else:
            used.append(name)
    return tuple(used), left_out


def num_stages(units: Sequence[str]) -> int:
    """How many of the units are stages; they stand first."""
    return sum(unit.startswith("stage:") for unit in units)


def unit_groups(units: Sequence[str]) -> dict[str, slice]:
    """Where the stages and the heads stand; a group without units is left out."""
    first = num_stages(units)
    groups = {"stage": slice(0, first), "head": slice(first, len(units))}
    return {name: where for name, where in groups.items() if where.stop > where.start}


def whole_states(samples: StateSamples) -> StateSamples:
    """Only states in which every unit has at least one repeat that is finite and above zero."""
    good: npt.NDArray[np.bool_] = np.all(np.any(_good(samples.seconds), axis=1), axis=1)
    return samples if good.all() else samples.take(np.flatnonzero(good))


def median_costs(samples: StateSamples) -> Float64:
    """Median over the repeats of each state, of `whole_states`: [N, U]."""
    seconds = np.where(_good(samples.seconds), samples.seconds, np.nan)
    medians: Float64 = np.nanmedian(seconds, axis=1)
    return medians


def training_table(
    samples: StateSamples, *, kind: str, needed: int
) -> tuple[tuple[str, ...], Float64, Float64]:
    """What a predictor is fitted to.

    Args:
        samples: As measured.
        kind: Who asks, for the message.
        needed: How many states it needs.

    Returns:
        Features used, their values [N, F], and median costs [N, U]; states in which a unit was not
        measured are left out.

    Raises:
        ProfileError: Too few states.
    """
    whole = whole_states(samples)
    if whole.num_states < needed:
        raise ProfileError(
            f"predictor {kind!r} needs at least {needed} states in which every unit was measured,"
            f" found {whole.num_states}",
            help="profile more states, or fit a kind that needs fewer: physical, lut, static",
        )
    used, _ = usable_features(samples)
    columns = [whole.features.index(name) for name in used]
    return used, whole.states[:, columns], median_costs(whole)


def require_some_feature(features: tuple[str, ...], *, kind: str) -> None:
    """Refuse to learn from states that do not differ.

    Raises:
        ProfileError: There is no feature to read.
    """
    if not features:
        raise ProfileError(
            f"predictor {kind!r} needs a feature that differs between states, found none",
            help="profile states that differ, or fit kind static",
        )


def _good(seconds: Float64) -> npt.NDArray[np.bool_]:
    return np.isfinite(seconds) & (seconds > 0)
