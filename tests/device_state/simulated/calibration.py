"""Figures of the paper and what the simulated devices give for them: the table of the docs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from edgewise.device.simulated import (
    DeviceModel,
    SimulatedDevice,
    UnitWork,
    down_up,
    full_depth,
    load_device,
    load_work,
    run_campaign,
    static_max,
)

DEVICES = {"jetson-orin-nano": "Orin Nano", "jetson-xavier-nx": "Xavier NX"}


def figures() -> Iterator[tuple[str, str, float, float]]:
    """Yields what, where, the paper's figure and the model's."""
    resnet, mobilenet = load_work("resnet50"), load_work("mobilenet_v2")
    llama = load_work("llama-3.2-1b")
    for name, where in DEVICES.items():
        model = load_device(name)
        yield "ResNet-50, static, ms", where, 15, 1e3 * static_s(model, resnet)
        yield "MobileNetV2, static, ms", where, 15, 1e3 * static_s(model, mobilenet)
        yield "LLaMA token, static, ms", where, 70, 1e3 * static_s(model, llama)
        moving = 1e3 * back_to_back_s(model, resnet)
        yield "ResNet-50, down-up, median, ms", where, 16, float(np.median(moving))
        yield "ResNet-50, down-up, mean, ms", where, 16, float(moving.mean())
        moving = 1e3 * back_to_back_s(model, llama)
        yield "LLaMA token, down-up, median, ms", where, 118, float(np.median(moving))
        yield "LLaMA token, down-up, mean, ms", where, 118, float(moving.mean())
        yield "ResNet-50, all heads over one", where, 1.5, all_heads_ratio(model, resnet)
        yield "LLaMA, all heads over one", where, 2.0, all_heads_ratio(model, llama)
        lowest = {"Orin Nano": (0.84, 2.91), "Xavier NX": (1.12, 3.37)}[where]
        errors = noise_errors(model)
        yield "noise alone, MAPE, %", where, lowest[0], 100 * float(errors.mean())
        yield "noise alone, P95 APE, %", where, lowest[1], 100 * float(np.quantile(errors, 0.95))
    orin = load_device("jetson-orin-nano")
    for work, what, paper in ((resnet, "CNN", 2.73), (llama, "LM", 29.63)):
        hours = run_campaign(orin, work, seed=0).elapsed_s / 3600
        yield f"full campaign, {what}, hours", "Orin Nano", paper, hours


def static_s(model: DeviceModel, work: tuple[UnitWork, ...]) -> float:
    """Full depth at the highest clocks."""
    return _top_s(model, work, full_depth(work))


def back_to_back_s(
    model: DeviceModel, work: tuple[UnitWork, ...], *, requests: int = 1000
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Full depth on the paper's trace, each request after the one before."""
    simulated = SimulatedDevice(model, down_up(model.clocks), work, seed=0)
    now_s, found = 0.0, []
    for request in range(requests):
        start_s = now_s
        for unit in full_depth(work):
            now_s += simulated.cost_s(unit, now_s, request=request)
        found.append(now_s - start_s)
    return np.array(found)


def worst_first_exit_s(model: DeviceModel, work: tuple[UnitWork, ...]) -> float:
    """First stage and head, noise-free, with all clocks at their lowest."""
    simulated = SimulatedDevice(model, static_max(model.clocks), work, seed=0)
    floor = model.clocks.at((0, 0, 0))
    return sum(simulated.true_median_s(unit, floor) for unit in ("stage:0", "head:0"))


def all_heads_ratio(model: DeviceModel, work: tuple[UnitWork, ...]) -> float:
    """Time with every head run over time with the last one, at the highest clocks."""
    return _top_s(model, work, tuple(unit.name for unit in work)) / static_s(model, work)


def noise_errors(model: DeviceModel) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Absolute errors of a predictor that knows every median, as shares of the observed."""
    rng = np.random.default_rng(0)
    observed = model.noise.factors(rng.standard_normal(200_000), rng.random(200_000))
    return np.asarray(np.abs(1 - 1 / observed))


def _top_s(model: DeviceModel, work: tuple[UnitWork, ...], units: tuple[str, ...]) -> float:
    simulated = SimulatedDevice(model, static_max(model.clocks), work, seed=0)
    top = model.clocks.at(model.clocks.top)
    return sum(simulated.true_median_s(unit, top) for unit in units)


def row(what: str, where: str, paper: float, ours: float) -> str:
    """One line of the table."""
    return f"| {what} | {where} | {paper:g} | {ours:.3g} | {ours / paper:.2f} |"


if __name__ == "__main__":
    for each in figures():
        print(row(*each))  # noqa: T201 - a program that prints the table for the docs
    for device in DEVICES:
        for name in ("resnet50", "mobilenet_v2", "llama-3.2-1b"):
            found_s = worst_first_exit_s(load_device(device), load_work(name))
            print(device, name, f"first exit at the floor {1e3 * found_s:.1f} ms")  # noqa: T201
