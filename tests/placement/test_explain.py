from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgewise.device.accelerator import load_accelerator
from edgewise.errors import ConfigError
from edgewise.placement.explain import crossover, explain, rate_curve, score_text
from edgewise.placement.plan import make_placement
from edgewise.placement.problem import Problem, Tenant
from edgewise.placement.search import plan, propose, search
from edgewise.placement.study import random_mixes
from edgewise.profiles.partition import PartitionProfile

CORAL = load_accelerator("coral-usb")


@pytest.fixture(scope="module")
def problem() -> Problem:
    return random_mixes(9, CORAL, seed=3)[8]


def test_a_plan_is_held_against_places_methods_and_hardware(problem: Problem) -> None:
    placement = plan(problem)

    found = explain(problem, placement)

    assert [r.tenant for r in found.tenants] == [t.name for t in problem.tenants]
    for i, reason in enumerate(found.tenants):
        assert reason.next_place != placement.places[i]
        assert reason.more_ratio is None or reason.more_ratio >= -1e-9
    methods = {a.method: a for a in found.alternatives}
    assert methods["compiler"].score == propose(problem, "compiler").score
    assert "the accelerator would be" in str(methods["compiler"].why_not)
    assert methods["greedy"].more_ratio == pytest.approx(
        propose(problem, "greedy").score / placement.score - 1
    )
    assert "first step" in str(methods["published"].why_not)
    assert found.binds == "memory"
    assert found.limits[0].less_ratio >= found.limits[1].less_ratio >= 0


def test_the_next_best_place_is_what_trying_all_gives() -> None:
    problem = random_mixes(1, CORAL, seed=3)[0]
    placement = plan(problem, "exact")
    other = placement.places[0]

    reason = explain(problem, placement, methods=()).tenants[1]

    scores = {
        p: min(
            make_placement(problem, [other, p], cores, method="hand").score
            for cores in ((0, 4), (1, 3), (2, 2), (3, 1), (4, 0))
        )
        for p in range(11)
        if p != placement.places[1]
    }
    assert reason.next_place == min(scores, key=lambda p: scores[p])
    assert reason.next_score == pytest.approx(min(scores.values()))


def test_without_an_accelerator_there_is_no_other_place(problem: Problem) -> None:
    alone = Problem.of([replace(problem.tenants[0], rate_per_s=0.5)], None, cores=1)

    found = explain(alone, plan(alone))

    assert found.tenants[0].next_place is None
    assert "there is no accelerator" in found.tenants[0].text
    assert found.binds == "cores"


def test_places_of_equal_worth_are_called_a_tie() -> None:
    tenant = Tenant(name="a", profile=two_cuts(slow_start=True, twice=True), rate_per_s=1.0)
    problem = Problem.of([tenant], CORAL, cores=2)

    [reason] = explain(problem, plan(problem), methods=()).tenants

    assert reason.tie
    assert reason.text.endswith("is as good")


def two_cuts(*, slow_start: bool = False, twice: bool = False) -> PartitionProfile:
    """Place 1 leaves the CPU work that is faster there at low rates; place 2 leaves nothing."""
    middle = [[0.1, 9e6, 2e4, 4e-3, 6e-3]] * (2 if twice else 1)
    rows = np.array(
        [[0.0, 0.0, 1e5, 0.0, 1.0 if slow_start else 0.1], *middle, [1.0, 12e6, 1e3, 12e-3, 0.0]]
    )
    return PartitionProfile(
        model_id="two-cuts",
        cuts=tuple(f"c{p}" for p in range(len(rows))),
        depth_ratio=rows[:, 0],
        prefix_bytes=rows[:, 1],
        boundary_bytes=rows[:, 2],
        accelerator_s=rows[:, 3],
        cpu_s=rows[:, 4:],
    )


def test_a_higher_rate_moves_work_to_the_cpu_as_in_the_paper() -> None:
    # Alone the last layer is a little faster on the accelerator; under load two stations share it.
    rows = np.array(
        [[0.0, 0.0, 1e5, 0.0, 0.4], [0.7, 7e6, 2e4, 60e-3, 70e-3], [1.0, 24e6, 1e3, 85e-3, 0.0]]
    )
    profile = PartitionProfile(
        model_id="large",
        cuts=("input", "middle", "output"),
        depth_ratio=rows[:, 0],
        prefix_bytes=rows[:, 1],
        boundary_bytes=rows[:, 2],
        accelerator_s=rows[:, 3],
        cpu_s=rows[:, 4:],
    )
    problem = Problem.of([Tenant(name="a", profile=profile, rate_per_s=1.0)], CORAL, cores=1)
    rates = np.linspace(0.2, 8.0, 14)

    curve = rate_curve(problem, "a", rates)
    [change] = crossover(problem, "a", rates)

    assert (change.before, change.after) == (2, 1)
    for factor, place in ((0.99, 2), (1.01, 1)):
        at = problem.with_rates([change.rate_per_s * factor])
        assert search(at, "exact").places == (place,)
    assert curve.score.shape == (14, 3)
    assert curve.best.tolist() == curve.score.argmin(axis=1).tolist()
    assert np.isinf(curve.score[-1, 0])
    assert (np.diff(curve.score[:, 2]) > 0).all()


def test_the_other_tenants_stay_while_one_rate_changes(problem: Problem) -> None:
    curve = rate_curve(problem, "t0", [5.0, 10.0], places=[0, 10, 10, 10])

    at = problem.with_rates([5.0, *problem.rates[1:]])
    score = make_placement(at, [10, 10, 10, 10], [0] * 4, method="hand").score
    assert curve.score[0, 10] == pytest.approx(score)


def test_a_curve_needs_a_known_tenant_and_rising_rates(problem: Problem) -> None:
    with pytest.raises(ConfigError, match="no tenant is called 'tO'"):
        rate_curve(problem, "tO", [1.0, 2.0])
    for rates in ([1.0], [2.0, 1.0], [0.0, 1.0]):
        with pytest.raises(ConfigError, match="rates that rise"):
            crossover(problem, "t0", rates)


@pytest.mark.parametrize(
    ("objective", "score", "text"),
    [
        ("p99", 0.2, "200 ms"),
        ("deadline-miss", 0.05, "5 % late"),
        ("max-min", 1.5, "1.5 of the ideal"),
        ("mean", np.inf, "no end of waiting"),
    ],
)
def test_a_score_has_its_unit(objective: str, score: float, text: str) -> None:
    assert score_text(objective, score) == text
