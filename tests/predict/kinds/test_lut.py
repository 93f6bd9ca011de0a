from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from edgewise.errors import ProfileError
from edgewise.predict.kinds.lut import table_bytes
from edgewise.predict.predictor import fit_predictor, restore_predictor
from edgewise.predict.state_samples import StateSamples

Synthetic = Callable[..., StateSamples]


def test_a_profiled_state_is_looked_up_exactly(synthetic: Synthetic) -> None:
    samples = synthetic()
    table = fit_predictor("lut", samples)
    medians = np.median(samples.seconds, axis=1)

    states = samples.states[:, :5]
    assert table.predict(states[17]) == pytest.approx(medians[17], rel=1e-6)
    assert table.predict(states) == pytest.approx(medians, rel=1e-6)


def test_a_state_not_profiled_takes_the_nearest_by_brute_force(synthetic: Synthetic) -> None:
    samples = synthetic()
    table = fit_predictor("lut", samples)
    states = samples.states[:, :5]
    asked = np.random.default_rng(0).uniform(0.1, 1.0, (20, 5))
    scaled = np.ptp(states, axis=0)

    for state in asked:
        nearest = np.argmin((((states - state) / scaled) ** 2).sum(axis=1))
        assert np.array_equal(table.predict(state), table.predict(states[nearest]))


def test_repeated_states_become_one_entry(synthetic: Synthetic) -> None:
    state = np.array([[0.5, 0.5, 0.5, 0, 0, 1], [1, 1, 1, 0.4, 0.4, 1.0]])
    twice = synthetic(np.concatenate([state, state]), repeats=1)
    table = fit_predictor("lut", twice)

    assert len(table.to_arrays()["states"]) == 2
    assert table.predict(state[0, :5]) == pytest.approx(
        twice.seconds[[0, 2], 0].mean(axis=0), rel=1e-6
    )


def test_states_that_do_not_differ_make_no_table(synthetic: Synthetic) -> None:
    with pytest.raises(ProfileError, match="needs a feature that differs"):
        fit_predictor("lut", synthetic(np.tile([0.5, 0.5, 0.5, 0, 0, 1.0], (4, 1))))


def test_restoring_gives_the_same_answers(synthetic: Synthetic) -> None:
    samples = synthetic()
    table = fit_predictor("lut", samples)
    again = restore_predictor("lut", table.to_arrays(), features=table.features, units=table.units)

    assert np.array_equal(
        again.predict(samples.states[:, :5]), table.predict(samples.states[:, :5])
    )


def test_independent_clusters_multiply_the_table_by_the_levels() -> None:
    assert table_bytes(17_600, 24) == 17_600 * 24 * 4
    # The ratio of the paper's table 3: 171.57 to 7.80 MiB.
    ratio = table_bytes(10, 3, cpu_levels=22, independent_clusters=2) / table_bytes(10, 3)
    assert ratio == pytest.approx(171.57 / 7.80, rel=0.001)
