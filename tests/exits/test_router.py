"""Decisions of the published table, on costs that are known exactly."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from edgewise.errors import ProfileError
from edgewise.exits import ANSWER, LATE, PolicyInputs, Publisher, RouterTable
from edgewise.exits.router import default_horizons_s, seed_margins
from edgewise.predict import CostTable, HorizonMargins
from edgewise.predict.state_costs import Regime, StateCosts

Segments = frozenset[tuple[int, int]]
NO_RUNS: Segments = frozenset()


def publish(
    costs: CostTable,
    *,
    accuracy: Sequence[float] | None = None,
    segments: Segments = NO_RUNS,
    units: Sequence[tuple[float, float]] = (),
    level: float = 0.9,
    floor_s: float | None = 0.0,
) -> RouterTable:
    """The table after some units, predicted and observed."""
    horizons_s = default_horizons_s(costs)
    margins = HorizonMargins(horizons_s, level=level)
    for predicted_s, observed_s in units:
        margins.add(predicted_s, observed_s)
    inputs = PolicyInputs(
        costs=costs, accuracy=None if accuracy is None else tuple(accuracy), segments=segments
    )
    return Publisher(inputs, horizons_s=horizons_s, floor_s=floor_s).publish(margins)


def walk(table: RouterTable, costs: CostTable, left_s: float) -> int:
    """The exit that a request ends at when every unit takes its median."""
    position = 0
    while True:
        action = table.decide(position, left_s)
        if action == LATE:
            action = table.soonest(position)
        if action in (ANSWER, LATE):
            return position - 1
        left_s -= costs.segment_s.get((position, action), sum(costs.stage_s[position:action]))
        position = action


# Whole numbers of seconds add up exactly, so that "just fits" means the same everywhere.
@st.composite
def cost_tables(draw: st.DrawFn) -> CostTable:
    num = draw(st.integers(1, 7))
    seconds = st.lists(st.integers(1, 30), min_size=num, max_size=num)
    return CostTable.from_costs(list(map(float, draw(seconds))), list(map(float, draw(seconds))))


def accuracies(num: int) -> st.SearchStrategy[list[float] | None]:
    shares = st.integers(0, 5).map(lambda v: v / 5)
    return st.none() | st.lists(shares, min_size=num, max_size=num)


def best_that_fits(
    costs: CostTable, accuracy: Sequence[float] | None, position: int, left_s: float
) -> int | None:
    """By brute force: of the exits here and ahead that fit, the best, then the earliest."""
    worth = range(costs.num_exits) if accuracy is None else accuracy
    fitting = [
        k
        for k in range(max(position - 1, 0), costs.num_exits)
        if sum(costs.stage_s[position : k + 1]) + costs.head_s[k] <= left_s
    ]
    return min(fitting, key=lambda k: (-worth[k], k), default=None)


@settings(deadline=None)  # the machine may be busy
@given(costs=cost_tables(), data=st.data(), left_s=st.integers(0, 300))
def test_each_decision_leads_to_the_best_exit_that_fits(
    costs: CostTable, data: st.DataObject, left_s: int
) -> None:
    accuracy = data.draw(accuracies(costs.num_exits))
    position = data.draw(st.integers(0, costs.num_exits))
    table = publish(costs, accuracy=accuracy)
    best = best_that_fits(costs, accuracy, position, left_s)

    action = table.decide(position, float(left_s))

    if best is None:
        assert action == LATE
    elif best == position - 1:
        assert action == ANSWER
    else:
        assert action == position + 1


@settings(deadline=None)  # the machine may be busy
@given(costs=cost_tables(), data=st.data(), budget_s=st.integers(1, 300))
def test_a_request_whose_units_take_what_was_predicted_ends_at_the_best_exit_that_fits(
    costs: CostTable, data: st.DataObject, budget_s: int
) -> None:
    accuracy = data.draw(accuracies(costs.num_exits))
    best = best_that_fits(costs, accuracy, 0, budget_s)
    assume(best is not None)

    assert walk(publish(costs, accuracy=accuracy), costs, budget_s) == best


@settings(deadline=None)  # the machine may be busy
@given(costs=cost_tables(), data=st.data(), position=st.integers(0, 7))
def test_when_nothing_fits_the_soonest_answer_is_taken(
    costs: CostTable, data: st.DataObject, position: int
) -> None:
    assume(position <= costs.num_exits)
    accuracy = data.draw(accuracies(costs.num_exits))
    table = publish(costs, accuracy=accuracy)
    here_s = costs.head_s[position - 1] if position else float("inf")
    ahead_s = [costs.remaining_s(position, k) for k in range(position, costs.num_exits)]

    soonest_ahead_s = min(ahead_s, default=float("inf"))
    assume(here_s != soonest_ahead_s)

    assert table.soonest(position) == (LATE if here_s < soonest_ahead_s else position + 1)


@settings(deadline=None)  # the machine may be busy
@given(costs=cost_tables(), data=st.data())
def test_more_budget_never_gives_a_worse_exit(costs: CostTable, data: st.DataObject) -> None:
    accuracy = data.draw(accuracies(costs.num_exits))
    table = publish(costs, accuracy=accuracy)
    worth = range(costs.num_exits) if accuracy is None else accuracy

    exits = [walk(table, costs, float(budget_s)) for budget_s in range(1, 300, 7)]

    assert all(worth[a] <= worth[b] for a, b in itertools.pairwise(exits))


def test_a_cheap_head_beyond_an_expensive_one_is_seen() -> None:
    costs = CostTable.from_costs([1, 1, 1], [1, 50, 1])
    table = publish(costs)

    # From exit 0 the next exit needs 51 s, the one after it only 3 s.
    assert table.decide(1, 3.0) == 2
    assert table.decide(1, 2.9) == ANSWER
    assert walk(table, costs, 4.0) == 2


def test_an_expensive_head_ahead_is_not_stepped_towards() -> None:
    costs = CostTable.from_costs([1, 1, 1], [1, 1, 50])

    assert walk(publish(costs), costs, 30.0) == 1


def test_an_exit_that_validation_says_is_no_better_is_passed_over() -> None:
    costs = CostTable.from_costs([1, 1, 1, 1], [1, 1, 1, 1])
    table = publish(costs, accuracy=[0.5, 0.5, 0.4, 0.9])

    assert walk(table, costs, 4.9) == 0
    assert walk(table, costs, 5.0) == 3


def test_the_head_here_is_checked_before_it_runs() -> None:
    costs = CostTable.from_costs([1, 1], [10, 1])
    table = publish(costs, accuracy=[0.9, 0.5])

    assert table.decide(1, 10.0) == ANSWER
    # It no longer fits; the next one is less accurate but answers in time.
    assert table.decide(1, 9.0) == 2
    # Neither fits; the next one is sooner.
    assert table.decide(1, 1.0) == LATE
    assert table.soonest(1) == 2


def test_when_even_the_last_head_does_not_fit_it_runs_and_is_late() -> None:
    table = publish(CostTable.from_costs([1, 1], [1, 5]))

    assert table.decide(2, 4.0) == LATE
    assert table.soonest(2) == LATE


def test_an_exit_that_is_worse_and_not_sooner_is_never_aimed_at() -> None:
    costs = CostTable.from_costs([1, 1, 1], [5, 1, 1])
    table = publish(costs, accuracy=[0.5, 0.7, 0.6])

    assert [target for _, target in table.ways[0]] == [2]


def test_margins_are_upper_quantiles_and_not_means() -> None:
    costs = CostTable.from_costs([1, 1], [1, 1])
    # One unit in fifty takes three times as long; the mean is 1.04.
    units = [(1.0, 3.0 if n % 50 == 7 else 1.0) for n in range(100)]

    need_s = {q: publish(costs, units=units, level=q).ways[1][-1][0] for q in (0.5, 0.9, 0.99)}

    assert need_s == {0.5: 1.0, 0.9: 1.0, 0.99: 3.0}


def test_what_a_request_pays_beside_its_units_is_part_of_every_bound() -> None:
    costs = CostTable.from_costs([1, 1], [1, 1])
    measured = CostTable(
        backend="null",
        stage_s=costs.stage_s,
        head_s=costs.head_s,
        segment_s=costs.segment_s,
        overhead_s=0.25,
    )

    assert publish(costs, floor_s=None).decide(0, 2.0) == LATE
    assert publish(costs, floor_s=None).decide(0, 2.00003) == 1
    assert publish(measured, floor_s=None).decide(0, 2.2) == LATE
    assert publish(measured, floor_s=None).decide(0, 2.25) == 1


RUNS: Segments = frozenset({(0, 1), (1, 2), (2, 3), (3, 4), (0, 2), (2, 4), (0, 4)})


def test_while_the_deadline_is_far_the_longest_run_is_taken() -> None:
    costs = CostTable.from_costs([1, 1, 1, 1], [1, 1, 1, 1])
    table = publish(costs, segments=RUNS)

    # Inside a run nothing can be decided, so it must fit with a quarter to spare.
    assert table.decide(0, 6.0) == 4
    assert table.decide(0, 5.9) == 2
    assert table.decide(0, 5.0) == 2
    assert table.decide(2, 3.4) == 3


def test_a_run_must_fit_under_the_worst_disturbance_lately_seen() -> None:
    costs = CostTable.from_costs([1, 1, 1, 1], [1, 1, 1, 1])
    units = [(1.0, 1.0)] * 400 + [(1.0, 9.0)]
    table = publish(costs, segments=RUNS, units=units)

    # Four stages under that disturbance take 12 s and the head 1 s: the margin is 1 s, the worst 9.
    assert table.decide(0, 12.0) < 4
    assert table.decide(0, 30.0) == 4


def test_a_run_never_passes_the_exit_aimed_at() -> None:
    costs = CostTable.from_costs([1, 1, 1, 1], [1, 1, 1, 100])

    assert publish(costs, segments=RUNS).decide(0, 50.0) == 2


@settings(deadline=None)  # the machine may be busy
@given(costs=cost_tables(), ratio=st.integers(1, 5), data=st.data())
def test_a_request_is_in_time_whenever_no_unit_exceeds_its_bound(
    costs: CostTable, ratio: int, data: st.DataObject
) -> None:
    num = costs.num_exits
    runs = frozenset((i, j) for i in range(num) for j in range(i + 1, num + 1))
    table = publish(costs, units=[(1.0, float(ratio))] * 50, segments=runs)
    # The exact ratio comes out of a quotient of sums.
    left_s = data.draw(st.integers(1, 600)) * (1 + 1e-9)
    assume(table.decide(0, left_s) != LATE)
    shares = st.integers(0, 10).map(lambda v: ratio * v / 10)

    position = 0
    while (action := table.decide(position, left_s)) > position:
        left_s -= data.draw(shares) * sum(costs.stage_s[position:action])
        position = action
    left_s -= data.draw(shares) * costs.head_s[position - 1]

    assert action == ANSWER
    assert left_s >= -1e-9 * 600


def test_a_profile_seeds_the_margins_with_its_own_residuals() -> None:
    costs = CostTable.from_costs([1.0], [1.0])
    margins = HorizonMargins([1.0])
    measured = CostTable(
        backend="null",
        stage_s=costs.stage_s,
        head_s=costs.head_s,
        segment_s=costs.segment_s,
        samples=costs.stage_s[:, None] * [[1.0, 4.0]],
        medians=costs.stage_s.repeat(2),
    )

    seed_margins(margins, measured)

    assert len(margins) == 2
    assert margins.ratios()[2].tolist() == [4.0]


@pytest.mark.parametrize(
    "stage_s", [[0.0], [0.0, 0.0], [1e-9], [1.0]], ids=["one free", "free", "tiny", "one"]
)
def test_horizons_ascend_even_where_stages_cost_nothing(stage_s: list[float]) -> None:
    horizons_s = default_horizons_s(CostTable.from_costs(stage_s, [0.0] * len(stage_s)))

    assert all(0 < a < b for a, b in itertools.pairwise(horizons_s))


def state_costs(
    table: CostTable, *, joules: Sequence[float] | None = None, regime: Regime = "steady"
) -> StateCosts:
    """The costs of a table, as if predicted for a state."""
    energy = None if joules is None else np.array(joules, dtype=float)
    return StateCosts(
        at_s=0.0,
        stage_s=table.stage_s,
        head_s=table.head_s,
        regime=regime,
        stage_j=energy,
        head_j=None if energy is None else np.zeros_like(energy),
    )


@settings(deadline=None)
@given(costs=cost_tables(), data=st.data())
def test_a_repriced_way_needs_what_the_new_costs_add_up_to(
    costs: CostTable, data: st.DataObject
) -> None:
    num = costs.num_exits
    seconds = st.lists(st.integers(1, 90), min_size=num, max_size=num)
    now = CostTable.from_costs(
        list(map(float, data.draw(seconds))), list(map(float, data.draw(seconds)))
    )
    horizons_s = default_horizons_s(costs)
    publisher = Publisher(PolicyInputs(costs=costs), horizons_s=horizons_s, floor_s=0.0)
    publisher.reprice(state_costs(now))
    table = publisher.publish(HorizonMargins(horizons_s))
    for position, ways in enumerate(table.ways):
        assert ways
        for need_s, target in ways:
            assert need_s == pytest.approx(now.remaining_s(position, target - 1))
    assert table.unit_costs.seconds["head:0"] == now.head_s[0]


def test_a_fused_run_is_repriced_in_proportion_to_its_stages() -> None:
    costs = CostTable.from_costs([2.0, 2.0, 4.0], [1.0, 1.0, 1.0], segment_s={(0, 2): 3.0})
    inputs = PolicyInputs(costs=costs, segments=frozenset({(0, 1), (1, 2), (2, 3), (0, 2)}))
    publisher = Publisher(inputs, horizons_s=[1.0], floor_s=0.0, min_stress=1.0)
    slower = CostTable.from_costs([4.0, 8.0, 4.0], [1.0, 2.0, 3.0])
    publisher.reprice(state_costs(slower))
    table = publisher.publish(HorizonMargins([1.0]))
    # Two stages went from 4 s to 12 s, so the run of 3 s takes 9 s; a head of 2 s follows it.
    assert table.unit_costs.seconds["segment:0-2"] == pytest.approx(9.0)
    ((need_s, stop),) = table.steps[0]
    assert need_s == pytest.approx(11.0)
    assert stop == 2
    assert table.unit_costs.seconds["segment:0-1"] == 4.0


def test_costs_of_another_model_are_refused() -> None:
    publisher = Publisher(
        PolicyInputs(costs=CostTable.from_costs([1.0, 1.0], [0.0, 0.0])), horizons_s=[1.0]
    )
    with pytest.raises(ProfileError, match="2 stages and heads, found 3"):
        publisher.reprice(state_costs(CostTable.from_costs([1.0] * 3, [0.0] * 3)))


@pytest.mark.parametrize(
    ("budget_j", "deepest"), [(0.5, 0), (1.0, 0), (2.9, 1), (3.0, 2), (99.0, 2)]
)
def test_no_way_needs_more_energy_than_the_budget_unless_none_needs_less(
    budget_j: float, deepest: int
) -> None:
    costs = CostTable.from_costs([1.0] * 3, [0.1] * 3)
    publisher = Publisher(
        PolicyInputs(costs=costs), horizons_s=[1.0], energy_budget_j=budget_j, floor_s=0.0
    )
    publisher.reprice(state_costs(costs, joules=[1.0, 1.0, 1.0]))
    table = publisher.publish(HorizonMargins([1.0]))
    assert walk(table, costs, left_s=100.0) == deepest
    assert walk(table, costs, left_s=1.2) == 0  # time still counts


def test_an_energy_budget_does_nothing_while_energy_is_not_predicted() -> None:
    costs = CostTable.from_costs([1.0] * 3, [0.1] * 3)
    publisher = Publisher(PolicyInputs(costs=costs), horizons_s=[1.0], energy_budget_j=0.5)
    publisher.reprice(state_costs(costs))
    assert walk(publisher.publish(HorizonMargins([1.0])), costs, left_s=100.0) == 2
