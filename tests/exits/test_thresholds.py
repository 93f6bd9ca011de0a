from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgewise.errors import ConfigError
from edgewise.exits import PolicyInputs
from edgewise.exits.thresholds import (
    Trial,
    certainties,
    choose_trial,
    confidences,
    every_head_s,
    first_exits,
    geometric_shares,
    need_validation,
    thresholds_for_shares,
)
from edgewise.model import Validation
from edgewise.predict import CostTable


def leave_one_by_one(scores: list[list[float]], shares: list[float]) -> list[int]:
    """Where samples leave when at each exit the surest go, as many as the share says."""
    num = len(scores[0])
    exits = [len(scores) - 1] * num
    left = set(range(num))
    for k in range(len(scores) - 1):
        count = min(int(shares[k] * num + 1e-9), len(left))
        for n in sorted(left, key=lambda n: -scores[k][n])[:count]:
            exits[n] = k
            left.remove(n)
    return exits


@given(
    seed=st.integers(0, 10_000),
    num=st.integers(1, 40),
    weights=st.lists(st.floats(0.01, 1.0), min_size=2, max_size=5),
)
def test_thresholds_let_the_surest_leave_as_counting_by_hand_does(
    seed: int, num: int, weights: list[float]
) -> None:
    order = np.random.default_rng(seed).permutation(num * len(weights))
    scores = order.reshape(-1, num).astype(np.float64)
    shares = [w / sum(weights) for w in weights]

    thresholds = thresholds_for_shares(scores, shares)

    assert first_exits(scores, thresholds).tolist() == leave_one_by_one(scores.tolist(), shares)


def test_samples_with_the_score_of_the_last_that_left_leave_too() -> None:
    scores = np.array([[0.5, 0.5, 0.5, 0.1], [0.0, 0.0, 0.0, 0.0]])

    assert first_exits(scores, thresholds_for_shares(scores, [0.25, 0.75])).tolist() == [0, 0, 0, 1]


def test_an_exit_whose_share_is_less_than_one_sample_lets_nobody_leave() -> None:
    thresholds = thresholds_for_shares(np.array([[0.9, 0.8], [0.1, 0.2]]), [0.4, 0.6])

    assert thresholds.tolist() == [np.inf, -np.inf]


@given(num=st.integers(1, 12), q=st.floats(1e-6, 1e6))
def test_geometric_shares_sum_to_one_and_change_by_the_factor(num: int, q: float) -> None:
    shares = geometric_shares(num, q)

    assert shares.sum() == pytest.approx(1.0)
    assert shares[1:].tolist() == pytest.approx((shares[:-1] * q).tolist(), abs=1e-9)


@pytest.mark.parametrize("q", [0.0, -1.0, float("nan"), float("inf")])
def test_a_factor_that_is_no_positive_number_is_refused(q: float) -> None:
    with pytest.raises(ConfigError, match="factor above zero"):
        geometric_shares(3, q)


def test_with_a_budget_the_most_accurate_setting_that_fits_is_chosen() -> None:
    trials = [Trial(accuracy=a, mean_s=s) for a, s in [(0.7, 1.0), (0.9, 3.0), (0.8, 2.0)]]

    assert choose_trial(trials, budget_s=2.5, least_accuracy=1.0) == 2
    assert choose_trial(trials, budget_s=9.0, least_accuracy=1.0) == 1
    assert choose_trial(trials, budget_s=0.1, least_accuracy=1.0) == 0


def test_without_a_budget_the_cheapest_setting_that_is_accurate_enough_is_chosen() -> None:
    trials = [Trial(accuracy=a, mean_s=s) for a, s in [(0.7, 1.0), (0.9, 3.0), (0.89, 2.0)]]

    assert choose_trial(trials, budget_s=None, least_accuracy=0.85) == 2
    assert choose_trial(trials, budget_s=None, least_accuracy=0.95) == 1


def test_running_every_head_costs_all_heads_on_the_way() -> None:
    costs = CostTable.from_costs([1.0, 2.0, 4.0], [0.1, 0.2, 0.4])

    assert every_head_s(costs).tolist() == pytest.approx([1.1, 3.3, 7.7])


def test_confidences_and_certainties_use_each_exits_temperature() -> None:
    logits = np.array([[[2.0, 0.0]], [[2.0, 0.0]]])
    validation = Validation(logits=logits, labels=np.array([0]))

    cold, hot = confidences(validation, [1.0, 4.0])[:, 0]
    certain, unsure = certainties(validation, [1.0, 4.0])[:, 0]

    assert cold == pytest.approx(1 / (1 + np.exp(-2.0)))
    assert hot == pytest.approx(1 / (1 + np.exp(-0.5)))
    assert certain > unsure


def test_validation_logits_of_another_model_are_refused() -> None:
    inputs = PolicyInputs(
        costs=CostTable.from_costs([1.0] * 3, [1.0] * 3),
        validation=Validation(logits=np.zeros((2, 4, 5)), labels=np.zeros(4, dtype=int)),
    )

    with pytest.raises(ConfigError, match="3 exits, found 2"):
        need_validation(inputs, "msdnet")
