from __future__ import annotations

from dataclasses import replace

import pytest

from edgewise.device.accelerator import load_accelerator
from edgewise.errors import ConfigError
from edgewise.placement.problem import Problem
from edgewise.placement.search import plan, search
from edgewise.placement.study import random_mixes

CORAL = load_accelerator("coral-usb")


@pytest.fixture(scope="module")
def problem() -> Problem:
    return random_mixes(9, CORAL, seed=3)[8]


def test_it_takes_the_better_residency_and_says_what_the_other_would_give(
    problem: Problem,
) -> None:
    both = search(problem)
    switch, pinned = (search(problem, residency=kind) for kind in ("switch", "pinned"))

    assert both.rank == min(switch.rank, pinned.rank)
    assert both.problem.residency == "pinned"
    assert "models that switch would score" in both.notes[0]
    assert search(problem, "pinned").rank == pinned.rank
    assert plan(problem).shares[0].sram_bytes is not None


def test_a_device_that_cannot_pin_switches(problem: Problem) -> None:
    other = replace(problem, accelerator=replace(CORAL, can_pin=False))

    assert search(other).problem.residency == "switch"
    with pytest.raises(ConfigError, match="no fixed shares"):
        search(other, "pinned")
    with pytest.raises(ConfigError, match="unknown residency 'both'"):
        search(problem, residency="both")


def test_a_device_that_only_pins_never_switches(problem: Problem) -> None:
    other = replace(problem, accelerator=replace(CORAL, cache_policy="pinned"))

    assert search(other).problem.residency == "pinned"


def test_no_baseline_is_better(problem: Problem) -> None:
    best = search(problem).rank

    for method in ("compiler", "threshold", "alpha-zero", "rate-pinning", "greedy", "multi-start"):
        assert search(problem, method).rank >= best * (1 - 1e-9)


def test_many_tenants_are_searched_from_many_starts() -> None:
    [problem] = random_mixes(1, CORAL, seed=2, tenants=(6,))

    found = search(problem, residency="switch")

    assert found.stable
    assert found.rank <= search(problem, "greedy").rank
