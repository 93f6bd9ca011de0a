from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgewise.bench.arrivals import instants_s, schedule
from edgewise.placement.workload import Rate, Workload, WorkloadTenant
from edgewise.profiles.partition import PartitionProfile

KINDS = [
    Rate(per_s=50),
    Rate(kind="periodic", per_s=50),
    Rate(kind="periodic", per_s=50, jitter_ratio=0.5),
    Rate(kind="stepped", steps=((0, 100), (10, 0), (30, 50))),
    Rate(kind="trace", instants_s=tuple(np.arange(1, 2001) / 50)),
]


def draw(rate: Rate, seed: int = 0, duration_s: float = 60) -> np.ndarray:
    return instants_s(rate, duration_s=duration_s, rng=np.random.default_rng(seed))


@pytest.mark.parametrize("rate", KINDS, ids=lambda r: r.kind)
def test_instants_rise_and_stay_within_the_time(rate: Rate) -> None:
    found = draw(rate)
    assert (np.diff(found) >= 0).all()
    assert found[0] >= 0
    assert found[-1] < 60


@pytest.mark.parametrize("rate", KINDS[:3], ids=lambda r: f"{r.kind} {r.jitter_ratio}")
def test_rate_and_burstiness_are_what_the_planner_is_told(rate: Rate) -> None:
    found = draw(rate, duration_s=2000)
    gaps = np.diff(found)
    assert len(found) / 2000 == pytest.approx(rate.at_s(0), rel=0.01)
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(rate.arrival_cv2, rel=0.02, abs=1e-9)


def test_each_step_has_its_rate() -> None:
    counts = np.histogram(draw(KINDS[3]), bins=[0, 10, 30, 60])[0]
    assert counts[1] == 0
    assert counts[[0, 2]] == pytest.approx([1000, 1500], rel=0.1)


def test_steps_beyond_the_end_are_not_played() -> None:
    assert draw(KINDS[3], duration_s=5).max() < 5


def test_a_trace_is_played_once() -> None:
    assert len(draw(KINDS[4], duration_s=1e4)) == 2000


def workload(*rates: Rate, seed: int = 3) -> Workload:
    profile = PartitionProfile(
        model_id="m",
        cuts=("x", "y"),
        depth_ratio=np.array([0, 1]),
        prefix_bytes=np.array([0, 1]),
        boundary_bytes=np.array([1, 1]),
        accelerator_s=np.array([0, 1]),
        cpu_s=np.array([[1], [0]]),
    )
    tenants = tuple(
        WorkloadTenant(name=f"t{n}", model=Path("m.onnx"), profile=profile, rate=rate)
        for n, rate in enumerate(rates)
    )
    return Workload(name="w", tenants=tenants, accelerator=None, cores=1, horizon_s=20, seed=seed)


def test_a_schedule_is_all_tenants_in_order_and_repeats() -> None:
    found, again = schedule(workload(*KINDS)), schedule(workload(*KINDS))
    assert (np.diff(found.due_s) >= 0).all()
    assert found.due_s.max() < 20
    np.testing.assert_array_equal(found.due_s, again.due_s)
    assert set(found.tenant) == {0, 1, 2, 3, 4}
    assert found.of(4)[0] == 0.02
    other = schedule(workload(*KINDS, seed=4))
    assert not np.array_equal(found.of(0), other.of(0))


def test_another_tenant_changes_nobodys_instants() -> None:
    alone, together = schedule(workload(KINDS[0])), schedule(workload(*KINDS))
    np.testing.assert_array_equal(alone.of(0), together.of(0))
