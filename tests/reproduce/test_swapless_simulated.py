"""The two claims of SwapLess that need no play in real time."""

from __future__ import annotations

import numpy as np
import pytest

from edgewise.placement.search import search
from edgewise.placement.simulate import FCFS
from edgewise.reproduce import Setup, run_claim, swapless_fig7
from edgewise.reproduce import _placement as common


def test_figure_3_follows_from_the_shipped_profiles() -> None:
    found = run_claim("swapless-fig3", Setup())

    by_name = {f.name: f for f in found.figures}
    swap = by_name["inception_v4: swapping within the model, share of its latency"]
    (profile,) = common.profiles(["inception_v4"])
    device = common.device()
    stream_s = (profile.weight_bytes - device.sram_bytes) / device.in_bytes_per_s
    ends_s = profile.boundary_bytes[0] / device.in_bytes_per_s + (
        profile.boundary_bytes[-1] / device.out_bytes_per_s
    )
    alone_s = device.fixed_s + ends_s + profile.accelerator_s[-1] + stream_s
    assert swap.ours == pytest.approx(100 * stream_s / alone_s)
    assert swap.paper == 62.4
    assert {f.provenance for f in found.figures} == {"simulated"}
    assert found.holds is True


def test_the_rare_model_waits_for_its_parameters_most() -> None:
    found = run_claim("swapless-fig3", Setup())

    by_name = {f.name: f.ours for f in found.figures}
    often, rare = (
        by_name[f"efficientnet_b0+gpunet_standin at 90:10, {net}: reloading, share of its latency"]
        for net in ("efficientnet_b0", "gpunet_standin")
    )
    assert often is not None
    assert rare is not None
    assert 0 < often < rare


@pytest.mark.parametrize("equal", ["load", "rates"])
def test_rates_keep_the_accelerator_as_busy_as_asked(equal: str) -> None:
    found = common.profiles(["mnasnet", "inception_v4"])

    rates = common.rates_for(found, common.device(), 0.4, equal=equal)  # type: ignore[arg-type]

    problem = common.problem(found, rates)
    plan = search(problem, "compiler").placement()
    assert plan.accelerator_busy == pytest.approx(0.4)
    service = problem.service_s[[0, 1], problem.last]
    alike = rates * service if equal == "load" else rates
    assert alike[0] == pytest.approx(alike[1])


def test_models_that_fit_together_load_the_device_with_their_work_alone() -> None:
    found = common.profiles(["mobilenet_v2", "squeezenet"])

    rates = common.rates_for(found, common.device(), 0.5, equal="rates")

    service = common.problem(found, rates).service_s[[0, 1], [p.last for p in found]]
    assert float((rates * service).sum()) == pytest.approx(0.5)


def test_planners_are_compared_on_one_device_and_the_best_plan_is_not_beaten() -> None:
    row = swapless_fig7.compare(("mnasnet", "inception_v4"), 0.5, requests=4000, seed=0)

    assert set(row) == {p.name for p in swapless_fig7.PLANNERS}
    rivals = [v for k, v in row.items() if not k.startswith("edgewise")]
    assert row["edgewise"] <= min(rivals) * 1.02
    assert row["edgewise"] < 0.7 * row["compiler"]


def test_a_plan_that_cannot_keep_up_has_no_mean() -> None:
    found = common.profiles(["inception_v4"])
    problem = common.problem(found, [100.0])

    assert swapless_fig7.mean_s(
        problem, search(problem, "compiler"), FCFS, requests=500, seed=0
    ) == float("inf")


def test_figure_7_says_what_is_saved_and_draws_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "NETS", ("squeezenet", "resnet50_v2"))
    monkeypatch.setattr(common, "MIXES", (("mnasnet", "inception_v4"),))

    found = run_claim("swapless-fig7", Setup(limit=2000))

    assert len(found.charts) == 4
    saved = next(f for f in found.figures if f.name.startswith("mixes at 50%, swapless"))
    assert saved.paper == 77.4
    assert saved.ours is not None
    assert 0 < saved.ours < 100
    assert np.isfinite([f.ours for f in found.figures if f.ours is not None]).all()
