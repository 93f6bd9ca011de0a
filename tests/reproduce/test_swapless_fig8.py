from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgewise.bench.placement_runs import Play
from edgewise.report.workload import PlayedRequest
from edgewise.reproduce import swapless_fig8 as claim
from edgewise.reproduce.registry import Reproduction, Setup, run_claim


@pytest.fixture(name="found", scope="module")
def run_quickly(small_zoo: Path) -> Reproduction:
    assert small_zoo.is_dir()
    return run_claim("swapless-fig8", Setup(quick=True, limit=150))


def test_all_quick_policies_meet_the_same_requests_and_lose_none(found: Reproduction) -> None:
    assert list(found.details) == ["edgewise", "swapless", "compiler"]
    counts = {f.unit for f in found.figures if "without an answer" in f.name}
    assert len(counts) == 1
    assert all(each["lost"] == 0 for each in found.details.values())
    assert found.verdicts[-1].holds is True


def test_each_policys_plans_are_told_with_their_instants(found: Reproduction) -> None:
    for each in found.details.values():
        assert each["plans"][0].startswith("0.0 s ")
    assert len(found.details["compiler"]["plans"]) == 1
    assert len(found.details["compiler"]["phases"]) == 3


def test_the_constant_rate_loads_the_accelerator_as_said(small_zoo: Path) -> None:
    from edgewise.bench.placement_runs import tenants_of
    from edgewise.placement.plan import make_placement
    from edgewise.placement.problem import Problem
    from edgewise.reproduce import _placement as common

    assert small_zoo.is_dir()
    scene = claim._scene(Setup(quick=True, limit=30))
    problem = Problem.of(tenants_of(scene.models, scene.rates[-1]), common.device(), cores=1)
    plan = make_placement(problem, problem.last.tolist(), [0, 0], method="test")
    assert plan.accelerator_busy == pytest.approx(claim._BUSY, rel=1e-3)
    assert [rates[1] for rates in scene.rates] == [5.0, 15.0, 25.0]


def request(due_s: float, took_s: float, **more: Any) -> PlayedRequest:
    values = {"tenant": "a", "outcome": "answered", "met": None, "plan": 0, **more}
    return PlayedRequest(due_s=due_s, sent_s=due_s, done_s=due_s + took_s, **values)


def outcome(*requests: PlayedRequest, changes: tuple[Any, ...] = ()) -> claim._Outcome:
    first = SimpleNamespace(began_s=100.0, routed_s=100.0, drained_s=None)
    seen = Play(
        requests=requests,
        changes=(first, *changes),  # type: ignore[arg-type]
        origin_s=100.0,
        duration_s=6.0,
        late_p99_s=0.0,
        overruns=0,
        calls=0,
        other_ratio=0.0,
        steal_ratio=0.0,
    )
    return claim._Outcome(name="x", play=seen, phase_s=2.0, phases=3)


def test_means_are_by_the_phase_in_which_a_request_was_due() -> None:
    found = outcome(
        request(0.5, 0.1), request(1.9, 0.3), request(2.1, 0.5), request(2.2, 9.0, outcome="failed")
    )
    assert found.mean_s(0) == pytest.approx(0.2)
    assert found.mean_s(1) == pytest.approx(0.5)
    assert found.mean_s() == pytest.approx(0.3)
    assert found.mean_s(0, "b") != found.mean_s(0, "b")  # NaN: nobody asked
    assert found.play.lost == 1


def test_requests_under_way_during_a_change_of_plan_are_told_apart() -> None:
    change = SimpleNamespace(began_s=102.0, routed_s=102.2, drained_s=102.4)
    found = outcome(
        request(1.95, 0.1),  # was under way when warming began
        request(2.8, 0.2),  # came within half a second of its end
        request(0.5, 0.01),
        request(3.5, 0.02),
        changes=(change,),
    )
    assert found.changes_s == [pytest.approx((2.0, 2.4))]
    near_s, far_s = found.p99_s()
    assert near_s == pytest.approx(0.2, rel=0.02)
    assert far_s == pytest.approx(0.02, rel=0.02)


def test_a_rival_with_the_lower_mean_refutes_the_claim_on_a_quiet_machine() -> None:
    slow, quick = outcome(request(0.5, 0.3)), outcome(request(0.5, 0.1))
    outcomes = {"edgewise": slow, "compiler": quick}
    by_claim = {v.claim: v for v in claim._verdicts(Setup(), outcomes)}
    assert by_claim["edgewise has the lowest mean over all"].holds is False
    assert by_claim["plans follow the rates"].holds is False
    assert by_claim["no request fails or is lost under any policy"].holds is True
