from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgewise.bench.tuning import candidate_options, make_tuned, right_in_time
from edgewise.errors import ConfigError
from edgewise.exits import PolicyInputs, make_policy
from edgewise.model import Validation
from edgewise.predict import CostTable

COSTS = CostTable.from_costs([1.0] * 4, [0.25] * 4)


def known() -> Validation:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 5, 150)
    logits = rng.normal(size=(4, 150, 5))
    for k in range(4):
        logits[k, np.arange(150), labels] += 1.0 + 0.8 * k
    return Validation(logits=logits, labels=labels)


INPUTS = PolicyInputs(
    costs=COSTS,
    temperatures=(1.0,) * 4,
    validation=known(),
    segments=frozenset((k, k + 1) for k in range(4)),
)


@pytest.mark.parametrize("budget_s", [1.3, 2.6, 3.9, 9.0])
@pytest.mark.parametrize("name", ["msdnet", "fastbert", "branchynet", "pabee"])
def test_no_candidate_does_better_than_the_one_taken(name: str, budget_s: float) -> None:
    taken = right_in_time(make_tuned(name, INPUTS, budget_s=budget_s), INPUTS, budget_s=budget_s)

    for options in candidate_options(name, num_exits=4, budget_s=budget_s):
        policy = make_policy(name, INPUTS, **options)
        assert right_in_time(policy, INPUTS, budget_s=budget_s) <= taken


def test_a_tight_deadline_gets_another_setting_than_a_roomy_one() -> None:
    tight, roomy = (vars(make_tuned("fastbert", INPUTS, budget_s=b)) for b in (1.3, 9.0))

    assert tight["speed"] > roomy["speed"]


def test_full_depth_is_right_in_time_only_where_it_fits() -> None:
    full = make_policy("full_depth", INPUTS)

    assert right_in_time(full, INPUTS, budget_s=4.0) == 0.0
    assert right_in_time(full, INPUTS, budget_s=4.3) == known().correct[-1].mean()


def test_the_profiles_rounds_are_played_in_turn() -> None:
    row = np.array([1.0, 0.25] * 4)
    noisy = replace(COSTS, samples=np.stack([row, 3.0 * row]), medians=row)
    full = make_policy("full_depth", replace(INPUTS, costs=noisy))

    found = right_in_time(full, replace(INPUTS, costs=noisy), budget_s=5.0)

    assert found == known().correct[-1][::2].sum() / 150


def test_a_policy_that_cannot_be_made_says_why() -> None:
    with pytest.raises(ConfigError, match="validation logits"):
        make_tuned("msdnet", replace(INPUTS, validation=None), budget_s=1.0)


def test_fixed_options_are_kept() -> None:
    policy = make_tuned("msdnet", INPUTS, budget_s=1.0, fixed={"mode": "anytime"})

    assert policy.name == "msdnet_anytime"


def test_who_plans_for_deadlines_has_nothing_to_tune() -> None:
    assert candidate_options("edgewise", num_exits=4, budget_s=1.0) == [{}]
    assert candidate_options("spinn", num_exits=4, budget_s=1.0) == [{}]
