"""Planning anew: only where it pays, never back and forth, and never into something worse."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from edgewise.clock import VirtualClock
from edgewise.errors import ConfigError, Infeasible
from edgewise.runtime.tenants.records import PlanChange
from edgewise.runtime.tenants.replanner import Replanner, SwitchingCost


class Scene:
    """A bench on a virtual clock whose search finds what the test says."""

    def __init__(self, make_bench: Any, places: tuple[int, ...] = (0,), **options: Any) -> None:
        self.bench = make_bench("a")
        self.clock = VirtualClock()
        self.engine = self.bench.engine(list(places), clock=self.clock)
        self.wanted: Any = list(places)
        self.asked: list[float] = []
        self.cores = 2
        self.replanner = Replanner(
            self.engine, self.bench.problem(), plan=self.search, **{"hold_s": 5.0, **options}
        )

    def search(self, problem: Any, *, method: str) -> Any:  # noqa: ARG002
        self.asked.append(problem.tenants[0].rate_per_s)
        if isinstance(self.wanted, Exception):
            raise self.wanted
        from edgewise.placement.plan import make_placement

        cores = [0 if p == 3 and problem.accelerator else self.cores for p in self.wanted]
        places = self.wanted if problem.accelerator else [0]
        return make_placement(problem, places, cores, method="test")

    def arrive(self, rate_per_s: float, for_s: float, *, answered: bool = False) -> None:
        """Arrivals at equal distances; those that need no answer are refused, and still count."""
        stop_s = self.clock.now_s() + for_s
        while self.clock.now_s() < stop_s:
            deadline_s = None if answered else 1e-9
            self.engine.submit("a", self.bench.x(), deadline_s=deadline_s).result(10)
            self.clock.sleep_s(1 / rate_per_s)

    def step(self) -> Any:
        return self.replanner.step()


def test_nothing_is_searched_while_rates_stay(make_bench: Any) -> None:
    scene = Scene(make_bench)
    scene.arrive(20, 10)

    assert scene.step() is None
    assert not scene.asked


def test_a_changed_rate_moves_the_plan_where_that_pays(make_bench: Any) -> None:
    scene = Scene(make_bench)
    scene.arrive(20, 10)
    scene.wanted = [3]
    scene.arrive(100, 5)
    decision = scene.step()

    assert decision.moved
    assert scene.engine.placement.places == (3,)
    assert scene.asked[0] == pytest.approx(100, rel=0.2)
    assert decision.gain_s > decision.cost_s
    assert decision.best_s < decision.present_s
    assert decision.decision_s >= 0
    assert "predicted" in scene.engine.changes[-1].reason
    assert scene.step() is None  # planned for: nothing more to do


def test_a_small_gain_is_not_worth_a_move(make_bench: Any) -> None:
    scene = Scene(make_bench, least_gain_ratio=0.99)
    scene.wanted = [3]
    scene.arrive(100, 10)
    decision = scene.step()

    assert not decision.moved
    assert "the gain is" in decision.reason
    assert scene.engine.placement.places == (0,)


def test_a_dear_switch_is_not_made(make_bench: Any) -> None:
    scene = Scene(make_bench, first_cost_s=1e6)
    scene.wanted = [3]
    scene.arrive(100, 10)

    assert "request-seconds and costs 1e+06" in scene.step().reason


def test_the_present_plan_is_kept_where_it_is_the_best(make_bench: Any) -> None:
    scene = Scene(make_bench)
    scene.wanted = [0]
    scene.cores = 1
    scene.arrive(100, 10)

    assert scene.step().reason == "kept: the present plan is the best one"


def test_an_infeasible_search_keeps_the_plan_and_says_so(make_bench: Any) -> None:
    scene = Scene(make_bench)
    scene.wanted = Infeasible("no plan is stable at 9000 per second")
    scene.arrive(100, 10)
    decision = scene.step()

    assert not decision.moved
    assert decision.placement is None
    assert "no plan is stable" in decision.reason


def test_an_unstable_plan_is_not_taken(make_bench: Any) -> None:
    scene = Scene(make_bench, places=(3,))
    scene.wanted = [0]
    scene.arrive(900, 2)
    decision = scene.step()

    assert decision.reason == "kept: the best plan found is unstable"


def test_a_plan_that_fails_to_load_is_not_tried_again_at_once(make_bench: Any) -> None:
    scene = Scene(make_bench)
    scene.bench.world.refuse.add("a:0-3")
    scene.wanted = [3]
    scene.arrive(100, 10)
    first = scene.step()
    scene.arrive(160, 5)
    second = scene.step()

    assert "the new plan failed: tenant 'a' cannot run as planned" in first.reason
    assert second.reason == "kept: that plan failed to load a moment ago"
    assert scene.engine.placement.places == (0,)
    scene.bench.world.refuse.clear()


def test_plans_do_not_flap_with_the_rates(make_bench: Any) -> None:
    scene = Scene(make_bench, first_cost_s=0.4, hold_s=1.0)
    moves = []
    for k in range(12):
        scene.wanted = [3 if k % 2 == 0 else 2]
        scene.arrive(100 if k % 2 == 0 else 20, 3)
        decision = scene.step()
        moves.append(decision is not None and decision.moved)

    assert moves[0]
    assert sum(moves[-4:]) == 0  # each return to a plan just left costs twice as much


def test_a_second_change_waits_for_the_hold(make_bench: Any) -> None:
    scene = Scene(make_bench, hold_s=8.0)
    scene.wanted = [2]
    scene.arrive(100, 10)
    assert scene.step().moved
    scene.wanted = [3]
    scene.arrive(200, 2)
    held = scene.step()
    scene.arrive(200, 8)
    later = scene.step()

    assert "too recent" in held.reason
    assert later.moved


def test_a_lost_device_is_planned_without_and_with_it_again(make_bench: Any, until: Any) -> None:
    scene = Scene(make_bench, places=(3,))
    scene.arrive(20, 3)
    scene.bench.device.refuses_restart = True
    scene.bench.device.lost = "gone"
    scene.engine.submit("a", scene.bench.x()).result(10)
    until(lambda: scene.engine.placement.places == (0,))
    decision = scene.step()

    assert decision is not None
    assert decision.placement.places == (0,)
    scene.bench.device.refuses_restart = False
    until(lambda: not scene.engine.lost)
    assert scene.step() is not None


def test_its_thread_steps_and_stops(make_bench: Any, until: Any) -> None:
    scene = Scene(make_bench, period_s=0.005)
    scene.wanted = [3]
    scene.arrive(100, 10)
    with scene.replanner:
        until(lambda: scene.engine.placement.places == (3,))

    assert any(d.moved for d in scene.replanner.decisions)


def test_the_cost_of_switching_follows_what_past_changes_did(make_bench: Any) -> None:
    scene = Scene(make_bench)
    cost = SwitchingCost(1.0)

    class Seen:
        clock = scene.clock

        @staticmethod
        def responses(start_s: float, stop_s: float) -> Any:  # noqa: ARG004
            if start_s < 10:
                return np.full(50, 0.010)
            return np.array([0.010] * 40 + [0.060] * 10)

    change = PlanChange(
        number=1,
        placement=scene.engine.placement,
        began_s=10.0,
        routed_s=10.4,
        drained_s=10.5,
    )
    cost.learn(Seen(), change)  # type: ignore[arg-type]

    assert cost.harm_s == pytest.approx(10 * 0.050)
    assert cost.warming_s == pytest.approx(0.4)
    cost.learn(Seen(), change)  # type: ignore[arg-type]
    assert cost.seen == 2


def test_changes_that_were_drained_are_learned_once(make_bench: Any) -> None:
    scene = Scene(make_bench, hold_s=0.0)
    scene.wanted = [3]
    scene.arrive(100, 2)
    scene.arrive(100, 0.5, answered=True)
    scene.step()
    scene.arrive(100, 0.6, answered=True)
    scene.step()
    scene.step()

    assert scene.replanner.cost.seen == 1
    assert math.isfinite(scene.replanner.cost.harm_s)


def test_knobs_out_of_range_are_refused(make_bench: Any) -> None:
    for options in ({"period_s": 0}, {"horizon_s": 0}, {"hold_s": -1}, {"drift_ratio": 1.0}):
        with pytest.raises(ConfigError, match="expected a period"):
            Scene(make_bench, **options)
