"""Affine maps in closed form."""

from __future__ import annotations

import numpy as np
import pytest

from edgewise.errors import ModelError, ShapeError
from edgewise.training.language_affine import GramSums


def _states(
    count: int, width: int, *, seed: int = 0
) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """States as they are in language models: correlated, and one direction far from zero."""
    rng = np.random.default_rng(seed)
    states = rng.standard_normal((count, width)) @ rng.standard_normal((width, width))
    states[:, 0] += 80.0
    return states.astype(np.float32)


def test_a_final_state_that_is_an_affine_function_is_found_again() -> None:
    rng = np.random.default_rng(1)
    weight, bias = rng.standard_normal((6, 6)), rng.standard_normal(6)
    states = _states(400, 6)
    sums = GramSums([3], width=6)
    for window in np.split(states, 4):
        sums.add({3: window}, (window @ weight.T + bias).astype(np.float32))

    found = sums.solve(3, ridge=1e-9)

    # float32 states of some 80 are known to about 1e-5.
    np.testing.assert_allclose(found.weight, weight, atol=1e-4)
    np.testing.assert_allclose(found.bias, bias, atol=1e-2)
    np.testing.assert_allclose(
        states @ found.weight.T + found.bias, states @ weight.T + bias, atol=1e-3
    )


def test_sums_of_windows_are_least_squares_on_all_tokens() -> None:
    states, final = _states(300, 5), _states(300, 5, seed=2)
    sums = GramSums([1, 2], width=5)
    for i in range(0, 300, 30):
        sums.add({1: states[i : i + 30], 2: states[i : i + 30] * 2}, final[i : i + 30])
    whole = np.hstack([states, np.ones((300, 1))]).astype(np.float64)
    truth = np.linalg.lstsq(whole, final.astype(np.float64), rcond=None)[0]

    found = sums.solve(1, ridge=1e-12)

    assert sums.tokens == 300
    np.testing.assert_allclose(found.weight, truth[:-1].T, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.bias, truth[-1], rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(sums.solve(2, ridge=1e-12).weight, found.weight / 2, rtol=1e-5)


def test_a_strong_ridge_leaves_the_mean() -> None:
    states, final = _states(200, 4), _states(200, 4, seed=2)
    sums = GramSums([1], width=4)
    sums.add({1: states}, final)

    found = sums.solve(1, ridge=1e9)

    np.testing.assert_allclose(found.weight, 0, atol=1e-6)
    np.testing.assert_allclose(found.bias, final.mean(axis=0), rtol=1e-5)


def test_an_input_that_never_changes_has_no_say() -> None:
    states = _states(200, 4)
    states[:, 2] = 7.0
    sums = GramSums([1], width=4)
    sums.add({1: states}, states)

    found = sums.solve(1, ridge=1e-6)

    assert (found.weight[:, 2] == 0).all()
    np.testing.assert_allclose(states @ found.weight.T + found.bias, states, atol=1e-2)


def test_sums_that_were_kept_go_on_bit_for_bit() -> None:
    states, final = _states(90, 4), _states(90, 4, seed=2)
    windows = [slice(i, i + 30) for i in range(0, 90, 30)]
    straight, first, second = (GramSums([1], width=4) for _ in range(3))
    for w in windows:
        straight.add({1: states[w]}, final[w])
    first.add({1: states[windows[0]]}, final[windows[0]])

    second.restore(first.to_arrays())
    for w in windows[second.windows :]:
        second.add({1: states[w]}, final[w])

    for name, array in straight.to_arrays().items():
        np.testing.assert_array_equal(second.to_arrays()[name], array)


def test_sums_of_another_model_are_refused() -> None:
    with pytest.raises(ShapeError, match="another model"):
        GramSums([1], width=4).restore(GramSums([1], width=5).to_arrays())


def test_states_that_are_no_numbers_name_their_layer() -> None:
    bad = np.full((3, 4), np.nan, dtype=np.float32)

    with pytest.raises(ModelError, match="after layer 2"):
        GramSums([2], width=4).add({2: bad}, np.zeros((3, 4), dtype=np.float32))
