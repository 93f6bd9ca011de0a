from __future__ import annotations

import pytest

from edgewise.device.simulated import load_device, static_max
from edgewise.reproduce import Reproduction, Setup, run_claim
from edgewise.reproduce._predicted import CALL_S, LM, ORIN, TORCH, WORKLOADS, controller_calls
from edgewise.reproduce.uniexit_fig16 import calls_to_exit
from edgewise.reproduce.uniexit_fig17 import plan_of, walk


@pytest.fixture(scope="module")
def found() -> Reproduction:
    pytest.importorskip("safetensors")
    return run_claim("uniexit-fig16", Setup(quick=True))


def test_predictions_add_up_on_the_way_to_an_exit() -> None:
    assert calls_to_exit(plan_of("resnet50")).tolist() == [3, 6, 9, 12, 15, 18, 21, 24]
    assert calls_to_exit(plan_of(LM))[-1] == 32


@pytest.mark.parametrize("net", WORKLOADS)
def test_each_network_of_the_paper_can_be_walked(net: str) -> None:
    trace = static_max(load_device(ORIN).clocks)

    found = walk(plan_of(net), trace, call_s=CALL_S[net], duration_s=0.1, seed=0)

    assert list(found.to_exit_s) == sorted(found.to_exit_s)


def test_the_cache_saves_what_its_hits_would_have_taken(found: Reproduction) -> None:
    row = found.details["resnet50"]
    saved = [a - b for a, b in zip(row["without_s"], row["with_s"], strict=True)]

    calls = calls_to_exit(plan_of("resnet50"))
    # The first request of some thirty fills the cache.
    assert saved == pytest.approx(calls * CALL_S["resnet50"], rel=0.06)


def test_the_simulated_claims_hold_and_none_shares_a_figure_with_a_measured_one(
    found: Reproduction,
) -> None:
    simulated = [v for v in found.verdicts if "measured" not in v.detail]

    assert len(simulated) == 2
    assert all(v.holds for v in simulated)
    kinds = {f.name: f.provenance for f in found.figures}
    assert all(p == "measured" for n, p in kinds.items() if n.startswith("one call"))
    assert all(p == "simulated" for n, p in kinds.items() if "latency" in n)


def test_each_call_that_is_timed_answers() -> None:
    pytest.importorskip("safetensors")
    calls, problem = controller_calls()

    for name, call in calls.items():
        call()
        assert name
    assert (TORCH in calls) == (not problem)


def test_a_chart_is_of_one_kind_of_number(found: Reproduction) -> None:
    assert [c.provenance for c in found.charts] == ["simulated", "estimated"]
