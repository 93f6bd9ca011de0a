"""The simulator against closed forms, against Ciw, and against rules that can be checked by eye."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from edgewise.device.accelerator import Accelerator, CachePolicy
from edgewise.errors import ConfigError, ShapeError
from edgewise.placement.problem import Assumptions, Problem, Tenant
from edgewise.placement.queueing import mmk_wait_s
from edgewise.placement.simulate import (
    QueueOrder,
    periodic_arrivals,
    poisson_arrivals,
    simulate,
    stepped_arrivals,
)
from edgewise.profiles.partition import PartitionProfile

SWITCH_AWARE = QueueOrder(discipline="switch-aware", burst=4)


def make_problem(
    rates: Sequence[float],
    *,
    accelerator_s: Sequence[float],
    megabytes: Sequence[float],
    cpu_s: float = 0.04,
    cpu_cv2: float = 0.0,
    cores: int = 8,
    policy: CachePolicy = "token",
    priorities: Sequence[int] = (),
) -> Problem:
    """Tenants with the places 0 (all on the CPU), 1 (half) and 2 (all on the accelerator)."""
    device = Accelerator(
        name="test",
        sram_bytes=8_000_000,
        in_bytes_per_s=1e9,
        out_bytes_per_s=1e12,
        cache_policy=policy,
        can_pin=True,
    )
    tenants = []
    for i, (rate, time, size) in enumerate(zip(rates, accelerator_s, megabytes, strict=True)):
        profile = PartitionProfile(
            model_id=f"model{i}",
            cuts=("in", "half", "out"),
            depth_ratio=np.array([0, 0.5, 1]),
            prefix_bytes=np.array([0, size * 1e6, size * 1e6]),
            boundary_bytes=np.zeros(3),
            accelerator_s=np.array([0, time, time]),
            cpu_s=np.array([[2 * cpu_s], [cpu_s], [0]]),
            cpu_cv2=np.full(3, cpu_cv2),
        )
        priority = priorities[i] if priorities else 16
        tenants.append(
            Tenant(name=f"tenant{i}", profile=profile, rate_per_s=rate, priority=priority)
        )
    return Problem.of(
        tenants,
        device,
        cores=cores,
        residency="pinned" if policy == "pinned" else "switch",
        assumptions=Assumptions(cpu="workers"),
    )


def test_one_tenant_on_the_accelerator_is_m_d_1() -> None:
    problem = make_problem([60.0], accelerator_s=[0.01], megabytes=[4])

    found = simulate(problem, [2], [0], requests=400_000, seed=1)

    wait = 60 * 0.01**2 / 2 / (1 - 0.6)
    assert found.accelerator_busy == pytest.approx(0.6, rel=0.01)
    assert found.tenants[0].accelerator_wait_s.mean() == pytest.approx(wait, rel=0.02)
    assert found.mean_s == pytest.approx(wait + 0.01, abs=3 * found.half_width_s)
    assert found.tenants[0].miss == 0  # the first load is in the warm-up


@pytest.mark.parametrize(("cv2", "name"), [(1.0, "M/M/3"), (0.0, "M/D/3")])
def test_a_tenant_on_the_cpu_is_a_queue_with_several_servers(cv2: float, name: str) -> None:
    problem = make_problem([26.0], accelerator_s=[0.01], megabytes=[4], cpu_cv2=cv2)

    found = simulate(problem, [0], [3], requests=300_000, seed=2)

    mmk = float(mmk_wait_s(np.array(26.0), np.array(0.08), np.array(3)))
    # `crommelin_wait_s` of the queueing tests over M/M/3 at a load of 26 * 0.08 / 3.
    exact = {"M/M/3": mmk, "M/D/3": mmk * 0.5240}[name]
    assert found.tenants[0].cpu_wait_s.mean() == pytest.approx(exact, rel=0.03)
    assert found.cpu_busy[0] == pytest.approx(26 * 0.08 / 3, rel=0.01)


def test_the_cpu_waits_of_one_tenant_behind_the_accelerator_follow_friedman() -> None:
    problem = make_problem([20.0], accelerator_s=[0.02], megabytes=[4])

    found = simulate(problem, [1], [1], requests=400_000, seed=3)

    both = 20 * 0.04**2 / 2 / (1 - 0.8)
    one = found.tenants[0]
    assert (one.accelerator_wait_s + one.cpu_wait_s).mean() == pytest.approx(both, rel=0.03)


@pytest.mark.parametrize("policy", ["token", "lru", "pinned"])
def test_misses_of_every_policy_are_those_of_a_memory_played_step_by_step(policy: Any) -> None:
    problem = make_problem([8, 6, 4], accelerator_s=[0.01] * 3, megabytes=[3, 3, 4], policy=policy)
    memory = [5e6] * 3 if policy == "pinned" else None

    quick = simulate(problem, [2] * 3, [0] * 3, requests=3000, seed=4, shares_bytes=memory)
    # Turns of one request and equal priorities do not change who is served how often.
    stepped = QueueOrder(discipline="switch-aware", burst=1)
    slow = simulate(
        problem, [2] * 3, [0] * 3, requests=3000, seed=4, shares_bytes=memory, order=stepped
    )

    sizes, room = [3, 3, 4], 8
    arrivals = sorted((t, i) for i, own in enumerate(quick.tenants) for t in own.arrival_s)
    counted = 0
    recent: list[int] = []
    for _, i in arrivals:
        before = recent[: recent.index(i)] if i in recent else recent
        fits = i in recent and sum(sizes[j] for j in [*before, i]) <= room
        counted += {"token": recent[:1] != [i], "lru": not fits, "pinned": False}[policy]
        recent = [i, *(j for j in recent if j != i)]
    missed = sum(int(t.missed.sum()) for t in quick.tenants)
    assert abs(missed - counted) <= 3  # those at the end of the warm-up
    if policy == "pinned":
        assert all(not t.missed.any() for t in slow.tenants)
    else:
        assert sum(int(t.missed.sum()) for t in slow.tenants) > 0


def test_pinned_tenants_stream_what_has_no_share_of_the_memory() -> None:
    problem = make_problem([5.0], accelerator_s=[0.01], megabytes=[6], policy="pinned")

    found = simulate(problem, [2], [0], requests=500, shares_bytes=[2e6])

    assert found.tenants[0].accelerator_s == pytest.approx(0.01 + 4e6 / 1e9)


def _two(share: float, *, requests: int = 40_000, order: QueueOrder, seed: int = 5) -> Any:
    busy = 0.8
    service, load = np.array([0.008, 0.022]), np.array([0.0068, 0.008])
    q = np.array([share, 1 - share])
    rate = busy / float(q @ (service + (1 - q) * load))
    problem = make_problem(list(rate * q), accelerator_s=list(service), megabytes=[6.8, 8.0])
    return simulate(problem, [2, 2], [0, 0], requests=requests, seed=seed, order=order)


def test_serving_the_resident_tenant_first_shortens_the_mean_and_starves_nobody() -> None:
    fcfs = _two(0.5, order=QueueOrder())
    limited = _two(0.5, order=SWITCH_AWARE)
    exhaustive = _two(0.5, order=QueueOrder(discipline="exhaustive"))

    assert limited.mean_s < 0.9 * fcfs.mean_s
    assert exhaustive.mean_s < limited.mean_s
    assert limited.accelerator_busy < fcfs.accelerator_busy
    assert max(t.max_wait_s for t in limited.tenants) < max(t.max_wait_s for t in fcfs.tenants)


def test_a_burst_of_one_among_ready_tenants_takes_turns() -> None:
    problem = make_problem([1, 1], accelerator_s=[0.1, 0.1], megabytes=[1, 1])
    at_once = [np.zeros(3), np.zeros(3)]
    order = QueueOrder(discipline="switch-aware", burst=1)

    found = simulate(
        problem,
        [2, 2],
        [0, 0],
        arrivals=at_once,
        order=order,
        policy="pinned",
        horizon_s=1.0,
        warm_up_ratio=0.0,
    )

    assert found.tenants[0].accelerator_wait_s == pytest.approx([0.0, 0.2, 0.4])
    assert found.tenants[1].accelerator_wait_s == pytest.approx([0.1, 0.3, 0.5])


def test_a_burst_of_two_serves_two_in_a_row() -> None:
    problem = make_problem([1, 1], accelerator_s=[0.1, 0.1], megabytes=[1, 1])
    order = QueueOrder(discipline="switch-aware", burst=2)

    found = simulate(
        problem,
        [2, 2],
        [0, 0],
        arrivals=[np.zeros(3), np.zeros(3)],
        order=order,
        policy="pinned",
        horizon_s=1.0,
        warm_up_ratio=0.0,
    )

    assert found.tenants[0].accelerator_wait_s == pytest.approx([0.0, 0.1, 0.4])
    assert found.tenants[1].accelerator_wait_s == pytest.approx([0.2, 0.3, 0.5])


def test_a_better_priority_is_switched_to_first() -> None:
    problem = make_problem(
        [1, 1, 1], accelerator_s=[0.1] * 3, megabytes=[1] * 3, priorities=[16, 16, 0]
    )

    found = simulate(
        problem,
        [2, 2, 2],
        [0, 0, 0],
        arrivals=[np.zeros(1)] * 3,
        order=SWITCH_AWARE,
        policy="pinned",
        horizon_s=1.0,
        warm_up_ratio=0.0,
    )

    begins = [t.accelerator_wait_s[0] for t in found.tenants]
    assert begins == pytest.approx([0.0, 0.2, 0.1])


def test_below_its_threshold_a_tenant_waits_for_its_timeout_and_no_longer() -> None:
    problem = make_problem([1, 1], accelerator_s=[0.1, 0.1], megabytes=[1, 1])
    order = QueueOrder(discipline="switch-aware", threshold=2, timeout_s=0.25)
    lonely = [np.array([0.0]), np.array([0.05])]
    pair = [np.array([0.0]), np.array([0.05, 0.12])]

    waits = simulate(
        problem,
        [2, 2],
        [0, 0],
        arrivals=lonely,
        order=order,
        policy="pinned",
        horizon_s=1.0,
        warm_up_ratio=0.0,
    )
    ready = simulate(
        problem,
        [2, 2],
        [0, 0],
        arrivals=pair,
        order=order,
        policy="pinned",
        horizon_s=1.0,
        warm_up_ratio=0.0,
    )

    assert waits.tenants[1].accelerator_wait_s == pytest.approx([0.25])
    assert ready.tenants[1].accelerator_wait_s == pytest.approx([0.07, 0.1])


def test_requests_left_below_a_threshold_without_timeout_are_served_at_the_end() -> None:
    problem = make_problem([1, 1], accelerator_s=[0.1, 0.1], megabytes=[1, 1])
    order = QueueOrder(discipline="switch-aware", threshold=5, timeout_s=np.inf)

    found = simulate(
        problem,
        [2, 2],
        [0, 0],
        arrivals=[np.array([0.5]), np.array([0.55])],
        order=order,
        policy="pinned",
        horizon_s=1.0,
        warm_up_ratio=0.0,
    )

    assert found.requests == 2
    assert found.tenants[1].accelerator_wait_s == pytest.approx([0.05])


def test_within_a_turn_the_earliest_deadline_goes_first() -> None:
    problem = make_problem([1, 1], accelerator_s=[0.1, 0.1], megabytes=[1, 1])
    order = QueueOrder(discipline="switch-aware", burst=8, within="deadline")

    found = simulate(
        problem,
        [2, 2],
        [0, 0],
        arrivals=[np.array([0.1, 0.11, 0.12]), np.zeros(0)],
        slack_s=[np.array([9.0, 9.0, 0.2]), np.zeros(0)],
        order=order,
        policy="pinned",
        horizon_s=1.0,
        warm_up_ratio=0.0,
    )

    assert found.tenants[0].accelerator_wait_s == pytest.approx([0.0, 0.19, 0.08])
    assert len(found.tenants[1].response_s) == 0


def test_arrivals_have_the_rate_and_the_regularity_that_they_were_asked_for() -> None:
    rng = np.random.default_rng(6)
    gaps = np.diff(poisson_arrivals(50, 400, rng))
    even = np.diff(periodic_arrivals(50, 400, rng))
    shaken = np.diff(periodic_arrivals(50, 400, rng, jitter_ratio=0.5))
    steps = stepped_arrivals([(0, 10), (100, 40), (200, 0)], 300, rng)

    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.03)
    assert even == pytest.approx(1 / 50)
    # Differences of two uniform latenesses of half a period.
    assert shaken.std() * 50 == pytest.approx(0.5 / np.sqrt(6), rel=0.05)
    assert len(steps[steps < 100]) == pytest.approx(1000, rel=0.1)
    assert len(steps[steps >= 100]) == pytest.approx(4000, rel=0.05)
    assert steps.max() < 200


def test_the_same_seed_gives_the_same_times_and_another_others() -> None:
    problem = make_problem([9, 9], accelerator_s=[0.01, 0.02], megabytes=[6, 6], cpu_cv2=0.5)

    a, b, c = (simulate(problem, [1, 2], [1, 0], requests=500, seed=s) for s in (1, 1, 2))

    assert a.mean_s == b.mean_s
    assert a.mean_s != c.mean_s


def test_half_widths_shrink_with_the_root_of_the_number_of_requests() -> None:
    problem = make_problem([30], accelerator_s=[0.02], megabytes=[4])

    few = simulate(problem, [2], [0], requests=20_000, seed=7)
    many = simulate(problem, [2], [0], requests=320_000, seed=7)

    assert 2 < few.half_width_s / many.half_width_s < 8


def test_quantiles_and_lateness_describe_the_same_law() -> None:
    problem = make_problem([30], accelerator_s=[0.02], megabytes=[4])
    tenant = simulate(problem, [2], [0], requests=20_000, seed=8).tenants[0]

    p95, p99 = tenant.quantile_s([0.95, 0.99])

    assert tenant.late(float(p95)) == pytest.approx(0.05, abs=1e-3)
    assert tenant.late(float(p99)) == pytest.approx(0.01, abs=1e-3)


def test_a_suffix_without_a_core_and_slacks_that_do_not_fit_are_refused() -> None:
    problem = make_problem([5, 5], accelerator_s=[0.01, 0.01], megabytes=[4, 4])

    with pytest.raises(ConfigError, match="'tenant0' has no core"):
        simulate(problem, [1, 2], [0, 0], requests=100)
    with pytest.raises(ShapeError, match="1 slacks for 2 arrivals"):
        simulate(
            problem,
            [2, 2],
            [0, 0],
            arrivals=[np.zeros(2), np.zeros(1)],
            slack_s=[np.zeros(1)] * 2,
        )
    with pytest.raises(ConfigError, match="at least 1"):
        QueueOrder(burst=0)


@pytest.mark.slow
def test_two_stations_in_a_row_agree_with_ciw() -> None:
    ciw: Any = pytest.importorskip("ciw", reason="ciw, another simulator, is not installed")
    rate = 0.7 / 0.03
    network = ciw.create_network(
        arrival_distributions=[ciw.dists.Exponential(rate), None],
        service_distributions=[ciw.dists.Deterministic(0.02), ciw.dists.Deterministic(0.06)],
        number_of_servers=[1, 2],
        routing=[[0.0, 1.0], [0.0, 0.0]],
    )
    ciw.seed(1)
    theirs = ciw.Simulation(network)
    theirs.simulate_until_max_time(15_000 / rate)
    waits = [
        np.mean([r.waiting_time for r in theirs.get_all_records() if r.node == node])
        for node in (1, 2)
    ]
    problem = make_problem([rate], accelerator_s=[0.02], megabytes=[4], cpu_s=0.06)

    ours = simulate(problem, [1], [2], requests=300_000, seed=9).tenants[0]

    # Ciw's 15,000 requests leave about 4 % of noise.
    assert ours.accelerator_wait_s.mean() == pytest.approx(float(waits[0]), rel=0.08)
    assert ours.cpu_wait_s.mean() == pytest.approx(float(waits[1]), rel=0.12)
