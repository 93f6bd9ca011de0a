from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgewise.device.state import FEATURES
from edgewise.errors import ProfileError
from edgewise.predict.kinds.physical import Terms, states_needed
from edgewise.predict.predictor import fit_predictor, restore_predictor
from edgewise.predict.state_samples import StateSamples

Float64 = npt.NDArray[np.float64]
Synthetic = Callable[..., StateSamples]
Truth = Callable[..., Float64]

SOME = np.random.default_rng(3).permutation(2376)


def test_without_noise_the_truth_is_found_from_few_states(
    synthetic: Synthetic, truth: Truth
) -> None:
    samples = synthetic(noise=0.0)
    model = fit_predictor("physical", samples.take(SOME[:40]))

    assert model.predict(samples.states[:, :5]) == pytest.approx(truth(samples.states), rel=1e-6)


def test_with_noise_it_is_within_the_papers_errors_of_single_observations(
    synthetic: Synthetic,
) -> None:
    samples = synthetic()
    model = fit_predictor("physical", samples.take(SOME[:1200]))
    rest = samples.take(SOME[1200:])
    predicted = model.predict(rest.states[:, :5])[:, None, :]
    ape = np.abs(predicted - rest.seconds) / rest.seconds

    # UniExit's table 4, CNNs: MAPE 1.79 %, 95th percentile 4.74 %.
    for units in (slice(0, 6), slice(6, 9)):
        assert ape[..., units].mean() <= 0.018
        assert np.quantile(ape[..., units], 0.95) <= 0.048


def test_one_state_and_many_give_the_same(synthetic: Synthetic) -> None:
    samples = synthetic()
    model = fit_predictor("physical", samples.take(SOME[:200]))
    states = samples.states[:30, :5]

    assert np.stack([model.predict(s) for s in states]) == pytest.approx(
        model.predict(states), rel=1e-12
    )


ratio = st.floats(0.01, 1.0)


@given(state=st.tuples(*[ratio] * 6), which=st.integers(0, 5), to=ratio)
def test_terms_never_grow_with_a_clock_nor_fall_with_a_load(
    state: tuple[float, ...], which: int, to: float
) -> None:
    terms = Terms(FEATURES)
    before = np.array(state)
    after = before.copy()
    after[which] = to
    change = terms(after[None])[0] - terms(before[None])[0]
    is_load = "utilisation" in FEATURES[which]

    assert ((change if is_load == (to >= before[which]) else -change) >= -1e-12).all()


def test_a_cpu_quota_is_learnt_from_a_machine_that_has_nothing_else(synthetic: Synthetic) -> None:
    quota = np.linspace(0.2, 1.0, 30)
    states = np.column_stack([np.full((30, 5), 0.5), quota])
    samples = synthetic(states, noise=0.0)
    samples.seconds[:] = (1e-3 + 2e-3 / quota)[:, None, None]
    model = fit_predictor("physical", samples)

    assert model.features == ("cpu.quota_ratio",)
    assert model.predict(np.array([0.5])) == pytest.approx(np.full(9, 5e-3), rel=1e-6)


def test_large_noise_does_not_make_predictions_too_small(
    synthetic: Synthetic, truth: Truth
) -> None:
    samples = synthetic(noise=0.3, repeats=1)
    model = fit_predictor("physical", samples)
    ratio = model.predict(samples.states[:, :5]) / truth(samples.states)

    # The mean of exp(0.3·N) is exp(0.045).
    assert np.median(ratio) == pytest.approx(np.exp(0.045), abs=0.015)


def test_too_few_states_are_refused_with_the_number_needed(synthetic: Synthetic) -> None:
    assert states_needed(FEATURES[:5]) == 4 * 5 + 1
    with pytest.raises(ProfileError, match="needs at least 21 states"):
        fit_predictor("physical", synthetic().take(SOME[:20]))


def test_restoring_gives_the_same_answers(synthetic: Synthetic) -> None:
    samples = synthetic()
    model = fit_predictor("physical", samples.take(SOME[:100]))
    again = restore_predictor(
        "physical", model.to_arrays(), features=model.features, units=model.units
    )
    states = samples.states[:, :5]

    assert np.array_equal(again.predict(states), model.predict(states))
