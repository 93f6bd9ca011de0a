from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edgewise.clock import VirtualClock
from edgewise.errors import ConfigError, ProfileError
from edgewise.predict import fitting
from edgewise.predict.fitting import (
    Comparison,
    KindScore,
    assign_folds,
    choose,
    cross_validate,
    evaluate,
    fit_kind,
    same_states,
    split_off,
    states_needed,
    upper_ratios,
)
from edgewise.predict.predictor import fit_predictor
from edgewise.predict.state_samples import StateSamples

Float64 = npt.NDArray[np.float64]
Synthetic = Callable[..., StateSamples]
Truth = Callable[..., Float64]

SOME = np.random.default_rng(3).permutation(2376)
QUICK = ("static", "lut", "physical")


def keys(samples: StateSamples) -> set[bytes]:
    return {row.tobytes() for row in samples.states}


def test_no_state_is_in_two_folds(synthetic: Synthetic) -> None:
    samples = synthetic().take(np.concatenate([SOME[:300], SOME[:200]]))
    fold_of = assign_folds(samples, folds=5, seed=0)
    parts = [keys(samples.take(np.flatnonzero(fold_of == fold))) for fold in range(5)]

    assert all(not (parts[a] & parts[b]) for a in range(5) for b in range(a))
    assert sum(map(len, parts)) == 300


def test_no_state_tested_on_was_fitted_to_or_calibrated_on(
    synthetic: Synthetic, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = synthetic().take(np.concatenate([SOME[:300], SOME[:200]]))
    seen: list[set[bytes]] = []
    tested: list[set[bytes]] = []
    real_upper, real_predict = fitting.upper_ratios, fitting.predicted_s

    def fit(kind: str, train: StateSamples, **options: Any) -> Any:
        seen.append(keys(train))
        return fit_predictor(kind, train, **options)

    def upper(predictor: Any, calibration: StateSamples, level: float) -> Any:
        assert not seen[-1] & keys(calibration)
        seen[-1] |= keys(calibration)
        return real_upper(predictor, calibration, level)

    def predict(predictor: Any, asked: StateSamples) -> Any:
        tested.append(keys(asked))
        return real_predict(predictor, asked)

    monkeypatch.setattr(fitting, "fit_predictor", fit)
    monkeypatch.setattr(fitting, "upper_ratios", upper)
    monkeypatch.setattr(fitting, "predicted_s", predict)
    cross_validate(samples, kinds=["lut"])

    # Each fold predicts its own states first, then those it calibrates on.
    assert len(seen) == 5
    for fold in range(5):
        assert not seen[fold] & tested[2 * fold]
        assert len(seen[fold] | tested[2 * fold]) == 300


def test_states_within_a_hundredth_count_as_one(synthetic: Synthetic) -> None:
    states = np.array([[0.5, 0.5, 0.5, 0.1, 0, 1], [0.501, 0.5, 0.5, 0.1, 0, 1], [1.0] * 6])

    numbers = same_states(synthetic(states))

    assert numbers[0] == numbers[1] != numbers[2]


def test_the_upper_bound_covers_what_it_says_in_states_not_seen(synthetic: Synthetic) -> None:
    found = cross_validate(synthetic(), kinds=["physical"], level=0.95)

    # 2376 · 27 observations: the draw of the calibration sets, not of the test, is what varies.
    assert found.scores[0].coverage_ratio == pytest.approx(0.95, abs=0.01)


def test_errors_are_those_of_the_noise_where_the_model_is_true(synthetic: Synthetic) -> None:
    found = cross_validate(synthetic(noise=0.02), kinds=["physical"]).scores[0]

    for errors in found.groups.values():
        # Mean of |N(0, σ)| is σ·√(2/π), its 95th percentile 1.96·σ.
        assert errors.mape_ratio == pytest.approx(0.02 * np.sqrt(2 / np.pi), rel=0.05)
        assert errors.p95_ape_ratio == pytest.approx(0.02 * 1.96, rel=0.05)


def test_pinball_loss_equals_its_definition(synthetic: Synthetic) -> None:
    samples = synthetic()
    fitted = fit_kind("physical", samples.take(SOME[:500]))
    rest = samples.take(SOME[500:520])
    upper = fitted.predictor.predict(rest.states[:, :5]) * fitted.upper_ratio
    losses = [
        0.95 * (seen - bound) if seen > bound else 0.05 * (bound - seen)
        for state, bounds in zip(rest.seconds, upper, strict=True)
        for repeat in state
        for seen, bound in zip(repeat[:6], bounds[:6], strict=True)
    ]

    assert evaluate(fitted, rest)["stage"].pinball_s == pytest.approx(np.mean(losses))


def test_missing_repeats_are_passed_over(synthetic: Synthetic) -> None:
    samples = synthetic()
    samples.seconds[::3, 1, ::2] = np.nan
    found = cross_validate(samples, kinds=["physical"]).scores[0]

    assert found.groups["stage"].mape_ratio < 0.018
    assert found.coverage_ratio == pytest.approx(0.95, abs=0.01)


def test_the_physical_model_is_chosen_where_physics_holds(synthetic: Synthetic) -> None:
    comparison = cross_validate(
        synthetic().take(SOME[:600]), options={"mlp": {"steps": 300}, "boosted": {"iterations": 10}}
    )
    choice = choose(comparison)

    assert {score.kind for score in comparison.scores} >= {"lut", "mlp", "physical", "static"}
    assert choice.kind == "physical"
    assert choice.reason.startswith("smallest pinball loss")


def score(kind: str, pinball_s: tuple[float, ...], num_bytes: int) -> KindScore:
    return KindScore(
        kind=kind,
        groups={},
        pinball_s=pinball_s,
        coverage_ratio=0.95,
        num_bytes=num_bytes,
        fit_s=0.1,
    )


def compared(*scores: KindScore) -> Comparison:
    return Comparison(
        scores=scores,
        skipped={},
        features=(),
        left_out={},
        level=0.95,
        num_states=100,
        num_folds=3,
    )


def test_of_equal_kinds_the_smaller_is_chosen() -> None:
    large = score("lut", (1.0e-6, 1.2e-6, 1.1e-6), 1_000_000)
    small = score("physical", (1.1e-6, 1.1e-6, 1.15e-6), 1000)
    choice = choose(compared(large, small))

    assert choice.kind == "physical"
    assert "within one standard error of lut" in choice.reason


def test_a_clearly_better_kind_is_chosen_whatever_its_size() -> None:
    large = score("lut", (1.0e-6, 1.2e-6, 1.1e-6), 1_000_000)
    small = score("physical", (2.1e-6, 2.2e-6, 2.3e-6), 1000)

    assert choose(compared(large, small)).kind == "lut"


def test_a_reference_is_never_chosen() -> None:
    reference = score("boosted", (1e-9, 1e-9, 1e-9), 10)
    small = score("physical", (2.1e-6, 2.2e-6, 2.3e-6), 1000)

    assert choose(compared(reference, small)).kind == "physical"
    with pytest.raises(ProfileError, match="only kinds that are a reference"):
        choose(compared(reference))


def test_too_few_states_say_what_each_kind_needs(synthetic: Synthetic) -> None:
    few = synthetic().take(SOME[:8])
    with pytest.raises(ProfileError, match=r"found 8 .* needed are 108 for mlp, 36 for physical"):
        cross_validate(few, kinds=["physical", "mlp"])
    found = cross_validate(few, kinds=["physical", "static"], level=0.6)
    assert found.skipped == {"physical": "needs 36 states, found 8"}
    with pytest.raises(ProfileError, match="needs at least 28 states, found 8") as caught:
        fit_kind("physical", few)
    assert caught.value.help is not None
    assert "static needs 2" in caught.value.help


def test_the_number_of_states_said_to_be_needed_is_enough(synthetic: Synthetic) -> None:
    samples = synthetic()
    for kind in QUICK:
        features = samples.features[:5]
        enough = samples.take(SOME[: states_needed(kind, features, folds=5)])
        assert cross_validate(enough, kinds=[kind], level=0.6).scores
        enough = samples.take(SOME[: states_needed(kind, features)])
        assert fit_kind(kind, enough, level=0.6).predictor.kind == kind


def test_no_state_at_all_is_a_profile_error(synthetic: Synthetic) -> None:
    with pytest.raises(ProfileError, match="found 0"):
        cross_validate(synthetic().take(SOME[:0]))
    with pytest.raises(ProfileError, match="found 0"):
        fit_kind("static", synthetic().take(SOME[:0]))


def test_a_bound_that_too_few_observations_can_give_is_refused(synthetic: Synthetic) -> None:
    few = synthetic(repeats=1, stages=1, heads=1).take(SOME[:4])

    with pytest.raises(ProfileError, match="needs at least 99 observations"):
        fit_kind("static", few, level=0.99)


def test_a_unit_with_few_observations_takes_the_bound_of_its_kind(synthetic: Synthetic) -> None:
    samples = synthetic()
    predictor = fit_predictor("physical", samples)
    calibration = samples.take(SOME[:4])
    ratios = calibration.seconds / predictor.predict(calibration.states[:, :5])[:, None]
    stages = np.sort(ratios[..., :6].ravel())  # 4 states, 3 repeats, 6 stages: 72

    # The 70th of 72 is the smallest with rank at least 0.95 · 73.
    assert upper_ratios(predictor, calibration, 0.95)[:6] == pytest.approx(stages[69])


def test_bounds_are_calibrated_where_they_are_asked_to_be(synthetic: Synthetic) -> None:
    samples = synthetic()
    noisy = synthetic(noise=0.2, seed=5).take(SOME[1000:1500])
    calm = fit_kind("physical", samples.take(SOME[:1000]))
    wide = fit_kind("physical", samples.take(SOME[:1000]), calibration=noisy)

    assert (wide.upper_ratio > calm.upper_ratio + 0.1).all()
    assert wide.facts["num_states"] == 1000
    assert calm.facts["num_states"] == 750


def test_energy_is_predicted_where_there_was_a_meter(synthetic: Synthetic, truth: Truth) -> None:
    samples = synthetic(joules=True)
    fitted = fit_kind("physical", samples)
    assert fitted.energy is not None
    predicted = fitted.energy.predict(samples.states[:, :5])

    assert predicted == pytest.approx(2 * truth(samples.states), rel=0.01)
    assert fit_kind("physical", synthetic()).energy is None


def test_what_is_slowest_is_found_at_the_right_end(synthetic: Synthetic) -> None:
    fitted = fit_kind("physical", synthetic())

    assert fitted.slowest == pytest.approx([0.1, 0.3, 0.25, 0.8, 0.8])


def test_time_of_a_fit_is_that_of_the_clock_passed_in(synthetic: Synthetic) -> None:
    found = cross_validate(synthetic().take(SOME[:50]), kinds=["static"], clock=VirtualClock())

    assert found.scores[0].fit_s == 0.0


def test_the_same_seed_gives_the_same_comparison(synthetic: Synthetic) -> None:
    samples = synthetic().take(SOME[:200])
    first, second = (
        cross_validate(samples, kinds=QUICK, seed=4, clock=VirtualClock()) for _ in range(2)
    )

    assert first == second


def test_settings_that_make_no_sense_are_refused(synthetic: Synthetic) -> None:
    with pytest.raises(ConfigError, match="at least 2 folds"):
        cross_validate(synthetic(), folds=1)
    with pytest.raises(ConfigError, match="unknown kind"):
        cross_validate(synthetic(), kinds=["phisical"])


def test_a_single_state_cannot_be_split(synthetic: Synthetic) -> None:
    with pytest.raises(ProfileError, match="at least 2 different states"):
        split_off(synthetic(np.array([[0.5, 0.5, 0.5, 0, 0, 1.0]])), 0.25, seed=0)
