from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest

from edgewise.errors import ConfigError, ProfileError
from edgewise.predict.predictor import fit_predictor, restore_predictor
from edgewise.predict.state_samples import StateSamples

Synthetic = Callable[..., StateSamples]


def test_boosted_trees_predict_and_are_not_kept_in_files(synthetic: Synthetic) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    samples = synthetic()
    trees = fit_predictor("boosted", samples, max_rows=2000, iterations=40)
    predicted = trees.predict(samples.states[:, :5])

    assert (np.abs(predicted[:, None] - samples.seconds) / samples.seconds).mean() < 0.1
    assert trees.predict(samples.states[5, :5]) == pytest.approx(predicted[5])
    assert trees.num_bytes > 10_000
    with pytest.raises(ProfileError, match="not kept in files"):
        trees.to_arrays()
    with pytest.raises(ProfileError, match="not kept in files"):
        restore_predictor("boosted", {}, features=(), units=())


def test_without_scikit_learn_the_extra_is_named(
    synthetic: Synthetic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)

    with pytest.raises(ConfigError) as caught:
        fit_predictor("boosted", synthetic())
    assert caught.value.help == "pip install 'edgewise[data]'"
