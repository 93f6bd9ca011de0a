from __future__ import annotations

import numpy as np
import pytest

from edgewise.device.simulated import down_up, load_device, load_work, static_max
from edgewise.reproduce import Reproduction, Setup, run_claim
from edgewise.reproduce._predicted import HIT, LM, MISS, NUMPY, ORIN, Timing
from edgewise.reproduce.uniexit_fig17 import (
    counted_loads,
    decision_s,
    every_head_s,
    plan_of,
    walk,
)

CLOCKS = load_device(ORIN).clocks


@pytest.fixture(scope="module")
def found() -> Reproduction:
    pytest.importorskip("safetensors")
    return run_claim("uniexit-fig17", Setup(quick=True))


def test_a_cnn_has_the_papers_24_keys_for_a_state_and_the_lm_two() -> None:
    cnn, lm = plan_of("resnet50"), plan_of(LM)

    assert (cnn.keys_per_state, cnn.calls) == (24, 24)
    assert (lm.keys_per_state, lm.calls) == (2, 32)


def test_cutting_stages_in_two_changes_no_work() -> None:
    whole, cut = load_work("resnet50"), plan_of("resnet50").work

    for name in ("launches", "flops", "traffic_bytes"):
        assert sum(getattr(u, name) for u in cut) == sum(getattr(u, name) for u in whole)
    assert [u.name for u in cut[:3]] == ["stage:0", "stage:1", "stage:2"]


def test_while_nothing_changes_each_key_misses_once() -> None:
    for net, keys in (("resnet50", 24), (LM, 2)):
        plan = plan_of(net)

        found = walk(plan, static_max(CLOCKS), call_s=0.0, duration_s=0.5, seed=0)

        assert found.states == 1
        assert found.hit_ratio == 1 - keys / (found.requests * plan.calls)


def test_predictions_that_miss_take_their_time_and_hits_none() -> None:
    plan = plan_of("resnet50")

    def play(call_s: float, capacity: int) -> float:
        return walk(
            plan, static_max(CLOCKS), call_s=call_s, duration_s=0.2, seed=0, capacity=capacity
        ).to_exit_s[-1]

    # A cache of one entry never has what is asked for next.
    assert play(1e-4, 1) - play(0.0, 1) == pytest.approx(24e-4, rel=0.02)
    assert play(1e-4, 128) - play(0.0, 128) < 24e-5


def test_on_the_papers_trace_a_cnn_never_hits_and_an_endless_cache_almost_always() -> None:
    plan, trace = plan_of("resnet50"), down_up(CLOCKS)

    small, endless = (
        walk(plan, trace, call_s=0.0, duration_s=6.0, seed=0, capacity=capacity)
        for capacity in (128, 10**9)
    )

    assert small.states == 42
    assert small.hit_ratio < 0.01
    # What was asked for once is there for ever.
    assert endless.hit_ratio == pytest.approx(1 - 24 * 42 / (endless.requests * 24), abs=1e-9)


def test_the_lm_fits_the_cache() -> None:
    found = walk(plan_of(LM), down_up(CLOCKS), call_s=0.0, duration_s=6.0, seed=0)

    assert found.hit_ratio > 0.9


def test_steady_loads_are_read_as_ever_other_numbers() -> None:
    loads = counted_loads(seed=0, cpu=0.2, gpu=0.3)
    readings = np.array([loads(k) for k in range(400)])

    assert readings.mean(axis=0) == pytest.approx([0.2, 0.3], abs=0.02)
    assert len({tuple(r) for r in readings.tolist()}) > 200
    assert loads(7) == loads(7)


def test_every_head_on_the_way_takes_longer_by_the_heads() -> None:
    plan, trace = plan_of("resnet50"), static_max(CLOCKS)
    model = load_device(ORIN)
    seconds = model.costs_s(plan.work, np.array([[1.0, 1.0, 1.0, 0.0, 0.0]]))[0]

    mean_s = every_head_s(plan, trace, duration_s=2.0, seed=0)

    assert mean_s == pytest.approx(seconds.sum(), rel=0.01)


def test_the_controllers_time_is_hits_and_misses_at_their_prices() -> None:
    def fixed(seconds: float) -> Timing:
        return Timing(p50_s=seconds, low_s=None, high_s=None)

    times = {HIT: fixed(1.0), MISS: fixed(10.0), NUMPY: fixed(100.0)}

    assert decision_s(times, hits=3, misses=2, call=NUMPY) == 3 + 2 * 110


def test_measured_and_simulated_never_share_a_figure(found: Reproduction) -> None:
    kinds = {f.name: f.provenance for f in found.figures}

    assert all(p == "measured" for n, p in kinds.items() if n.startswith("one call"))
    assert all(p == "simulated" for n, p in kinds.items() if "hits" in n and "time" not in n)
    assert all(p == "estimated" for n, p in kinds.items() if n.startswith("controller's"))


def test_the_claims_about_hits_hold(found: Reproduction) -> None:
    counted = [v for v in found.verdicts if "timed here" not in v.detail]

    assert len(counted) == 4
    assert all(v.holds for v in counted)


def test_hits_rise_with_the_period_of_the_clocks(found: Reproduction) -> None:
    ratios = [row["hit_ratio"] for row in found.details["periods"].values()]

    assert ratios == sorted(ratios)
    assert ratios[0] < 0.1
    assert ratios[-1] > 0.9
