from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edgewise.device.accelerator import load_accelerator
from edgewise.errors import ConfigError
from edgewise.placement import queueing
from edgewise.placement.problem import PAPER, Assumptions, Problem, Tenant
from edgewise.placement.study import synthetic_profile

CORAL = load_accelerator("coral-usb")
ARRAYS = (
    *("last", "rates", "prefix_bytes", "sram_bytes", "base_s", "service_s", "load_s"),
    *("cpu_s", "cpu_wait_s", "cpu_busy", "cpu_waits", "cpu_cv2", "workers", "cpu_threads"),
)


def tenants(*rates: float, places: int = 5, seed: int = 0, **more: Any) -> list[Tenant]:
    generator = np.random.default_rng(seed)
    return [
        Tenant(
            name=f"t{i}",
            profile=synthetic_profile(generator, CORAL.name, places=places + i),
            rate_per_s=rate,
            **more,
        )
        for i, rate in enumerate(rates)
    ]


def test_accelerator_costs_count_what_does_not_fit_once() -> None:
    [tenant] = tenants(2.0)
    profile = tenant.profile
    problem = Problem.of([tenant], CORAL, cores=2)
    p = profile.last
    size, room = profile.prefix_bytes[p], CORAL.sram_bytes

    base = CORAL.fixed_s + profile.boundary_bytes[0] / CORAL.in_bytes_per_s
    base += profile.accelerator_s[p] + profile.boundary_bytes[p] / CORAL.out_bytes_per_s
    stream = max(size - room, 0) / CORAL.in_bytes_per_s

    assert size > room  # so that the test can fail
    assert problem.service_s[0, p] == pytest.approx(base + stream)
    assert problem.load_s[0, p] == pytest.approx(room / CORAL.in_bytes_per_s)
    assert problem.service_s[0, 0] == problem.load_s[0, 0] == 0


@pytest.mark.parametrize("mode", ["workers", "threads", "both"])
def test_cores_are_used_in_the_best_way_that_the_mode_allows(mode: Any) -> None:
    [tenant] = tenants(5.0, arrival_cv2=0.5, suffix_cv2=np.linspace(0, 1, 6))
    problem = Problem.of([tenant], CORAL, cores=4, assumptions=Assumptions(cpu=mode))

    for p in range(5):
        for k in range(1, 5):
            ways = {
                "workers": [(k, 1)],
                "threads": [(1, {1: 1, 2: 2, 3: 2, 4: 4}[k])],
                "both": [(k // t, t) for t in (1, 2, 4) if t <= k],
            }[mode]
            found = []
            for workers, threads in ways:
                service = tenant.profile.cpu_s[p, [1, 2, 4].index(threads)]
                busy = 5.0 * service / workers
                rate = 5.0 if busy < 0.999 else 0.999 * workers / service
                wait = queueing.pool_wait_s(
                    np.array(rate),
                    np.array(service),
                    np.array(workers),
                    service_cv2=p / 5,
                    arrival_cv2=0.5,
                )
                score = float(wait) + service + 1e3 * float(queueing.overload(np.array(busy)))
                found.append((score, workers, threads, service, float(wait), busy))
            _, workers, threads, service, wait_s, busy = min(found, key=lambda f: f[0])
            where = (0, p, k)
            assert (problem.workers[where], problem.cpu_threads[where]) == (workers, threads)
            assert problem.cpu_s[where] == pytest.approx(service)
            assert problem.cpu_wait_s[where] == pytest.approx(wait_s)
            assert problem.cpu_busy[where] == pytest.approx(busy)
    assert not problem.cpu_s[0, 5].any()
    assert not problem.workers[0, 5].any()


def test_no_core_is_worse_the_more_is_left() -> None:
    problem = Problem.of(tenants(3.0), CORAL, cores=2)

    assert (problem.cpu_busy[0, :5, 0] > 1).all()
    assert (np.diff(problem.cpu_busy[0, :, 0]) < 0).all()


def test_other_rates_give_what_a_new_problem_would() -> None:
    first = Problem.of(tenants(1.0, 2.0, 3.0), CORAL, cores=3, assumptions=PAPER)

    changed = first.with_rates([4.0, 0.5, 9.0])
    fresh = Problem.of(tenants(4.0, 0.5, 9.0), CORAL, cores=3, assumptions=PAPER)

    for name in ARRAYS:
        assert np.array_equal(getattr(changed, name), getattr(fresh, name)), name
    assert [t.rate_per_s for t in changed.tenants] == [4.0, 0.5, 9.0]


def test_without_an_accelerator_every_model_stays_on_the_cpu() -> None:
    problem = Problem.of(tenants(1.0, 2.0), None, cores=2)

    assert problem.last.tolist() == [0, 0]
    assert not problem.service_s.any()
    assert problem.miss_model == "pinned"


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_a_rate_that_cannot_be_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="rate_per_s above zero"):
        tenants(rate)
    with pytest.raises(ConfigError, match="rate_per_s above zero"):
        Problem.of(tenants(1.0), CORAL, cores=1).with_rates([rate])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"tenants": []}, "at least one tenant", id="no tenant"),
        pytest.param({"cores": 0}, "at least one core", id="no core"),
        pytest.param({"objective": "p98"}, "unknown objective", id="unknown objective"),
        pytest.param({"residency": "pined"}, "unknown residency", id="unknown residency"),
        pytest.param({"objective": "deadline-miss"}, "needs a deadline", id="no deadline"),
        pytest.param(
            {"accelerator": replace(CORAL, can_pin=False), "residency": "pinned"},
            "no fixed shares",
            id="a device that cannot pin",
        ),
        pytest.param(
            {"accelerator": replace(CORAL, name="another")}, "its profile is of", id="other device"
        ),
        pytest.param({"tenants": tenants(1.0) * 2}, "two tenants are called", id="one name twice"),
    ],
)
def test_what_makes_no_problem_is_refused(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"tenants": tenants(1.0), "accelerator": CORAL, "cores": 2}
    arguments |= change

    with pytest.raises(ConfigError, match=message):
        Problem.of(arguments.pop("tenants"), arguments.pop("accelerator"), **arguments)


def test_residency_can_be_changed_where_the_device_can_pin() -> None:
    problem = Problem.of(tenants(1.0), CORAL, cores=2)

    assert problem.with_residency("pinned").miss_model == "pinned"
    with pytest.raises(ConfigError, match="no fixed shares"):
        replace(problem, accelerator=replace(CORAL, can_pin=False)).with_residency("pinned")
