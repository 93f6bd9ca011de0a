"""The parts of the bench that need no play; plays are tested in `test_placement_runs`."""

from __future__ import annotations

import pytest

from edgewise.bench import place


def test_decisions_are_timed_for_three_and_four_tenants() -> None:
    found = place.decision_figures(rounds=1)

    assert set(found) == {
        "greedy_4_tenants_s",
        "exact_3_tenants_s",
        "exact_4_tenants_s",
        "best_4_tenants_s",
    }
    assert all(seconds > 0 for seconds in found.values())


def test_several_starts_are_never_behind_one() -> None:
    found = place.gap_figures(mixes=3)

    assert found["multi_start"]["mean_gap_ratio"] <= found["greedy"]["mean_gap_ratio"]
    assert found["compiler"]["mean_gap_ratio"] > 0
    assert found["greedy"]["problems"] == 3


def test_the_switch_aware_queue_is_held_against_arrival_order_at_80_percent() -> None:
    found = place.queue_figures(requests=15_000)

    assert found["fcfs"]["accelerator_busy"] == pytest.approx(0.8, abs=0.05)
    assert found["mean_reduction_ratio"] > 0.3
    assert found["switch_aware"]["max_wait_s"] < found["fcfs"]["max_wait_s"]


def test_cycles_load_run_unload_and_are_refused() -> None:
    found = place.cycle_figures(cycles=10)

    assert found["cycles"] == 10
    assert found["growth_bytes"] < 20e6
