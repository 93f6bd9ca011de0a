from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from edgewise.errors import ConfigError
from edgewise.predict.cache import PredictionCache
from edgewise.predict.fitting import fit_kind
from edgewise.predict.predictor import Predictor, fit_predictor
from edgewise.predict.state_samples import StateSamples

Synthetic = Callable[..., StateSamples]


@pytest.fixture(scope="module")
def predictor(synthetic: Synthetic) -> Predictor:
    return fit_predictor("physical", synthetic())


STATE = np.array([0.5, 0.6, 0.7, 0.1, 0.2])


def test_answers_are_those_of_the_predictor(predictor: Predictor) -> None:
    cache = PredictionCache(predictor)
    states = np.stack([STATE, STATE, STATE + 0.1])

    assert np.array_equal(cache.predict(STATE), predictor.predict(STATE))
    assert cache.predict(states) == pytest.approx(predictor.predict(states), rel=1e-12)
    assert (cache.hits, cache.misses) == (18, 18)


def test_keys_are_exact_states(predictor: Predictor) -> None:
    cache = PredictionCache(predictor)
    cache.predict(STATE)
    cache.predict(STATE + 1e-12)

    assert (cache.hits, cache.misses) == (0, 18)


def test_the_least_recently_used_entry_leaves_first(predictor: Predictor) -> None:
    cache = PredictionCache(predictor, capacity=2)
    for unit in (0, 1, 0, 2, 0, 1):
        cache.unit_s(STATE, unit)

    # 0, 1 new; 0 there; 2 puts 1 out; 0 there; 1 new again.
    assert (cache.hits, cache.misses) == (2, 4)
    assert len(cache) == 2


def test_a_cnn_with_more_keys_than_entries_never_hits_on_a_trace_that_returns(
    predictor: Predictor,
) -> None:
    cache = PredictionCache(predictor)
    trace = [np.array([f, f, 1.0, 0.0, 0.0]) for f in np.linspace(0.1, 1.0, 15)]
    for _ in range(3):
        for state in trace:
            cache.predict(state)

    # 15 states of 9 units are 135 keys, seven more than the 128 entries.
    assert cache.hits == 0


def test_units_without_numbers_share_an_entry(synthetic: Synthetic) -> None:
    model = fit_predictor("mlp", synthetic(), steps=2, unit_id=False)
    cache = PredictionCache(model, unit_id=False)

    assert cache.predict(STATE) == pytest.approx(model.predict(STATE), rel=1e-6)
    assert (cache.hits, cache.misses, len(cache)) == (7, 2, 2)


def test_its_memory_is_counted_with_keys(predictor: Predictor) -> None:
    cache = PredictionCache(predictor)
    for f in np.linspace(0.1, 1.0, 20):
        cache.predict(np.array([f, f, 1.0, 0.0, 0.0]))

    assert len(cache) == 128
    # Six floats of 24 bytes, the key that holds them and the answer: far from the paper's 3 KB.
    assert cache.cache_bytes > 128 * 7 * 24
    assert cache.num_bytes == predictor.num_bytes + cache.cache_bytes


def test_a_fitted_predictor_takes_it_in_place_of_its_own(synthetic: Synthetic) -> None:
    fitted = fit_kind("physical", synthetic())
    cached = dataclasses.replace(fitted, predictor=PredictionCache(fitted.predictor))

    assert cached.predictor.kind == "physical"
    assert np.array_equal(cached.predictor.predict(STATE), fitted.predictor.predict(STATE))


def test_a_cache_without_entries_is_refused(predictor: Predictor) -> None:
    with pytest.raises(ConfigError, match="at least 1 entry"):
        PredictionCache(predictor, capacity=0)
