from __future__ import annotations

import numpy as np
import pytest

from edgewise.errors import ConfigError
from edgewise.exits import ANSWER, REJECT, PolicyInputs, Step, make_policy
from edgewise.exits.policies.edgewise import Edgewise
from edgewise.model import Validation
from edgewise.predict import CostTable
from edgewise.predict.state_costs import Regime, StateCosts

COSTS = CostTable.from_costs([1.0] * 4, [0.5] * 4)


def router(costs: CostTable = COSTS, **options: object) -> Edgewise:
    inputs = PolicyInputs(costs=costs, segments=frozenset({(k, k + 1) for k in range(4)}))
    policy = make_policy("edgewise", inputs, **options)
    assert isinstance(policy, Edgewise)
    return policy


def request(ratio: float, regime: Regime = "steady") -> tuple[Step, ...]:
    """What ran on a machine that is that much slower than its profile."""
    return tuple(
        Step(unit=f"segment:{k}", predicted_s=1.0, observed_s=ratio, regime=regime)
        for k in range(4)
    )


def depth(policy: Edgewise, budget_s: float) -> int:
    """Where a request ends whose units take their medians."""
    position, now_s = 0, 0.0
    while (action := policy.decide(position, now_s, 0.0, budget_s)) > position:
        now_s += float(action - position)
        position = action
    assert action == ANSWER
    return position


def test_a_slower_machine_is_learnt_and_forgotten_again() -> None:
    policy = router(window=64)
    assert depth(policy, 5.0) == 4

    for _ in range(16):
        policy.observe(request(2.0), met=True, feasible=True)
    assert depth(policy, 5.0) == 2
    assert policy.expected_s(3.0) == pytest.approx(6.0)

    for _ in range(16 + 8):  # a window of 16, and as many as a table may wait for
        policy.observe(request(1.0), met=True, feasible=True)
    assert depth(policy, 5.0) == 4


@pytest.mark.parametrize(
    ("ratio", "met", "waits"),
    [(1.0, True, True), (1.2, True, True), (1.3, True, False), (0.7, True, False),
     (1.0, False, False)],
    ids=["as usual", "hardly slower", "slower", "quicker", "late"],
)  # fmt: skip
def test_a_table_waits_only_after_a_request_that_taught_little(
    ratio: float,
    met: bool,  # noqa: FBT001 - a case
    waits: bool,  # noqa: FBT001 - a case
) -> None:
    policy = router(window=64)
    policy.observe(request(1.0), met=False)  # counting starts anew
    table = policy.table
    policy.observe(request(ratio), met=met)

    assert (policy.table is table) == waits
    for _ in range(7):
        policy.observe(request(1.0), met=True)
    assert policy.table is not table


def test_residuals_of_the_profile_are_known_from_the_start() -> None:
    noisy = CostTable(
        backend="null",
        stage_s=COSTS.stage_s,
        head_s=COSTS.head_s,
        segment_s=COSTS.segment_s,
        samples=np.full((20, 1), 2.0),
        medians=np.ones(1),
    )

    assert depth(router(), 4.6) == 4
    assert depth(router(noisy), 4.6) == 2


@pytest.mark.parametrize(("outcome", "action"), [("run_anyway", 1), ("reject", REJECT)])
def test_a_budget_that_nothing_meets_is_run_anyway_or_rejected(outcome: str, action: int) -> None:
    policy = router(on_infeasible=outcome)

    assert policy.decide(0, 0.0, 0.0, 1.4) == action
    assert policy.feasible(1.4) is False
    assert policy.feasible(1.6) is True


def test_what_has_begun_is_never_rejected() -> None:
    policy = router(on_infeasible="reject")

    assert policy.decide(1, 0.0, 0.0, -1.0) != REJECT


def test_misses_widen_the_margin_at_once_and_successes_narrow_it_slowly() -> None:
    policy = router(target_dsr=0.98)
    levels = [policy._margins.level]
    for met in (True, True, False):
        policy.observe(request(1.0), met=met, feasible=True)
        levels.append(policy._margins.level)

    assert levels[0] > levels[1] > levels[2]
    assert levels[3] > levels[0]
    assert levels[3] - levels[2] > 20 * (levels[1] - levels[2])


@pytest.mark.parametrize("feasible", [False, None])
def test_a_miss_that_nothing_could_prevent_does_not_steer(*, feasible: bool | None) -> None:
    policy = router()
    before = policy._margins.level
    policy.observe(request(1.0), met=False, feasible=feasible)

    assert policy._margins.level == before


def test_without_gain_the_margin_stays_at_the_target() -> None:
    policy = router(target_dsr=0.6, gain=0.0)
    for met in (True, False) * 3:
        policy.observe(request(1.0), met=met, feasible=True)

    assert policy._margins.level == pytest.approx(0.6)


def test_a_low_target_is_not_raised_by_the_range_of_the_margin() -> None:
    policy = router(target_dsr=0.6)
    policy.observe(request(1.0), met=True, feasible=True)

    assert policy._margins.level == pytest.approx(0.6)


@pytest.mark.parametrize("target_dsr", [0.9, 0.98])
def test_the_share_in_time_settles_at_the_target(target_dsr: float) -> None:
    rng = np.random.default_rng(5)
    policy = router(target_dsr=target_dsr, window=128)
    met = []
    for _ in range(600):
        budget_s, position, now_s, steps = float(rng.uniform(3, 9)), 0, 0.0, []
        feasible = policy.feasible(budget_s)
        while True:
            action = policy.decide(position, now_s, 0.0, budget_s)
            spent_s = float(rng.lognormal(sigma=0.2)) * (1.0 if action > position else 0.5)
            steps.append(
                Step(unit="", predicted_s=1.0 if action > position else 0.5, observed_s=spent_s)
            )
            now_s += spent_s
            if action <= position:
                break
            position = action
        if feasible:
            met.append(now_s <= budget_s)
        policy.observe(steps, met=now_s <= budget_s, feasible=feasible)

    # 500 requests scatter by 0.013 at 0.9; being late less often than allowed is no fault.
    assert np.mean(met[100:]) >= target_dsr - 0.03


def test_the_reason_says_whether_time_or_usefulness_ended_the_request() -> None:
    inputs = PolicyInputs(costs=COSTS, accuracy=(0.5, 0.6, 0.9, 0.8))
    policy = make_policy("edgewise", inputs)

    assert policy.explain(0) == "exit 1 did not fit the time left"
    assert policy.explain(2) == "the best exit fitted the budget"
    assert policy.explain(3) == "no later exit is better"


def priced(ratio: float, regime: Regime = "steady") -> StateCosts:
    """A state in which everything costs that many times the static medians."""
    return StateCosts(
        at_s=0.0, stage_s=ratio * COSTS.stage_s, head_s=ratio * COSTS.head_s, regime=regime
    )


def test_a_state_in_which_all_is_slower_ends_requests_earlier_at_once() -> None:
    policy = router()
    assert depth(policy, 4.6) == 4
    policy.reprice(priced(2.0))
    assert policy.unit_costs().seconds["head:0"] == 1.0
    # Two stages and a head are 5 s by prediction, though here they really took their medians.
    assert policy.decide(0, 0.0, 0.0, 3.1) == 1
    assert policy.decide(1, 1.0, 0.0, 3.1) == ANSWER
    policy.reprice(priced(1.0))
    assert depth(policy, 4.6) == 4


def test_each_regime_has_margins_of_its_own() -> None:
    policy = router(window=64)
    policy.reprice(priced(1.0, "slower"))
    for _ in range(16):
        policy.observe(request(2.0, "slower"), met=True, feasible=True)
    assert depth(policy, 5.0) == 2
    policy.reprice(priced(1.0, "steady"))
    assert depth(policy, 5.0) == 4
    policy.reprice(priced(1.0, "slower"))
    assert depth(policy, 5.0) == 2


def test_an_energy_budget_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="energy budget above 0 J"):
        router(energy_budget_j=0.0)


def test_saving_energy_reprices_with_its_router() -> None:
    logits = np.zeros((4, 8, 2), dtype=np.float32)
    inputs = PolicyInputs(
        costs=COSTS,
        accuracy=(0.5, 0.6, 0.7, 0.8),
        temperatures=(1.0,) * 4,
        validation=Validation(logits=logits, labels=np.zeros(8, dtype=np.int64)),
        segments=frozenset({(k, k + 1) for k in range(4)}),
    )
    policy = make_policy("edgewise", inputs, save="energy")
    policy.reprice(priced(2.0))
    assert policy.unit_costs().seconds["segment:0-1"] == 2.0
