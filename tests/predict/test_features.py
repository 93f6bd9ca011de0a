from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from edgewise.device.state import FEATURES, DeviceState, Quantity
from edgewise.errors import ProfileError
from edgewise.predict.features import (
    feature_vector,
    median_costs,
    missing_features,
    training_table,
    unit_groups,
    usable_features,
    whole_states,
)
from edgewise.predict.state_samples import StateSamples

Synthetic = Callable[..., StateSamples]

STATE = DeviceState(
    at_s=1.0,
    quantities={
        "cpu.frequency_ratio": Quantity.ok(0.5),
        "gpu.frequency_ratio": Quantity.missing("denied", "only root may read it"),
        "emc.frequency_ratio": Quantity(value=0.7, quality="stale", reason="2 s old"),
    },
)


def test_what_is_not_known_now_is_nan_and_never_zero() -> None:
    vector = feature_vector(STATE, FEATURES[:4])

    assert vector[0] == 0.5
    assert np.isnan(vector[1:]).all()


def test_a_missing_feature_comes_with_its_sensors_reason() -> None:
    assert missing_features(STATE, FEATURES[:4]) == {
        "gpu.frequency_ratio": "only root may read it",
        "emc.frequency_ratio": "2 s old",
        "cpu.utilisation_ratio": "no sensor reads it",
    }


def test_columns_that_say_nothing_are_left_out_with_the_reason(synthetic: Synthetic) -> None:
    samples = synthetic()
    samples.states[3, 2] = np.nan
    samples.states[:, 4] = np.nan

    used, left_out = usable_features(samples)

    assert used == ("cpu.frequency_ratio", "gpu.frequency_ratio", "cpu.utilisation_ratio")
    assert left_out == {
        "emc.frequency_ratio": "not known in 1 of 2376 states",
        "gpu.utilisation_ratio": "not known in any state",
        "cpu.quota_ratio": "the same in all states: 1",
    }


def test_a_state_in_which_a_unit_was_never_measured_is_left_out(synthetic: Synthetic) -> None:
    samples = synthetic(np.array([[0.5, 0.5, 0.5, 0, 0, 1], [1, 1, 1, 0, 0, 1.0]]))
    samples.seconds[0, 0, 0] = np.nan
    samples.seconds[1, :, 2] = [np.nan, 0.0, -1.0]

    whole = whole_states(samples)

    assert whole.states[:, 0].tolist() == [0.5]
    assert median_costs(whole)[0, 0] == np.median(samples.seconds[0, 1:, 0])


def test_too_few_states_are_refused_with_the_number_needed(synthetic: Synthetic) -> None:
    with pytest.raises(ProfileError, match=r"needs at least 5000 states.*found 2376"):
        training_table(synthetic(), kind="mlp", needed=5000)


def test_units_are_split_into_stages_and_heads() -> None:
    assert unit_groups(("stage:0", "stage:1", "head:0")) == {
        "stage": slice(0, 2),
        "head": slice(2, 3),
    }
    assert unit_groups(("stage:0",)) == {"stage": slice(0, 1)}
