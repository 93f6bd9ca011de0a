"""Policies that judge answers: MSDNet, PABEE, FastBERT, SPINN and the bandit."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from edgewise.errors import ConfigError
from edgewise.exits import ANSWER, LOOK, Policy, PolicyInputs, Step, make_policy
from edgewise.exits.policies.bandit import Arms, Bandit
from edgewise.exits.policies.fastbert import FastBert
from edgewise.exits.policies.msdnet import MSDNet
from edgewise.exits.policies.pabee import Pabee, patient_exits
from edgewise.exits.policies.spinn import Spinn
from edgewise.model import Validation
from edgewise.predict import CostTable
from edgewise.scores import normalised_entropy, top1_confidence

COSTS = CostTable.from_costs([1.0] * 4, [0.25] * 4)


def random_validation(seed: int = 0, *, num: int = 200) -> Validation:
    """Four exits that grow surer and more often right."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 5, num)
    logits = rng.normal(size=(4, num, 5))
    for k in range(4):
        logits[k, np.arange(num), labels] += 1.0 + k * rng.exponential(1.0, num)
    return Validation(logits=logits, labels=labels)


def inputs(validation: Validation | None = None, **changes: Any) -> PolicyInputs:
    facts: dict[str, Any] = {"costs": COSTS, "temperatures": (1.0,) * 4, "validation": validation}
    return PolicyInputs(**(facts | changes))


def run(policy: Policy, logits: np.ndarray, *, budget_s: float = 1e9) -> int:
    """The exit that answers, asked as the executor asks."""
    request, now_s, position = policy.begin(), 0.0, 0
    action = request.decide(0, 0.0, 0.0, budget_s)
    while True:
        if action > position:
            now_s += float(COSTS.stage_s[position:action].sum())
            position = action
            action = request.decide(position, now_s, 0.0, budget_s)
            continue
        now_s += float(COSTS.head_s[position - 1])
        seen = logits[position - 1][None].astype(np.float32)
        if action != LOOK or request.accept(position - 1, seen) or position == 4:
            return position - 1
        action = position + 1


def sure_of(label: int, size: float) -> np.ndarray:
    logits = np.zeros(5)
    logits[label] = size
    return logits


NAMES = ["msdnet", "pabee", "fastbert", "spinn", "eenet"]


@pytest.mark.parametrize("name", NAMES)
def test_what_must_be_chosen_on_validation_logits_says_that_there_are_none(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*validation logits") as caught:
        make_policy(name, inputs())

    assert "edgewise prepare" in str(caught.value.help)


@pytest.mark.parametrize("name", [*NAMES, "bandit"])
def test_every_head_is_looked_at_in_turn(name: str) -> None:
    request = make_policy(name, inputs(random_validation())).begin()

    assert request.decide(0, 0.0, 0.0, 9.0) == 1
    assert [request.decide(p, 0.0, 0.0, 9.0) for p in (1, 2, 3)] == [LOOK] * 3
    assert request.decide(4, 0.0, 0.0, 9.0) == (LOOK if name == "bandit" else ANSWER)


def test_msdnet_leaves_where_the_probability_reaches_that_exits_threshold() -> None:
    policy = make_policy("msdnet", inputs(random_validation()), q=1.0)
    assert isinstance(policy, MSDNet)

    for k, threshold in enumerate(policy.thresholds[:-1]):
        for size in np.linspace(0.0, 8.0, 30):
            logits = sure_of(1, size)[None].astype(np.float32)
            wanted = bool(top1_confidence(logits[0]) >= threshold)
            assert policy.accept(k, logits) is wanted


def test_msdnets_samples_leave_in_the_shares_of_its_factor() -> None:
    validation = random_validation(num=400)
    policy = make_policy("msdnet", inputs(validation), q=2.0)

    exits = [run(policy, validation.logits[:, n]) for n in range(400)]

    shares = np.bincount(exits, minlength=4) / 400
    # Rounded down at three exits; what is rounded off leaves at the last.
    assert shares == pytest.approx(np.array([1, 2, 4, 8]) / 15, abs=3 / 400)


@pytest.mark.parametrize("budget_s", [1.3, 2.0, 3.0, 4.9])
@pytest.mark.parametrize("name", ["msdnet", "fastbert"])
def test_a_mean_budget_is_kept_on_validation_data(name: str, budget_s: float) -> None:
    validation = random_validation()
    policy = make_policy(name, inputs(validation), budget_s=budget_s)

    exits = [run(policy, validation.logits[:, n]) for n in range(200)]

    assert np.mean([1.25 * (k + 1) for k in exits]) <= budget_s + 1e-9


@pytest.mark.parametrize("budget_s", [1.3, 3.2, 3.7, 4.9])
def test_pabee_takes_the_most_accurate_patience_whose_mean_fits(budget_s: float) -> None:
    validation = random_validation()
    policy = make_policy("pabee", inputs(validation), budget_s=budget_s)
    assert isinstance(policy, Pabee)
    known = []
    for patience in (1, 2, 3):
        exits = patient_exits(validation.logits.argmax(axis=2), patience=patience)
        right = validation.correct[exits, np.arange(200)].mean()
        known.append((right, 1.25 * (1 + exits.mean()), patience))

    fitting = [each for each in known if each[1] <= budget_s]

    # Where none fits, the least patience is the cheapest.
    assert policy.patience == (max(fitting)[2] if fitting else 1)


def test_msdnet_anytime_keeps_the_last_answer_that_medians_let_it_finish() -> None:
    policy = make_policy("msdnet", inputs(), mode="anytime")
    logits = np.zeros((4, 5))

    # Answers are done at 1.25, 2.5, 3.75 and 5.
    assert [run(policy, logits, budget_s=b) for b in (0.1, 2.4, 2.6, 3.8, 9.0)] == [0, 0, 1, 2, 3]


def brute_patience(labels: tuple[int, ...], patience: int) -> int:
    for k in range(patience, len(labels)):
        if len(set(labels[k - patience : k + 1])) == 1:
            return k
    return len(labels) - 1


@pytest.mark.parametrize("patience", [1, 2, 3])
def test_patience_leaves_when_an_answer_has_been_repeated_that_often(patience: int) -> None:
    policy = make_policy("pabee", inputs(), patience=patience)

    for labels in itertools.product(range(3), repeat=4):
        logits = np.stack([sure_of(label, 1.0) for label in labels])
        wanted = brute_patience(labels, patience)
        assert run(policy, logits) == wanted
        assert patient_exits(np.array(labels)[:, None], patience=patience).tolist() == [wanted]


def test_requests_that_run_at_once_do_not_count_each_others_answers() -> None:
    policy = make_policy("pabee", inputs(), patience=1)
    one, two = policy.begin(), policy.begin()
    first, second = (sure_of(k, 1.0)[None].astype(np.float32) for k in (0, 1))

    assert not one.accept(0, first)
    assert not two.accept(0, second)
    assert one.accept(1, first)
    assert not two.accept(1, first)


def test_fastbert_leaves_where_uncertainty_falls_to_the_speed() -> None:
    policy = make_policy("fastbert", inputs(), speed=0.5)
    assert isinstance(policy, FastBert)

    for size in np.linspace(0.0, 8.0, 40):
        logits = sure_of(2, size)[None].astype(np.float32)
        wanted = bool(1 - normalised_entropy(logits[0]) >= 0.5)
        assert policy.accept(0, logits) is wanted


def spinn_cost_s(validation: Validation, threshold: float) -> float:
    """Mean cost at a threshold, sample by sample."""
    costs = []
    for n in range(validation.labels.size):
        k = 0
        while k < 3 and top1_confidence(validation.logits[k, n]) < threshold:
            k += 1
        costs.append(1.25 * (k + 1))
    return float(np.mean(costs))


@pytest.mark.parametrize("left_s", [1.5, 2.5, 3.5, 4.5, 9.0])
def test_spinns_expected_latency_fits_the_time_left(left_s: float) -> None:
    validation = random_validation()
    policy = make_policy("spinn", inputs(validation))
    assert isinstance(policy, Spinn)

    assert spinn_cost_s(validation, policy.choose(left_s)) <= left_s


def test_spinn_expects_more_where_the_last_request_took_longer_than_profiled() -> None:
    validation = random_validation()
    policy = make_policy("spinn", inputs(validation))
    assert isinstance(policy, Spinn)
    calm = policy.choose(4.0)

    policy.begin().observe([Step(unit="head:0", predicted_s=1.0, observed_s=2.0)], met=True)

    assert policy.choose(4.0) < calm
    assert spinn_cost_s(validation, policy.choose(4.0)) * 2.0 <= 4.0
    assert policy.expected_s(1.5) == 3.0


def test_spinn_without_scale_factor_keeps_to_its_profile() -> None:
    policy = make_policy("spinn", inputs(random_validation()), scale_factor=False)

    policy.observe([Step(unit="head:0", predicted_s=1.0, observed_s=2.0)], met=True)

    assert policy.expected_s(1.5) == 1.5


def test_spinn_for_latency_loses_no_more_accuracy_than_asked() -> None:
    validation = random_validation()
    policy = make_policy("spinn", inputs(validation), objective="latency", accuracy_loss=0.01)

    exits = np.array([run(policy, validation.logits[:, n]) for n in range(200)])

    assert validation.correct[exits, np.arange(200)].mean() >= validation.accuracy()[-1] - 0.01


def test_spinn_takes_the_cheapest_threshold_where_none_fits() -> None:
    policy = make_policy("spinn", inputs(random_validation()))

    assert run(policy, np.zeros((4, 5)), budget_s=0.01) == 0


def test_the_bandit_comes_to_use_the_choice_that_is_rewarded() -> None:
    arms = Arms(4, period=5, discount=1.0, exploration=0.2)
    rng = np.random.default_rng(0)

    used = []
    for _ in range(2000):
        used.append(arms.current)
        arms.add(arms.current, float(rng.random() < (0.2, 0.3, 0.9, 0.1)[arms.current]))

    assert np.mean(np.array(used[1000:]) == 2) > 0.8


def test_the_bandit_follows_when_another_choice_becomes_better() -> None:
    arms = Arms(2, period=5, discount=0.9, exploration=0.2)
    used = []
    for n in range(2000):
        used.append(arms.current)
        arms.add(arms.current, 1.0 if arms.current == (n >= 1000) else 0.0)

    assert np.mean(used[500:1000]) < 0.3
    assert np.mean(used[1500:]) > 0.7


def test_the_bandit_is_rewarded_by_the_confidence_of_answers_in_time() -> None:
    policy = make_policy("bandit", inputs(), thresholds=[0.5, 0.9], period=1, exploration=0.0)
    assert isinstance(policy, Bandit)

    late = policy.begin()
    late.accept(0, sure_of(0, 9.0)[None].astype(np.float32))
    late.observe((), met=False)
    timely = policy.begin()
    timely.accept(0, sure_of(0, 2.0)[None].astype(np.float32))
    timely.observe((), met=True)

    sure = float(top1_confidence(sure_of(0, 2.0)))
    assert policy.arms._sum.tolist() == pytest.approx([0.0, sure])
    assert policy.arms.current == 1


def test_the_reward_of_a_choice_no_longer_in_force_is_ignored() -> None:
    arms = Arms(2, period=1, discount=1.0, exploration=0.0)
    arms.add(0, 0.5)
    assert arms.current == 1

    arms.add(0, 1.0)

    assert arms._sum.tolist() == [0.5, 0.0]


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("msdnet", {"mode": "anytme"}, "unknown mode"),
        ("msdnet", {"q": 0.0}, "factor above zero"),
        ("pabee", {"patience": 0}, "patience of at least one"),
        ("fastbert", {"speed": 1.5}, "speed from 0 to 1"),
        ("spinn", {"objective": "energy"}, "unknown objective"),
        ("bandit", {"thresholds": []}, "at least one threshold"),
        ("bandit", {"period": 0}, "period of at least one"),
        ("bandit", {"discount": 0.0}, "discount above 0"),
        ("bandit", {"exploration": -1.0}, "exploration of zero or more"),
        ("eenet", {"budget_s": 0.0}, "mean budget above zero"),
        ("eenet", {"epochs": 0}, "at least one epoch"),
        ("edgewise_saving", {"save": "time"}, "cannot save 'time'"),
        ("edgewise_saving", {"accuracy_loss": -0.1}, "accuracy loss from 0 to 1"),
        ("edgewise_saving", {"target_dsr": 2.0}, "target DSR"),
    ],
)
def test_an_argument_out_of_its_range_is_refused(
    name: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        make_policy(name, inputs(random_validation()), **options)


@pytest.mark.parametrize("name", [*NAMES, "bandit"])
def test_the_reason_is_said_in_words(name: str) -> None:
    policy = make_policy(name, inputs(random_validation()))

    assert policy.explain(3) == "no earlier exit was sure"
    assert policy.explain(0) not in ("", policy.explain(3))
