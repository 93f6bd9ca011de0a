from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgewise.device.accelerator import load_accelerator
from edgewise.errors import ConfigError
from edgewise.placement.methods.threshold import threshold_places
from edgewise.placement.problem import Problem, Tenant
from edgewise.placement.search import search
from edgewise.placement.study import random_mixes
from edgewise.profiles.partition import PartitionProfile

CORAL = load_accelerator("coral-usb")


@pytest.fixture(scope="module")
def problem() -> Problem:
    return random_mixes(4, CORAL, seed=11, tenants=(3,))[3]


def test_the_compiler_puts_everything_on_the_accelerator(problem: Problem) -> None:
    found = search(problem, "compiler")

    assert found.places == tuple(problem.last)
    assert found.cores == (0, 0, 0)
    assert found.problem.residency == "switch"


def test_rate_pinning_gives_memory_to_the_hottest(problem: Problem) -> None:
    hottest = int(problem.rates.argmax())

    found = search(problem, "rate-pinning")

    assert found.places == tuple(problem.last)
    assert found.shares_bytes is not None
    assert found.shares_bytes[hottest] == min(problem.prefix_bytes[hottest, -1], CORAL.sram_bytes)
    with pytest.raises(ConfigError, match="no fixed shares"):
        search(replace(problem, accelerator=replace(CORAL, can_pin=False)), "rate-pinning")


def test_all_cpu_uses_all_cores_and_no_accelerator(problem: Problem) -> None:
    found = search(problem, "all-cpu")

    assert found.places == (0, 0, 0)
    assert sum(found.cores) == problem.cores


def test_alpha_zero_is_greedy_where_nothing_is_displaced(problem: Problem) -> None:
    alone = Problem.of(problem.tenants[:1], CORAL, cores=4)

    blind, seeing = search(alone, "alpha-zero"), search(alone, "greedy")

    assert (blind.places, blind.cores, blind.rank) == (seeing.places, seeing.cores, seeing.rank)


def test_alpha_zero_pays_for_the_misses_it_ignored() -> None:
    costs = []
    for problem in random_mixes(12, CORAL, seed=3):
        blind = search(problem, "alpha-zero")
        costs.append(blind.rank / search(problem, "exact").rank)

    assert min(costs) >= 1 - 1e-9
    assert max(costs) > 1.05


def layered(cpu_s: list[float], accelerator_s: list[float]) -> Problem:
    """A small model whose layers take so long."""
    places = len(cpu_s) + 1
    cpu = np.array([sum(cpu_s[p:]) for p in range(places)])
    cpu[-1] = 0.0
    profile = PartitionProfile(
        model_id="layers",
        cuts=tuple(f"c{p}" for p in range(places)),
        depth_ratio=np.linspace(0, 1, places),
        prefix_bytes=np.linspace(0, 1e6, places),
        boundary_bytes=np.full(places, 1e3),
        accelerator_s=np.array([sum(accelerator_s[:p]) for p in range(places)]),
        cpu_s=cpu[:, None],
    )
    return Problem.of([Tenant(name="a", profile=profile, rate_per_s=1.0)], CORAL, cores=2)


@pytest.mark.parametrize(
    ("cpu_ms", "place"),
    [
        pytest.param([10, 10, 1.05], 2, id="the last layer gains too little"),
        pytest.param([10, 10, 1.2], 3, id="every layer gains"),
        pytest.param([1, 10, 1], 2, id="the rule stops at the first layer that gains"),
        pytest.param([1, 1, 1], 0, id="no layer gains"),
    ],
)
def test_the_threshold_rule_looks_from_the_last_layer_back(cpu_ms: list[float], place: int) -> None:
    problem = layered([t / 1e3 for t in cpu_ms], [1e-3] * 3)

    assert threshold_places(problem).tolist() == [place]
    assert search(problem, "threshold").places == (place,)
