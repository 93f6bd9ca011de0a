from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edgewise.predict.predictor import fit_predictor, restore_predictor
from edgewise.predict.state_samples import StateSamples


def test_the_static_table_is_the_median_in_every_state(
    synthetic: Callable[..., StateSamples],
) -> None:
    samples = synthetic(repeats=1)
    static = fit_predictor("static", samples)

    expected = np.median(samples.seconds[:, 0], axis=0)
    assert static.features == ()
    assert np.array_equal(static.predict(np.zeros(0)), expected)
    assert np.array_equal(static.predict(np.zeros((3, 0))), np.tile(expected, (3, 1)))
    again = restore_predictor("static", static.to_arrays(), features=(), units=static.units)
    assert np.array_equal(again.predict(np.zeros(0)), expected)
