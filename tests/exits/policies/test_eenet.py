from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgewise.exits import PolicyInputs, make_policy
from edgewise.exits.eenet import Scorer, fit_schedule, keep_budget
from edgewise.exits.policies.eenet import EENet
from edgewise.exits.thresholds import every_head_s, first_exits
from edgewise.model import Validation
from edgewise.predict import CostTable
from edgewise.scores import softmax

COSTS = CostTable.from_costs([1.0] * 4, [0.25] * 4)


def validation(seed: int = 0, *, num: int = 300) -> Validation:
    """Easy samples are right from the first exit on, hard ones only late."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 5, num)
    hard = rng.uniform(0, 1, num)
    logits = rng.normal(size=(4, num, 5))
    for k in range(4):
        logits[k, np.arange(num), labels] += 4.0 * (1.3 - hard) * (k + 2) / 5
    return Validation(logits=logits, labels=labels)


def inputs(known: Validation) -> PolicyInputs:
    return PolicyInputs(costs=COSTS, temperatures=(1.0,) * 4, validation=known)


def leave(policy: EENet, known: Validation) -> np.ndarray:
    """Exits of all samples, asked one by one as the executor asks."""
    exits = []
    for n in range(known.labels.size):
        request, k = policy.begin(), 0
        while k < 3 and not request.accept(k, known.logits[k, n][None].astype(np.float64)):
            k += 1
        exits.append(k)
    return np.array(exits)


@pytest.mark.parametrize("budget_s", [1.5, 2.5, 3.5, 4.5])
def test_the_mean_budget_is_met_on_validation_data(budget_s: float) -> None:
    known = validation()
    policy = make_policy("eenet", inputs(known), budget_s=budget_s, epochs=30)
    assert isinstance(policy, EENet)

    mean_s = every_head_s(COSTS)[leave(policy, known)].mean()

    assert mean_s == pytest.approx(policy.schedule.mean_s)
    # Spent as far as single samples allow: each exit rounds its share down.
    assert budget_s - 0.1 <= mean_s <= budget_s


def test_everybody_leaves_first_where_not_even_that_fits() -> None:
    known = validation()
    policy = make_policy("eenet", inputs(known), budget_s=0.5, epochs=10)
    assert isinstance(policy, EENet)

    assert leave(policy, known).tolist() == [0] * 300


def test_fitting_twice_gives_the_same() -> None:
    known = validation(num=60)
    one, two = (make_policy("eenet", inputs(known), budget_s=3.0, epochs=10) for _ in range(2))
    assert isinstance(one, EENet)
    assert isinstance(two, EENet)

    assert one.schedule.thresholds == two.schedule.thresholds


def test_scores_tell_right_answers_from_wrong_ones() -> None:
    known = validation()
    schedule = fit_schedule(
        known.logits,
        known.labels,
        every_head_s(COSTS),
        budget_s=3.0,
        temperatures=[1.0] * 4,
    )

    scores = schedule.scorer.scores(softmax(known.logits))

    for k in range(4):
        right, wrong = scores[k][known.correct[k]], scores[k][~known.correct[k]]
        # The chance that a right answer has the higher score: 0.5 would be guessing.
        assert (right[:, None] > wrong).mean() > 0.65


def test_the_budget_is_better_spent_than_by_chance() -> None:
    known = validation(num=600)
    policy = make_policy("eenet", inputs(known), budget_s=2.5)
    assert isinstance(policy, EENet)
    exits = leave(policy, known)
    chance = np.random.default_rng(0)

    found = known.correct[exits, np.arange(600)].mean()
    shuffled = [known.correct[chance.permutation(exits), np.arange(600)].mean() for _ in range(20)]

    assert found > max(shuffled)


@given(seed=st.integers(0, 1000))
def test_one_score_at_a_time_is_what_all_at_once_gives(seed: int) -> None:
    rng = np.random.default_rng(seed)
    probabilities = softmax(rng.normal(size=(3, 4, 5)))
    scorer = Scorer(
        classes=rng.normal(size=(3, 5)),
        facts=rng.normal(size=(3, 5)) * np.tri(3, 5, 1),
        bias=rng.normal(size=3),
    )

    together = scorer.scores(probabilities)

    for n in range(4):
        seen: list[float] = []
        for k in range(3):
            seen.append(scorer.score(k, probabilities[k, n], seen))
        assert seen == pytest.approx(together[:, n].tolist())


@settings(max_examples=30)
@given(
    seed=st.integers(0, 1000),
    budget_s=st.floats(0.5, 12.0),
    weights=st.lists(st.floats(0.0, 1.0), min_size=4, max_size=4).filter(lambda w: sum(w) > 0),
)
def test_tilted_shares_never_spend_more_than_the_budget(
    seed: int, budget_s: float, weights: list[float]
) -> None:
    scores = np.random.default_rng(seed).uniform(size=(4, 50))
    cost_s = np.array([1.0, 3.0, 4.0, 9.0])

    _, thresholds, mean_s = keep_budget(
        np.array(weights) / sum(weights), scores, cost_s, budget_s=budget_s
    )

    assert mean_s == pytest.approx(cost_s[first_exits(scores, thresholds)].mean())
    assert mean_s <= max(budget_s, 1.0)
