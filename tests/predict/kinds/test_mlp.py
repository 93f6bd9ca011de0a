from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from edgewise.errors import ProfileError
from edgewise.predict.kinds import mlp
from edgewise.predict.predictor import fit_predictor, restore_predictor
from edgewise.predict.state_samples import StateSamples

Synthetic = Callable[..., StateSamples]

SOME = np.random.default_rng(3).permutation(2376)


@pytest.mark.parametrize(
    ("unit_id", "parameters"), [(True, 2561), (False, 2497)], ids=["cnn", "language model"]
)
def test_each_network_has_as_many_parameters_as_the_papers(
    synthetic: Synthetic, *, unit_id: bool, parameters: int
) -> None:
    model = mlp.fit(synthetic().take(SOME[:100]), steps=2, unit_id=unit_id)
    arrays = model.to_arrays()

    assert model.num_parameters == {"stage": parameters, "head": parameters}
    assert (
        sum(arrays[f"stage.{n}"].size for n in ("w1", "b1", "w2", "b2", "w3", "b3")) == parameters
    )
    assert model.num_bytes <= 100 * 1024


def test_gradients_equal_finite_differences() -> None:
    rng = np.random.default_rng(0)
    weights = [w.astype(np.float64) for w in mlp._first_weights(3, rng)]
    inputs, target = rng.standard_normal((7, 3)), rng.standard_normal(7)

    def loss() -> float:
        w1, b1, w2, b2, w3, b3 = weights
        hidden = np.maximum(np.maximum(inputs @ w1 + b1, 0) @ w2 + b2, 0)
        return float((((hidden @ w3 + b3)[:, 0] - target) ** 2).mean())

    slopes = mlp._slopes(weights, inputs, target)  # type: ignore[arg-type]

    for weight, slope in zip(weights, slopes, strict=True):
        flat, step = weight.reshape(-1), 1e-6
        for at in rng.integers(flat.size, size=min(5, flat.size)):
            kept = flat[at]
            flat[at] = kept + step
            above = loss()
            flat[at] = kept - step
            below = loss()
            flat[at] = kept
            assert slope.reshape(-1)[at] == pytest.approx((above - below) / (2 * step), abs=1e-5)


def test_one_state_and_many_give_the_same(synthetic: Synthetic) -> None:
    samples = synthetic()
    model = fit_predictor("mlp", samples.take(SOME[:200]), steps=200)
    states = samples.states[:20, :5]

    assert np.stack([model.predict(s) for s in states]) == pytest.approx(
        model.predict(states), rel=1e-4
    )


def test_training_reaches_far_below_a_static_table_and_repeats_with_the_seed(
    synthetic: Synthetic,
) -> None:
    samples = synthetic()
    train, rest = samples.take(SOME[:1800]), samples.take(SOME[1800:])
    first = fit_predictor("mlp", train, seed=1, steps=800)
    same, again = (fit_predictor("mlp", train, seed=1, steps=50) for _ in range(2))
    static = fit_predictor("static", train)

    def mape(predicted: npt.NDArray[np.float64]) -> float:
        return float((np.abs(predicted[:, None] - rest.seconds) / rest.seconds).mean())

    states = rest.states[:, :5]
    assert mape(first.predict(states)) < 0.2 * mape(static.predict(states[:, :0]))
    assert np.array_equal(same.predict(states), again.predict(states))


@pytest.mark.slow
def test_fully_trained_it_is_within_the_papers_errors(synthetic: Synthetic) -> None:
    samples = synthetic()
    model = fit_predictor("mlp", samples.take(SOME[:1800]))
    rest = samples.take(SOME[1800:])
    ape = np.abs(model.predict(rest.states[:, :5])[:, None] - rest.seconds) / rest.seconds

    for units in (slice(0, 6), slice(6, 9)):
        assert ape[..., units].mean() <= 0.018
        assert np.quantile(ape[..., units], 0.95) <= 0.048


def test_without_a_unit_number_all_stages_cost_the_same(synthetic: Synthetic) -> None:
    model = mlp.fit(synthetic().take(SOME[:100]), steps=20, unit_id=False)
    seconds = model.predict(np.full(5, 0.5))

    assert np.ptp(seconds[:6]) == pytest.approx(0, abs=1e-9)
    assert np.ptp(seconds[6:]) == pytest.approx(0, abs=1e-9)


def test_networks_of_other_features_are_refused(synthetic: Synthetic) -> None:
    model = fit_predictor("mlp", synthetic().take(SOME[:100]), steps=2)

    with pytest.raises(ProfileError, match="expected a network of 2 features"):
        restore_predictor("mlp", model.to_arrays(), features=model.features[:2], units=model.units)


def test_restoring_gives_the_same_answers(synthetic: Synthetic) -> None:
    samples = synthetic()
    model = fit_predictor("mlp", samples.take(SOME[:100]), steps=20)
    again = restore_predictor("mlp", model.to_arrays(), features=model.features, units=model.units)

    assert np.array_equal(
        again.predict(samples.states[0, :5]), model.predict(samples.states[0, :5])
    )


def test_states_that_do_not_differ_cannot_be_learnt_from(synthetic: Synthetic) -> None:
    same = synthetic(np.tile([0.5, 0.5, 0.5, 0, 0, 1.0], (100, 1)))

    with pytest.raises(ProfileError, match="needs a feature that differs"):
        fit_predictor("mlp", same)
