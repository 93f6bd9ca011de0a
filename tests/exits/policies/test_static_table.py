from __future__ import annotations

from edgewise.exits import ANSWER, Policy, PolicyInputs, make_policy
from edgewise.predict import CostTable

COSTS = CostTable.from_costs([1.0] * 4, [0.5] * 4)
RUNS = frozenset({(0, 4), (0, 2), (2, 4)} | {(k, k + 1) for k in range(4)})


def table(*, scaled: bool, accuracy: tuple[float, ...] | None = None) -> Policy:
    inputs = PolicyInputs(costs=COSTS, accuracy=accuracy, segments=RUNS)
    return make_policy("static_table", inputs, scale_factor=scaled)


def walk(policy: Policy, budget_s: float, *, stage_s: float, start_s: float = 0.0) -> list[int]:
    """Positions of a request whose stages each take that long."""
    position, now_s, way = 0, start_s, []
    while (action := policy.decide(position, now_s, start_s, start_s + budget_s)) > position:
        now_s += stage_s * (action - position)
        position = action
        way.append(position)
    assert action == ANSWER
    return way


def test_the_plan_is_made_once_and_runs_fused() -> None:
    assert walk(table(scaled=False), 4.5, stage_s=1.0) == [4]
    assert walk(table(scaled=False), 3.5, stage_s=1.0) == [2, 3]
    assert walk(table(scaled=False), 0.1, stage_s=1.0) == [1]


def test_without_the_scale_factor_a_slow_machine_changes_nothing() -> None:
    assert walk(table(scaled=False), 3.5, stage_s=9.0) == [2, 3]


def test_with_the_scale_factor_a_slow_machine_is_noticed_at_the_first_exit() -> None:
    assert walk(table(scaled=True), 4.5, stage_s=1.0) == [1, 2, 3, 4]
    # After 2 s for the first stage the rest is expected at twice the table: 1.5 s each way.
    assert walk(table(scaled=True), 4.5, stage_s=2.0) == [1]
    assert walk(table(scaled=True), 5.0, stage_s=2.0) == [1, 2]


def test_with_the_scale_factor_a_fast_machine_goes_deeper() -> None:
    assert walk(table(scaled=True), 2.5, stage_s=0.5) == [1, 2, 3, 4]


def test_waiting_before_the_start_does_not_look_like_a_slow_machine() -> None:
    early = walk(table(scaled=True), 4.5, stage_s=1.0)
    late = walk(table(scaled=True), 4.5, stage_s=1.0, start_s=100.0)

    assert early == late


def test_exits_that_validation_says_are_no_better_are_passed_over() -> None:
    policy = table(scaled=False, accuracy=(0.6, 0.5, 0.6, 0.9))

    assert walk(policy, 4.4, stage_s=1.0) == [1]
    assert walk(policy, 4.5, stage_s=1.0) == [4]


def test_a_budget_below_the_first_exit_takes_the_soonest() -> None:
    costs = CostTable.from_costs([1.0, 1.0], [9.0, 0.5])
    policy = make_policy("static_table", PolicyInputs(costs=costs))

    assert walk(policy, 0.1, stage_s=1.0) == [1, 2]


def test_the_two_forms_have_names_of_their_own() -> None:
    assert table(scaled=False).name == "static_table"
    assert table(scaled=True).name == "static_table_scaled"
