from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from edgewise.device.simulated import (
    DeviceModel,
    SimulatedDevice,
    down_up,
    load_device,
    load_work,
)

PAGE = Path(__file__).parents[3] / "docs/background/simulated-devices.md"


@pytest.fixture(scope="module")
def calibration() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "edgewise_test_calibration", Path(__file__).parent / "calibration.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def figures(calibration: ModuleType) -> dict[tuple[str, str], tuple[float, float]]:
    """(what, where) to the paper's figure and the model's."""
    return {(what, where): (paper, ours) for what, where, paper, ours in calibration.figures()}


def test_the_page_has_the_figures_that_the_model_gives(
    figures: dict[tuple[str, str], tuple[float, float]],
) -> None:
    table = PAGE.read_text(encoding="utf-8").partition("## Calibration")[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    shown = {(what, where): [float(n) for n in numbers] for what, where, *numbers in lines[1:]}
    assert shown.keys() == figures.keys()
    for key, (paper, ours) in figures.items():
        assert shown[key][0] == paper
        assert shown[key][1] == pytest.approx(ours, rel=0.006)
        assert shown[key][2] == pytest.approx(ours / paper, abs=0.011)


@pytest.mark.parametrize(
    ("what", "tolerance"),
    [
        ("ResNet-50, static, ms", 0.01),
        ("LLaMA token, static, ms", 0.01),
        ("ResNet-50, down-up, median, ms", 0.06),
        ("LLaMA token, down-up, mean, ms", 0.10),
        ("ResNet-50, all heads over one", 0.10),
        ("full campaign, CNN, hours", 0.05),
        ("full campaign, LM, hours", 0.10),
    ],
)
def test_the_model_meets_the_papers_figures(
    what: str, tolerance: float, figures: dict[tuple[str, str], tuple[float, float]]
) -> None:
    found = [ours / paper for (name, _), (paper, ours) in figures.items() if name == what]
    assert found
    assert found == pytest.approx([1.0] * len(found), abs=tolerance)


def test_the_noise_alone_is_a_little_below_the_papers_smallest_errors(
    figures: dict[tuple[str, str], tuple[float, float]],
) -> None:
    for (what, _), (paper, ours) in figures.items():
        if what.startswith("noise alone"):
            assert 0.6 * paper < ours < paper


def test_the_first_exit_fits_into_the_papers_dynamic_deadlines_all_along_the_trace(
    device: DeviceModel,
) -> None:
    for name, deadline_s in (("resnet50", 0.016), ("mobilenet_v2", 0.016), ("llama-3.2-1b", 0.118)):
        simulated = SimulatedDevice(device, down_up(device.clocks), load_work(name), seed=0)
        period_s = down_up(device.clocks).period_s
        for request, start_s in enumerate(np.linspace(0.0, period_s, 500)):
            stage_s = simulated.cost_s("stage:0", start_s, request=request)
            head_s = simulated.cost_s("head:0", start_s + stage_s, request=request)
            assert stage_s + head_s < deadline_s


def test_a_head_of_a_network_of_images_costs_about_a_block(calibration: ModuleType) -> None:
    # A stage here is two blocks; the paper's factor of 1.5 says that a head is one.
    for name in calibration.DEVICES:
        ratio = calibration.all_heads_ratio(load_device(name), load_work("resnet50"))
        assert 1.25 < ratio < 1.5
