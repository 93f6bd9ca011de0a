from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from edgewise.errors import ConfigError
from edgewise.exits import ANSWER, LOOK, PolicyInputs, make_policy
from edgewise.exits.policies.branchynet import BranchyNet, choose_threshold
from edgewise.model import Validation
from edgewise.predict import CostTable

COSTS = CostTable.from_costs([1.0] * 3, [1.0] * 3)


def random_validation(seed: int) -> Validation:
    """Three exits that grow surer and more often right."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 5, 200)
    logits = rng.normal(size=(3, 200, 5))
    for k in range(3):
        logits[k, np.arange(200), labels] += 1.5 * k + rng.exponential(1.0, 200)
    return Validation(logits=logits, labels=labels)


def entropy_ratio(logits: npt.NDArray[np.floating], temperature: float) -> float:
    powers = [math.exp(float(z) / temperature) for z in logits]
    shares = [p / sum(powers) for p in powers]
    return -sum(p * math.log(p) for p in shares if p > 0) / math.log(len(shares))


def accuracy_at(validation: Validation, temperatures: tuple[float, ...], threshold: float) -> float:
    """Run the rule sample by sample."""
    right = 0
    for n, label in enumerate(validation.labels):
        for k in range(3):
            logits = validation.logits[k, n]
            if k == 2 or entropy_ratio(logits, temperatures[k]) <= threshold:
                right += int(logits.argmax() == label)
                break
    return right / len(validation.labels)


@pytest.mark.parametrize("accuracy_loss", [0.005, 0.05])
@pytest.mark.parametrize("seed", range(3))
def test_the_threshold_is_the_largest_that_keeps_the_accuracy(
    seed: int, accuracy_loss: float
) -> None:
    validation, temperatures = random_validation(seed), (1.0, 2.0, 0.5)
    floor = accuracy_at(validation, temperatures, -1.0) - accuracy_loss
    grid = [n / 100 for n in range(101)]
    expected = max(
        (t for t in grid if accuracy_at(validation, temperatures, t) >= floor - 1e-12), default=0.0
    )

    found = choose_threshold(validation, temperatures, accuracy_loss=accuracy_loss)

    assert found == pytest.approx(expected)
    assert 0.0 < found < 1.0


def test_without_validation_logits_a_threshold_must_be_given() -> None:
    with pytest.raises(ConfigError, match="needs a threshold") as caught:
        make_policy("branchynet", PolicyInputs(costs=COSTS))
    assert "edgewise prepare" in str(caught.value.help)


def test_the_chosen_threshold_is_used() -> None:
    validation = random_validation(0)
    inputs = PolicyInputs(costs=COSTS, temperatures=(1.0,) * 3, validation=validation)
    policy = make_policy("branchynet", inputs)

    assert isinstance(policy, BranchyNet)
    assert policy.threshold == choose_threshold(validation, (1.0,) * 3, accuracy_loss=0.005)


def test_every_exit_on_the_way_is_looked_at_whatever_the_time() -> None:
    policy = make_policy("branchynet", PolicyInputs(costs=COSTS), threshold=0.3)

    assert [policy.decide(p, 9.0, 0.0, 1.0) for p in range(4)] == [1, LOOK, LOOK, ANSWER]


def test_the_temperature_of_an_exit_decides_how_sure_it_is() -> None:
    logits = np.array([[4.0, 0.0, 0.0]], dtype=np.float32)
    inputs = PolicyInputs(costs=COSTS, temperatures=(1.0, 10.0, 1.0))
    policy = make_policy("branchynet", inputs, threshold=0.5)

    assert policy.accept(0, logits)
    assert not policy.accept(1, logits)
    assert policy.explain(0) == "entropy fell to 0.50"
    assert policy.explain(2) == "no earlier exit was sure"
