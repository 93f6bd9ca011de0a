from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from edgewise.bench.workload import Sent, compare, play_workload
from edgewise.clock import VirtualClock
from edgewise.device.accelerator import Accelerator
from edgewise.errors import ConfigError
from edgewise.placement.plan import Placement, make_placement
from edgewise.placement.simulate import simulate
from edgewise.placement.workload import Rate, Workload, WorkloadTenant
from edgewise.profiles.partition import PartitionProfile
from edgewise.report.workload import PlayedRequest
from edgewise.runtime.tenants.records import Done, PlanChange, QueueRule, TenantAnswer

TPU = Accelerator(
    name="tpu", sram_bytes=4_000_000, in_bytes_per_s=400e6, out_bytes_per_s=80e6, can_pin=True
)
FCFS = QueueRule(discipline="fcfs")


def make_profile(model: str) -> PartitionProfile:
    return PartitionProfile(
        model_id=model,
        cuts=("x", "a", "y"),
        depth_ratio=np.array([0, 0.5, 1]),
        prefix_bytes=np.array([0, 2e6, 3e6]),
        boundary_bytes=np.array([1e4, 1e4, 1e3]),
        accelerator_s=np.array([0, 2e-3, 4e-3]),
        cpu_s=np.array([[0.04], [0.01], [0]]),
    )


def make_workload(*rates: Rate, budget_s: float | None = 0.05) -> Workload:
    return Workload(
        name="shop",
        tenants=tuple(
            WorkloadTenant(
                name=name, model=None, profile=make_profile(name), rate=rate, budget_s=budget_s
            )
            for name, rate in zip(("door", "plate"), rates, strict=False)
        ),
        accelerator=TPU,
        cores=2,
        horizon_s=20,
    )


def make_plan(workload: Workload, places: Sequence[int], cores: Sequence[int]) -> Placement:
    return make_placement(workload.problem(), places, cores, method="test")


def change(number: int, plan: Placement, at_s: float) -> PlanChange:
    return PlanChange(number=number, placement=plan, began_s=at_s - 0.5, routed_s=at_s)


class FakeEngine:
    """Answers at once, after a time that a rule tells."""

    def __init__(self, plan: Placement, clock: VirtualClock, *, answer: Any = None) -> None:
        self.clock = clock
        self.changes: tuple[PlanChange, ...] = (change(0, plan, clock.now_s()),)
        self.answer: Any = answer or (lambda *_: {})
        self.inputs: list[tuple[str, float]] = []
        self.lag_s = 0.0

    def submit(
        self, tenant: str, x: Any, *, due_s: float | None = None, on_done: Done | None = None
    ) -> None:
        assert due_s is not None
        assert on_done is not None
        number = len(self.inputs)
        self.inputs.append((tenant, float(x)))
        self.clock.sleep_s(self.lag_s)
        told = {
            "outcome": "answered",
            "done_s": due_s + 0.01,
            "service_s": 0.004,
            "missed": False,
            "cpu_s": 0.005,
            **self.answer(tenant, number, due_s),
        }
        if told["outcome"] is not None:
            on_done(
                TenantAnswer(tenant=tenant, number=number, output=None, due_s=due_s, plan=0, **told)
            )

    def snapshot(self) -> str:
        return "snapshot"

    def drain(self, timeout_s: float) -> bool:
        return timeout_s > 0


POOLS = {"door": (np.array(1.0), np.array(2.0)), "plate": (np.array(3.0),)}


def play(workload: Workload, engine: FakeEngine, **more: Any) -> Any:
    return play_workload(workload, engine, POOLS, clock=engine.clock, queue=FCFS, **more)


def test_every_request_is_sent_when_due_and_counted_after_the_warm_up() -> None:
    workload = make_workload(Rate(kind="periodic", per_s=10), Rate(per_s=5))
    engine = FakeEngine(make_plan(workload, (1, 2), (1, 0)), VirtualClock(100.0))
    played = play(workload, engine)
    assert played.warm_up_s == 2
    assert len(played.requests) == len(engine.inputs)
    assert all(r.sent_s == pytest.approx(r.due_s, abs=1e-9) for r in played.requests)
    door, plate = played.tenants
    assert door.requests == 180
    assert door.rate_per_s == pytest.approx(10)
    assert door.observed.mean_s == pytest.approx(0.01)
    assert (door.observed.miss, door.observed.dsr) == (0, 1)
    assert door.observed.cpu_busy == pytest.approx(180 * 0.005 / 18)
    assert plate.observed.cpu_busy is None  # it has no suffix
    total = door.requests + plate.requests
    assert played.accelerator_busy[1] == pytest.approx(total * 0.004 / 18)
    assert [x for tenant, x in engine.inputs if tenant == "door"][:3] == [1, 2, 1]


def test_a_slow_engine_delays_what_is_sent_but_hides_no_latency() -> None:
    """Latency counts from the due instant, so a player that is held up shows it."""
    workload = make_workload(Rate(kind="periodic", per_s=10))
    engine = FakeEngine(make_plan(workload, (2,), (0,)), VirtualClock())
    engine.lag_s = 0.15  # longer than the period
    engine.answer = lambda *_: {"done_s": engine.clock.now_s()}
    played = play(workload, engine)
    assert played.late_p99_s > 5
    assert played.requests[-1].response_s > 5
    assert played.tenants[0].observed.dsr < 0.1


def test_outcomes_are_told_apart_and_count_against_the_budget() -> None:
    workload = make_workload(Rate(kind="periodic", per_s=10))
    ends = ("answered", "refused", "failed", "cancelled", None)
    engine = FakeEngine(make_plan(workload, (2,), (0,)), VirtualClock())
    engine.answer = lambda _tenant, number, _due: {"outcome": ends[number % 5]}
    played = play(workload, engine, warm_up_s=0)
    (door,) = played.tenants
    assert door.outcomes == dict.fromkeys(
        ("answered", "refused", "failed", "cancelled", "dropped"), 40
    )
    assert door.observed.dsr == pytest.approx(0.2)


def test_a_stop_ends_the_play_and_keeps_what_was_done() -> None:
    workload = make_workload(Rate(kind="periodic", per_s=10))
    stop = threading.Event()
    engine = FakeEngine(make_plan(workload, (2,), (0,)), VirtualClock())

    def answer(_tenant: str, number: int, _due: float) -> dict[str, Any]:
        if number == 80:
            stop.set()
        return {}

    engine.answer = answer
    played = play(workload, engine, stop=stop)
    assert len(played.requests) == 81
    assert played.stopped.startswith("after 8")
    assert played.tenants[0].rate_per_s == pytest.approx(10, rel=0.05)


def test_an_error_of_submit_reaches_the_caller() -> None:
    workload = make_workload(Rate(per_s=10))
    engine = FakeEngine(make_plan(workload, (2,), (0,)), VirtualClock())

    def answer(*_: Any) -> dict[str, Any]:
        raise ConfigError("unknown tenant")

    engine.answer = answer
    with pytest.raises(ConfigError, match="unknown tenant"):
        play(workload, engine)


def sent_of(workload: Workload, plan: Placement, *, seed: int = 0) -> Sent:
    """What our event simulator says would be observed."""
    found = simulate(
        workload.problem(), plan.places, plan.cores, horizon_s=1500, seed=seed, warm_up_ratio=0
    )
    requests = [
        PlayedRequest(
            tenant=t.tenant,
            due_s=due_s,
            sent_s=due_s,
            done_s=due_s + response_s,
            outcome="answered",
            met=response_s <= 0.05,
            plan=0,
            service_s=service_s,
            missed=bool(missed),
            cpu_s=cpu_s or None,
        )
        for t in found.tenants
        for due_s, response_s, service_s, missed, cpu_s in zip(
            t.arrival_s.tolist(),
            t.response_s.tolist(),
            t.accelerator_s.tolist(),
            t.missed.tolist(),
            t.cpu_s.tolist(),
            strict=True,
        )
    ]
    requests.sort(key=lambda r: r.due_s)
    return Sent(requests=tuple(requests), origin_s=0.0, end_s=1500.0, drained=True)


def test_predictions_meet_what_the_event_simulator_observes() -> None:
    workload = make_workload(Rate(per_s=20), Rate(per_s=10))
    plan = make_plan(workload, (1, 2), (2, 0))
    played = compare(
        workload,
        sent_of(workload, plan),
        (change(0, plan, 0.0),),
        duration_s=1500,
        warm_up_s=10,
        queue=FCFS,
    )
    for tenant in played.tenants:
        said, seen = tenant.predicted, tenant.observed
        assert said.mean_s == pytest.approx(seen.mean_s, rel=0.03)
        assert said.p95_s == pytest.approx(seen.p95_s, rel=0.2)
        assert said.miss == pytest.approx(seen.miss, rel=0.05)
        assert said.dsr == pytest.approx(seen.dsr, abs=0.02)
        assert said.cpu_busy is None or said.cpu_busy == pytest.approx(seen.cpu_busy, rel=0.05)
    said_busy, seen_busy = played.accelerator_busy
    assert said_busy == pytest.approx(seen_busy, rel=0.03)


def test_each_stretch_is_predicted_with_its_own_rates_and_plan() -> None:
    rates = Rate(kind="stepped", steps=((0, 5), (10, 20)))
    workload = make_workload(rates)
    on_cpu, on_device = (make_plan(workload, (p,), (2 - p,)) for p in (0, 2))
    engine = FakeEngine(on_cpu, VirtualClock())
    engine.changes = (change(0, on_cpu, 0.0), change(1, on_device, 10.0))
    played = play(workload, engine, warm_up_s=0)
    (door,) = played.tenants
    first, second = (
        make_placement(workload.problem(rates_per_s=[rate]), plan.places, plan.cores, method="")
        for rate, plan in ((5, on_cpu), (20, on_device))
    )
    counts = [
        sum(r.due_s < 10 for r in played.requests),
        sum(r.due_s >= 10 for r in played.requests),
    ]
    means = [p.predicted[0].response_s for p in (first, second)]
    expected = np.average(means, weights=counts)
    assert door.predicted.mean_s == pytest.approx(expected)
    assert played.accelerator_busy[0] == pytest.approx(second.accelerator_busy / 2)
    assert [p.warm_s for p in played.plans] == [0.5, 0.5]


def test_a_switch_aware_queue_is_predicted_by_simulation_of_that_queue() -> None:
    workload = make_workload(Rate(per_s=40), Rate(per_s=40))
    plan = make_plan(workload, (2, 2), (0, 0))
    sent = Sent(
        requests=(
            PlayedRequest(
                tenant="door", due_s=1, sent_s=1, done_s=2, outcome="answered", met=False, plan=0
            ),
        ),
        origin_s=0.0,
        end_s=20.0,
        drained=False,
    )
    changes = (change(0, plan, 0.0),)
    fcfs, aware = (
        compare(workload, sent, changes, duration_s=20, warm_up_s=0, queue=q)
        for q in (FCFS, QueueRule())
    )
    mean_fcfs, mean_aware = (p.tenants[0].predicted.mean_s for p in (fcfs, aware))
    assert mean_fcfs is not None
    assert mean_aware is not None
    assert mean_aware < 0.8 * mean_fcfs
    assert "simulation" in aware.forecast
    assert aware.notes  # not drained


def test_an_unstable_plan_is_said_to_be_so() -> None:
    workload = make_workload(Rate(per_s=100))
    engine = FakeEngine(make_plan(workload, (0,), (2,)), VirtualClock())
    played = play(workload, engine)
    assert played.tenants[0].predicted.mean_s == np.inf
    assert any("unstable" in note for note in played.notes)


def test_a_play_without_a_request_has_unknown_figures() -> None:
    workload = make_workload(Rate(kind="trace", instants_s=(50.0,)))
    played = play(workload, FakeEngine(make_plan(workload, (2,), (0,)), VirtualClock()))
    (door,) = played.tenants
    assert door.requests == 0
    assert door.observed.mean_s is None
    assert door.predicted.mean_s is None
    assert played.mean_s == (None, None)
