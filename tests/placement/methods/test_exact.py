from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edgewise.device.accelerator import load_accelerator
from edgewise.errors import ConfigError
from edgewise.placement.problem import PAPER, Assumptions, Problem, Tenant
from edgewise.placement.response import shared_wait
from edgewise.placement.search import search
from edgewise.placement.study import random_mixes, synthetic_profile

CORAL = load_accelerator("coral-usb")


def problem(seed: int, tenants: int = 3, *, cv2: float = 1.0, **more: Any) -> Problem:
    generator = np.random.default_rng(seed)
    device = replace(CORAL, sram_bytes=int(generator.uniform(1e6, 2e7)))
    found = Problem.of(
        [
            Tenant(
                name=f"t{i}",
                profile=synthetic_profile(generator, CORAL.name, places=5),
                rate_per_s=1.0,
                weight=float(generator.uniform(0, 2)),
                arrival_cv2=cv2,
            )
            for i in range(tenants)
        ],
        device,
        cores=3,
        **more,
    )
    whole_s = found.service_s[np.arange(tenants), found.last]
    load = generator.uniform(0.1, 1.0)
    return found.with_rates(load * generator.dirichlet(np.ones(tenants)) / whole_s)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, id="token"),
        pytest.param({"objective": "weighted"}, id="weighted"),
        pytest.param({"assumptions": PAPER}, id="the paper's formulas"),
        pytest.param({"assumptions": Assumptions(miss="paper")}, id="the paper's misses"),
        pytest.param({"assumptions": Assumptions(miss="lru")}, id="lru"),
        pytest.param({"residency": "pinned"}, id="fixed shares"),
        pytest.param({"cv2": 0.2}, id="even arrivals"),
        pytest.param({"cv2": 3.0}, id="bursts"),
    ],
)
def test_it_finds_what_trying_all_plans_finds(more: dict[str, Any]) -> None:
    for seed in range(4):
        asked = problem(seed, 2 + seed % 2, **more)

        every = search(asked, "exhaustive")

        for warm in (True, False):
            found = search(asked, "exact", warm=warm)
            assert found.stable == every.stable
            if every.stable:
                assert found.rank == pytest.approx(every.rank, rel=1e-9)


def test_four_tenants_have_the_same_optimum_without_a_first_guess() -> None:
    for seed in range(4):
        asked = problem(seed, 4)

        guessed, cold = search(asked, "exact"), search(asked, "exact", warm=False)

        assert guessed.rank == pytest.approx(cold.rank, rel=1e-9) or not guessed.stable


def test_its_bound_on_the_wait_holds() -> None:
    generator = np.random.default_rng(0)
    for asked in random_mixes(30, CORAL, seed=9):
        places = np.stack([generator.integers(0, p + 1, 100) for p in asked.last], axis=1)
        uneven = asked.with_rates(asked.rates * generator.uniform(0.05, 1.5, len(asked.rates)))
        found = shared_wait(uneven, places)
        rate = (uneven.rates * (places > 0)).sum(axis=1)

        independent = rate * found.queue.second_s2 / 2 / (1 - np.minimum(found.busy, 0.999))

        stable = found.busy < 0.999
        assert (found.wait_s >= 0.75 * independent - 1e-15)[stable].all()


def test_four_tenants_are_planned_without_looking_at_most_plans() -> None:
    asked = random_mixes(3, CORAL, seed=0)[2]
    assert len(asked.tenants) == 4

    assert search(asked, "exact").evaluated < 11**4


def test_other_objectives_and_too_many_plans_are_refused() -> None:
    asked = problem(0, 2)

    with pytest.raises(ConfigError, match="is for the objectives mean and weighted"):
        search(replace(asked, objective="max-min"), "exact")
    with pytest.raises(ConfigError, match="the limit is 3"):
        search(random_mixes(3, CORAL, seed=0)[2], "exact", max_labels=3)
