"""Gates: logistic regression, and how good a score is."""

from __future__ import annotations

import numpy as np
import pytest

from edgewise.errors import ShapeError
from edgewise.training.language_gate import area_under_curve, fit_gate, logistic_regression


def _samples(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """States far from zero in one direction, and the chance by which each was labelled."""
    rng = np.random.default_rng(5)
    states = (rng.standard_normal((count, 4)) * [1, 5, 0.1, 1] + [0, 40, 0, 0]).astype(np.float32)
    chance = 1 / (1 + np.exp(-(1.5 * states[:, 0] + 0.3 * (states[:, 1] - 40) + 0.5)))
    return states, chance, rng.random(count) < chance


def test_a_gate_tells_the_chance_by_which_labels_were_drawn() -> None:
    states, chance, agrees = _samples(6000)

    gate = fit_gate(2, states, agrees)

    told = 1 / (1 + np.exp(-(states @ gate.weight + gate.bias)))
    assert gate.layer == 2
    # Some 1 / sqrt(6000) is chance; the penalty adds a little.
    assert np.abs(told - chance).mean() < 0.03


def test_newton_finds_what_a_general_optimiser_finds() -> None:
    from scipy.optimize import minimize

    states, _, agrees = _samples(300)
    inputs = np.hstack([(states - states.mean(axis=0)) / states.std(axis=0), np.ones((300, 1))])
    inputs, labels = inputs.astype(np.float64), agrees.astype(np.float64)

    def loss(weights: np.ndarray) -> float:
        values = inputs @ weights
        fit = (np.logaddexp(0, values) - labels * values).mean()
        return float(fit + 0.05 / 2 * (weights[:-1] ** 2).sum())

    truth = minimize(loss, np.zeros(5), tol=1e-12).x

    np.testing.assert_allclose(logistic_regression(inputs, labels, penalty=0.05), truth, atol=1e-3)


def test_classes_that_a_line_separates_keep_finite_weights() -> None:
    states = np.linspace(-1, 1, 50, dtype=np.float32)[:, None]

    gate = fit_gate(1, states, states[:, 0] > 0)

    assert np.isfinite(gate.weight).all()
    assert ((states @ gate.weight + gate.bias > 0) == (states[:, 0] > 0)).mean() > 0.9


@pytest.mark.parametrize("agree", [True, False], ids=["all agree", "none agrees"])
def test_labels_that_are_all_alike_give_a_constant_that_is_never_sure(*, agree: bool) -> None:
    states = np.random.default_rng(0).standard_normal((20, 3)).astype(np.float32)

    gate = fit_gate(1, states, np.full(20, agree))

    assert (gate.weight == 0).all()
    assert 1 / (1 + np.exp(-gate.bias)) == pytest.approx((20 * agree + 0.5) / 21)


def test_an_input_that_never_changes_has_no_say() -> None:
    states, _, agrees = _samples(500)
    states[:, 2] = 3.0

    assert fit_gate(1, states, agrees).weight[2] == 0


def test_labels_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"\(4, 3\) and \(5,\)"):
        fit_gate(1, np.zeros((4, 3), dtype=np.float32), np.zeros(5, dtype=bool))


def test_the_area_is_the_share_of_pairs_in_the_right_order() -> None:
    rng = np.random.default_rng(7)
    scores, labels = rng.integers(0, 5, 60).astype(np.float64), rng.random(60) < 0.4
    pairs = scores[labels][:, None] - scores[~labels][None, :]

    assert area_under_curve(scores, labels) == pytest.approx(
        ((pairs > 0) + 0.5 * (pairs == 0)).mean()
    )
    assert area_under_curve(scores, np.ones(60, dtype=bool)) is None
