from __future__ import annotations

import numpy as np
import pytest

from edgewise.reproduce import Reproduction, Setup, run_claim, uniexit_table5
from edgewise.reproduce._predicted import LM, ORIN, fit, profiled


@pytest.fixture(scope="module")
def found() -> Reproduction:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uniexit_table5, "_QUICK_STEPS", 150)  # nothing here judges the network
        return run_claim("uniexit-table5", Setup(quick=True))


def test_states_records_and_parameters_are_the_papers_exactly(found: Reproduction) -> None:
    figures = {f.name.partition(": ")[2]: f for f in found.figures}

    assert (figures["states"].ours, figures["records"].ours) == (17_600, 52_800)
    # Two networks 6-64-32-1 of 2,561 numbers of 4 bytes.
    assert figures["parameters in FP32, mlp"].ours == 2 * 2561 * 4 / 1024
    assert round(figures["parameters in FP32, mlp"].ours, 2) == 20.01


def test_without_the_units_number_the_networks_are_as_small_as_the_papers_lm() -> None:
    samples = profiled(ORIN, LM, seed=0).take(np.arange(0, 17_600, 97))

    predictor = fit("mlp", samples, net=LM, seed=0, steps=5).predictor

    assert predictor.num_parameters == {"stage": 2497, "head": 2497}  # type: ignore[attr-defined]


def test_hours_are_simulated_and_training_is_measured(found: Reproduction) -> None:
    figures = {f.name.partition(": ")[2]: f for f in found.figures}

    assert figures["profiling"].provenance == "simulated"
    assert figures["profiling"].ours == pytest.approx(2.73, rel=0.05)
    assert figures["training, mlp"].provenance == "measured"


def test_few_chosen_states_give_the_error_of_all(found: Reproduction) -> None:
    points = found.details["resnet50"]
    chosen, every = points["physical, chosen"], points["physical, all"][-1]

    assert chosen[-1]["share"] == 0.10
    assert chosen[-1]["states"] == 1760
    assert chosen[-1]["mape_ratio"] < 1.01 * every["mape_ratio"]
    assert all(v.holds for v in found.verdicts)


def test_chosen_states_are_nearer_the_noise_free_cost_than_random_ones(
    found: Reproduction,
) -> None:
    points = found.details["resnet50"]
    for chosen, drawn in zip(points["physical, chosen"], points["physical, random"], strict=True):
        assert chosen["states"] == drawn["states"]
        assert chosen["excess_ratio"] < drawn["excess_ratio"]


def test_more_states_are_nearer_and_take_longer(found: Reproduction) -> None:
    chosen = found.details["resnet50"]["physical, chosen"]

    assert [p["excess_ratio"] for p in chosen] == sorted(
        (p["excess_ratio"] for p in chosen), reverse=True
    )
    assert [p["hours"] for p in chosen] == sorted(p["hours"] for p in chosen)
