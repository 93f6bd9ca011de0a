from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from edgewise.device.state import FEATURES
from edgewise.errors import ConfigError
from edgewise.predict.active import by_variance, choose_states, d_optimal, join, saved_s
from edgewise.predict.fitting import evaluate, fit_kind
from edgewise.predict.kinds.physical import Terms
from edgewise.predict.predictor import fit_predictor
from edgewise.predict.state_samples import StateSamples

Float64 = npt.NDArray[np.float64]
Synthetic = Callable[..., StateSamples]
Truth = Callable[..., Float64]

USED = FEATURES[:5]


def test_each_state_chosen_is_the_one_that_raises_the_determinant_most() -> None:
    rng = np.random.default_rng(0)
    states = rng.uniform(0.1, 1.0, (40, 2))
    features = FEATURES[:2]
    terms = Terms(features)(states)
    terms /= terms.sum(axis=1)[:, None]
    terms /= np.sqrt((terms**2).mean(axis=0))

    def log_det(rows: list[int]) -> float:
        matrix = 1e-6 * np.eye(terms.shape[1]) + terms[rows].T @ terms[rows]
        return float(np.linalg.slogdet(matrix)[1])

    chosen = d_optimal(states, features=features, count=8).tolist()

    for k in range(8):
        rest = [row for row in range(40) if row not in chosen[:k]]
        best = max(log_det([*chosen[:k], row]) for row in rest)
        assert log_det(chosen[: k + 1]) == pytest.approx(best, abs=1e-6)


def test_no_state_is_chosen_twice_and_those_profiled_already_not_again(
    synthetic: Synthetic,
) -> None:
    states = synthetic().states[:, :5]
    have = np.arange(100)
    chosen = d_optimal(states, features=USED, count=200, have=have)
    both = choose_states(states, features=USED, count=200, seed=1)

    assert len(set(chosen.tolist())) == 200
    assert chosen.min() >= 100
    assert len(set(both.rows.tolist())) == 200
    assert len(both.calibrate) == 50


def relative_error(samples: StateSamples, rows: npt.NDArray[np.int64], true: Float64) -> float:
    model = fit_predictor("physical", samples.take(rows))
    return float(np.mean(np.abs(model.predict(samples.states[:, :5]) / true - 1)))


def test_a_tenth_of_the_states_chosen_gives_the_error_of_all_and_beats_chance(
    synthetic: Synthetic, truth: Truth
) -> None:
    true = truth(synthetic().states)
    states = synthetic().states[:, :5]
    count = len(states) // 10
    chosen, drawn, everything = [], [], []
    for seed in range(7):
        samples = synthetic(seed=seed)
        rng = np.random.default_rng(seed)
        designed = d_optimal(states, features=USED, count=count)
        chosen.append(relative_error(samples, designed, true))
        drawn.append(relative_error(samples, rng.permutation(len(states))[:count], true))
        everything.append(relative_error(samples, np.arange(len(states)), true))

    assert np.median(chosen) < np.median(drawn)
    # Errors of the weights fall with the root of the number of states: √10 were as expected, and
    # beside noise of 1.5 % neither is seen.
    assert np.median(chosen) <= 3.2 * np.median(everything)
    assert np.median(chosen) <= 0.002


def test_a_tenth_of_the_states_is_as_good_for_what_will_be_observed(synthetic: Synthetic) -> None:
    samples = synthetic()
    choice = choose_states(samples.states[:, :5], features=USED, count=237)
    few = fit_kind("physical", samples.take(choice.fit), calibration=samples.take(choice.calibrate))
    rest = samples.take(np.setdiff1d(np.arange(samples.num_states), choice.rows))
    everything = fit_kind("physical", samples)

    for group in ("stage", "head"):
        found, best = evaluate(few, rest)[group], evaluate(everything, rest)[group]
        assert found.mape_ratio <= 1.05 * best.mape_ratio
        assert found.coverage_ratio == pytest.approx(0.95, abs=0.03)


def test_states_where_an_ensemble_disagrees_beat_chance_too(
    synthetic: Synthetic, truth: Truth
) -> None:
    true = truth(synthetic().states)
    states = synthetic().states[:, :5]
    chosen, drawn = [], []
    for seed in range(5):
        samples = synthetic(seed=seed)
        asked: list[int] = []

        def measure(
            rows: npt.NDArray[np.int64],
            samples: StateSamples = samples,
            asked: list[int] = asked,
        ) -> StateSamples:
            asked.extend(rows.tolist())
            return samples.take(rows)

        found = by_variance(states, features=USED, measure=measure, count=100, seed=seed)
        assert len(set(asked)) == len(asked) == found.num_states == 100
        chosen.append(relative_error(samples, np.array(asked), true))
        rng = np.random.default_rng(seed)
        drawn.append(relative_error(samples, rng.permutation(len(states))[:100], true))

    assert np.median(chosen) < np.median(drawn)


def test_time_saved_is_that_of_the_states_left_out(synthetic: Synthetic) -> None:
    samples = synthetic()

    assert saved_s(samples, samples.num_states) == 0.0
    assert saved_s(samples, 2 * samples.num_states) == samples.elapsed_s
    assert saved_s(samples.take(np.arange(3)), 100) is None


def test_joined_samples_add_their_time_where_it_is_known(synthetic: Synthetic) -> None:
    samples = synthetic()

    assert join([samples, samples]).elapsed_s == 2 * 0.5 * samples.num_states
    assert join([samples, samples.take(np.arange(3))]).elapsed_s is None


def test_a_count_out_of_range_is_refused(synthetic: Synthetic) -> None:
    states = synthetic().states[:10, :5]
    with pytest.raises(ConfigError, match="2 to 10"):
        choose_states(states, features=USED, count=11)
    with pytest.raises(ConfigError, match="at most 8"):
        d_optimal(states, features=USED, count=9, have=np.arange(2))
