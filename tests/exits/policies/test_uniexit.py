from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgewise.backends.null import NullProgram
from edgewise.clock import VirtualClock
from edgewise.errors import ConfigError, ProfileError
from edgewise.exits import ANSWER, LATE, PolicyInputs, Step, make_policy
from edgewise.exits.policies.uniexit import UniExit
from edgewise.frontends.outline import outline_model
from edgewise.predict import CostTable
from edgewise.predict.state_costs import Regime, StateCosts
from edgewise.runtime import Session

COSTS = CostTable.from_costs([1.0] * 4, [0.5] * 4)
X = np.zeros((1, 3, 8, 8), dtype=np.float32)


def uniexit(costs: CostTable = COSTS, **options: Any) -> UniExit:
    policy = make_policy("uniexit", PolicyInputs(costs=costs), **options)
    assert isinstance(policy, UniExit)
    return policy


def session(policy: UniExit, cost_s: Callable[[str], float] | None = None) -> Session:
    """On the null backend, where units take their medians unless told otherwise."""
    medians = {f"segment:{k}-{k + 1}": 1.0 for k in range(4)} | {f"head:{k}": 0.5 for k in range(4)}
    clock = VirtualClock()
    singles = [(k, k + 1) for k in range(4)]
    program = NullProgram(
        outline_model(4), segments=singles, clock=clock, cost_s=cost_s or medians.__getitem__
    )
    return Session(program, COSTS, policy=policy, clock=clock)


def exit_of(policy: UniExit, budget_s: float, **options: Any) -> int:
    """Where a request ends on the null backend."""
    exit_index = session(policy, **options).run(X, budget_s=budget_s).exit_index
    assert exit_index is not None
    return exit_index


def priced(
    stage_s: float = 1.0, head_s: float = 0.5, *, volatile: bool = False, regime: Regime = "steady"
) -> StateCosts:
    return StateCosts(
        at_s=0.0,
        stage_s=np.full(4, stage_s),
        head_s=np.full(4, head_s),
        volatile=volatile,
        regime=regime,
    )


def profiled(ratio_of_unit: list[list[float]]) -> CostTable:
    """With residuals: [R, U], stage 0, head 0, stage 1, …."""
    medians = np.array([1.0, 0.5] * 4)
    return replace(COSTS, samples=np.array(ratio_of_unit) * medians, medians=medians)


# To answer at exit k a request needs k + 1 stages of 1 s and one head of 0.5 s.
@pytest.mark.parametrize(
    ("budget_s", "exit_index"),
    [(9.0, 3), (4.5, 3), (4.49, 2), (3.5, 2), (3.49, 1), (2.5, 1), (2.49, 0), (1.5, 0), (0.1, 0)],
)
def test_it_goes_on_while_the_next_exit_fits(budget_s: float, exit_index: int) -> None:
    assert exit_of(uniexit(margin="none"), budget_s) == exit_index


def test_only_the_next_exit_is_looked_at() -> None:
    # From 1, exit 1 would need 1 + 9; exit 2 only 1 + 1 + 0.5.
    dear_head = CostTable.from_costs([1.0, 1.0, 1.0], [0.5, 9.0, 0.5])
    policy = uniexit(dear_head, margin="none")

    assert policy.decide(1, 0.0, 0.0, 9.9) == ANSWER
    assert policy.decide(1, 0.0, 0.0, 10.0) == 2


@given(
    stage_s=st.lists(st.integers(0, 9), min_size=2, max_size=6),
    head_s=st.lists(st.integers(0, 9), min_size=6, max_size=6),
    left=st.integers(-3, 30),
)
def test_each_decision_is_the_papers_inequality(
    stage_s: list[int], head_s: list[int], left: int
) -> None:
    num = len(stage_s)
    policy = uniexit(CostTable.from_costs([*stage_s], [*head_s[:num]]), margin="none")
    now_s = 100.0
    for k in range(num):
        goes_on = k + 1 < num and stage_s[k + 1] + head_s[k + 1] <= left
        here = ANSWER if head_s[k] <= left else LATE

        assert policy.decide(k + 1, now_s, 50.0, now_s + left) == (k + 2 if goes_on else here)


def test_waiting_before_the_start_is_part_of_the_elapsed_time() -> None:
    running = session(uniexit(margin="none"))
    running.clock.sleep_s(1.0)
    answer = running.run(X, budget_s=4.5, arrival_s=0.0)

    assert answer.exit_index == 2
    assert answer.met


def test_a_budget_below_the_first_exit_is_told_as_other_policies_tell_it() -> None:
    policy = uniexit(margin="none")
    answer = session(policy).run(X, budget_s=1.4)

    assert policy.decide(1, 1.0, 0.0, 1.4) == LATE
    assert (answer.outcome, answer.feasible, answer.exit_index) == ("ran_anyway", False, 0)
    assert policy.feasible(1.5)


def test_it_says_why() -> None:
    running = session(uniexit(margin="none"))

    assert running.run(X, budget_s=3.5).reason == "exit 3 did not fit the time left"
    assert running.run(X, budget_s=9.0).reason == "the last exit fitted the budget"


def test_static_costs_serve_until_a_state_is_priced() -> None:
    policy = uniexit(margin="none")
    assert policy.unit_costs().seconds == {}
    assert policy.decide(1, 0.0, 0.0, 1.5) == 2

    policy.reprice(priced(2.0, 0.75))
    assert policy.decide(1, 0.0, 0.0, 2.74) == ANSWER
    assert policy.decide(1, 0.0, 0.0, 2.75) == 2
    assert policy.decide(1, 0.0, 0.0, 0.74) == LATE
    assert policy.unit_costs().seconds["segment:2-3"] == 2.0
    assert policy.unit_costs().seconds["head:3"] == 0.75


def test_costs_of_another_model_are_refused() -> None:
    with pytest.raises(ProfileError, match="4 stages and heads, found 2"):
        uniexit().reprice(StateCosts(at_s=0.0, stage_s=np.ones(2), head_s=np.ones(2)))


def test_base_margins_are_percentiles_of_each_units_offline_errors() -> None:
    # Ratios 1.00 … 1.99 for stages, half as far for heads: p95 is 1.9405, p99 is 1.9801.
    rows = [[1 + n / 100, 1 + n / 200] * 4 for n in range(100)]
    for margin, q in (("p95", 0.9405), ("p99", 0.9801)):
        need_s = 1.0 * (1 + q) + 0.5 * (1 + q / 2)
        policy = uniexit(profiled(rows), margin=margin)

        assert policy.decide(1, 0.0, 0.0, need_s - 1e-6) == ANSWER
        assert policy.decide(1, 0.0, 0.0, need_s + 1e-6) == 2
    assert uniexit(profiled(rows), margin="none").decide(1, 0.0, 0.0, 1.5) == 2


def test_residuals_of_other_units_are_taken_together() -> None:
    costs = replace(COSTS, samples=np.array([[1.0], [2.0]]), medians=np.ones(1))
    policy = uniexit(costs, margin="p95")

    assert policy.decide(1, 0.0, 0.0, 1.94 * 1.5) == ANSWER
    assert policy.decide(1, 0.0, 0.0, 1.96 * 1.5) == 2


def test_a_base_margin_can_be_given_for_all_units_or_for_each() -> None:
    alike = uniexit(margin="p95", base_ratio=1.5)
    each = uniexit(margin="p95", base_ratio=[1.0, 2.0, 1.0, 1.0, 1.0, 3.0, 1.0, 1.0])

    assert [alike.decide(1, 0.0, 0.0, left_s) for left_s in (2.2, 2.3)] == [ANSWER, 2]
    assert [each.decide(1, 0.0, 0.0, left_s) for left_s in (3.4, 3.6)] == [ANSWER, 2]


@pytest.mark.parametrize("given_ratio", [0.0, [1.0, 2.0], math.nan, -1.0])
def test_a_base_margin_of_another_shape_or_range_is_refused(given_ratio: Any) -> None:
    with pytest.raises(ConfigError, match="8 units"):
        uniexit(base_ratio=given_ratio)


def test_a_mistyped_margin_or_reading_is_told() -> None:
    with pytest.raises(ConfigError, match="fallback") as found:
        uniexit(margin="falback")
    assert found.value.help == "did you mean 'fallback'?"
    with pytest.raises(ConfigError, match="worst case 'second'"):
        uniexit(worst_case="second")


def slow_once(policy: UniExit, *, segment_1_s: float = 1.4) -> None:
    steps = [("segment:0-1", 1.0), ("segment:1-2", segment_1_s), ("head:1", 0.6)]
    policy.observe(
        [Step(unit=u, predicted_s=0.5 if "h" in u else 1.0, observed_s=s) for u, s in steps],
        met=True,
    )


def test_the_fallback_adds_the_worst_case_in_volatile_states_only() -> None:
    policy = uniexit(margin="fallback", base_ratio=1.1)
    slow_once(policy)
    calm_s = 1.1 * 1.5
    # Base 1.1, and 0.4 of the stage and 0.2 of the head beyond their predictions.
    volatile_s = calm_s + 0.4 * 1.0 + 0.2 * 0.5

    for volatile, need_s in ((False, calm_s), (True, volatile_s), (False, calm_s)):
        policy.reprice(priced(volatile=volatile))
        assert policy.decide(1, 0.0, 0.0, need_s - 1e-6) == ANSWER
        assert policy.decide(1, 0.0, 0.0, need_s + 1e-6) == 2


def test_a_worst_case_seen_while_volatile_counts_at_once() -> None:
    policy = uniexit(margin="fallback")
    policy.reprice(priced(volatile=True))
    assert policy.decide(1, 0.0, 0.0, 1.5) == 2

    slow_once(policy)
    assert policy.decide(1, 0.0, 0.0, 1.99) == ANSWER


def test_a_worst_case_is_forgotten_after_two_periods() -> None:
    policy = uniexit(margin="fallback")
    policy.reprice(priced(volatile=True))
    slow_once(policy)
    policy.decide(1, 10.0, 0.0, 9.0)  # ten seconds later
    slow_once(policy, segment_1_s=1.0)

    assert policy.decide(1, 10.0, 0.0, 11.61) == 2


def test_read_as_seconds_the_worst_case_holds_slow_clocks_against_fast_ones() -> None:
    policies = {w: uniexit(margin="fallback", worst_case=w) for w in ("ratio", "seconds")}
    for policy in policies.values():
        policy.reprice(priced(4.0, 2.0, volatile=True))
        policy.observe([Step(unit="segment:1-2", predicted_s=4.0, observed_s=4.4)], met=True)
        policy.reprice(priced(1.0, 0.5, volatile=True))

    # 10 % of 1 s against 4.4 s less 1 s.
    assert [policies["ratio"].decide(1, 0.0, 0.0, s) for s in (1.59, 1.61)] == [ANSWER, 2]
    assert [policies["seconds"].decide(1, 0.0, 0.0, s) for s in (4.89, 4.91)] == [ANSWER, 2]


def test_conformal_bounds_start_at_the_base_and_are_learnt_per_regime() -> None:
    policy = uniexit(margin="conformal", base_ratio=1.5)
    assert [policy.decide(1, 0.0, 0.0, s) for s in (2.24, 2.26)] == [ANSWER, 2]

    policy.reprice(priced(regime="slower"))
    steps = [Step(unit="segment:1-2", predicted_s=1.0, observed_s=1.2, regime="slower")] * 19
    steps += [Step(unit="head:1", predicted_s=0.5, observed_s=1.0, regime="slower")] * 19
    policy.begin().observe(steps, met=True)
    need_s = 1.2 * 1.0 + 2.0 * 0.5
    assert [policy.decide(1, 0.0, 0.0, need_s + d) for d in (-1e-6, 1e-6)] == [ANSWER, 2]

    policy.reprice(priced(regime="steady"))
    assert [policy.decide(1, 0.0, 0.0, s) for s in (2.24, 2.26)] == [ANSWER, 2]


def test_a_residual_belongs_to_the_regime_it_was_predicted_in() -> None:
    policy = uniexit(margin="conformal")
    step = Step(unit="segment:1-2", predicted_s=1.0, observed_s=3.0, regime="slower")
    policy.reprice(priced(regime="faster"))
    policy.observe([step] * 19, met=True)

    assert policy.decide(1, 0.0, 0.0, 1.6) == 2
    policy.reprice(priced(regime="slower"))
    assert policy.decide(1, 0.0, 0.0, 1.6) == ANSWER


def test_conformal_bounds_cover_as_often_as_asked_while_requests_run() -> None:
    rng = np.random.default_rng(7)
    policy = uniexit(margin="conformal", level=0.9)
    medians = {f"segment:{k}-{k + 1}": 1.0 for k in range(4)} | {f"head:{k}": 0.5 for k in range(4)}
    running = session(policy, cost_s=lambda unit: medians[unit] * float(rng.lognormal(0.0, 0.2)))
    for _ in range(1500):
        running.run(X, budget_s=9.0)
    coverage = policy.coverage

    assert coverage is not None
    assert coverage.count > 5000
    assert coverage.observed == pytest.approx(0.9, abs=0.01)
    assert uniexit(margin="p95").coverage is None


def test_clocks_never_profiled_are_corrected_after_one_stage() -> None:
    medians = {f"segment:{k}-{k + 1}": 1.0 for k in range(4)} | {f"head:{k}": 0.5 for k in range(4)}

    def twice_s(unit: str) -> float:
        return 2 * medians[unit]

    plain = session(uniexit(margin="none"), twice_s).run(X, budget_s=5.9)
    scaled = session(uniexit(margin="none", scale_factor=True), twice_s).run(X, budget_s=5.9)

    # In truth exit 1 needs 5 s and exit 2 needs 7 s.
    assert (plain.exit_index, plain.met) == (2, False)
    assert (scaled.exit_index, scaled.met) == (1, True)


def test_the_factor_is_kept_for_the_next_request_and_falls_slowly() -> None:
    policy = uniexit(margin="none", scale_factor=True)
    session(policy, lambda _: 2.0).run(X, budget_s=100.0)
    assert policy.scale.value == pytest.approx(2.0)
    assert not policy.feasible(2.9)
    assert policy.feasible(3.1)
    assert policy.expected_s(1.0) == pytest.approx(2.0)

    session(policy).run(X, budget_s=100.0)
    assert 1.0 < policy.scale.value < 2.0


def test_bounds_learn_what_the_factor_leaves_over() -> None:
    policy = uniexit(margin="conformal", scale_factor=True)
    running = session(policy, lambda unit: 3.0 if "segment" in unit else 1.5)
    for _ in range(60):
        running.run(X, budget_s=1000.0)

    # Three times the prediction is the factor's alone; only the first request was off.
    assert policy.scale.value == pytest.approx(3.0)
    assert policy.needs.scaled_s[0] * 3.0 == pytest.approx(4.5, rel=0.01)


def test_seconds_beyond_are_not_multiplied_by_the_factor() -> None:
    policy = uniexit(margin="fallback", worst_case="seconds", scale_factor=True)
    policy.reprice(priced(volatile=True))
    policy.observe([Step(unit="segment:1-2", predicted_s=1.0, observed_s=3.0)], met=True)
    policy.scale.add(1.0, 2.0)

    assert [policy.decide(1, 0.0, 0.0, s) for s in (4.99, 5.01)] == [ANSWER, 2]


def test_a_decision_waits_for_nobody_and_learning_does_not_either() -> None:
    policy = uniexit(margin="conformal")
    with policy._lock:
        before = policy.needs
        policy.observe([Step(unit="head:0", predicted_s=0.5, observed_s=9.0)] * 30, met=True)

        assert policy.decide(1, 0.0, 0.0, 1.5) == 2
    assert policy.needs is before


@pytest.mark.parametrize("margin", ["none", "p95"])
def test_fixed_margins_learn_nothing(margin: str) -> None:
    policy = uniexit(margin=margin)
    before = policy.needs
    for _ in itertools.repeat(None, 30):
        slow_once(policy)

    assert policy.needs is before


def test_without_a_deadline_it_ends_at_the_last_exit() -> None:
    assert uniexit().decide(4, 0.0, 0.0, math.inf) == ANSWER
