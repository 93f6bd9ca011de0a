from __future__ import annotations

import numpy as np
import pytest

from edgewise.reproduce import Setup, run_claim
from edgewise.reproduce import _simulated as sim
from edgewise.reproduce.uniexit_energy import _play

pytest.importorskip("safetensors")


def test_what_an_exit_is_predicted_to_use_stays_within_the_budget() -> None:
    found = sim.case("jetson-orin-nano", "resnet50")

    point = _play(found, seed=0, count=60, budget_j=0.08)

    assert point.unfit_ratio(0.08) < 1.0
    assert point.over_ratio(point.predicted_j, 0.08) == 0.0


def test_a_budget_that_nothing_fits_gives_the_first_exit() -> None:
    found = sim.case("jetson-orin-nano", "resnet50")

    point = _play(found, seed=0, count=20, budget_j=1e-6)

    assert point.unfit_ratio(1e-6) == 1.0
    assert point.row.mean_depth_ratio == pytest.approx(found.chain.exits[0].depth_ratio)


def test_predicted_joules_are_close_to_those_used() -> None:
    """A check of the meter itself against the simulated device."""
    found = sim.case("jetson-orin-nano", "resnet50")

    point = _play(found, seed=0, count=60, budget_j=None)

    # Clocks move by up to two levels during a request; most requests see little of it.
    ratio = np.median(point.used_j / point.predicted_j)
    assert ratio == pytest.approx(1.0, abs=0.05)


def test_the_sweep_is_a_front_of_depth_over_joules() -> None:
    found = run_claim("uniexit-energy", Setup(quick=True, limit=40))

    (rows,) = found.details.values()
    energy = [each[0]["energy_j"] for each in rows.values()]
    assert list(rows)[-1] == "no energy budget"
    assert energy[0] < energy[-1]
    assert found.charts[0].provenance == "simulated"
