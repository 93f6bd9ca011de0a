"""``edgewise bench predict``: what watching the device and predicting its costs themselves cost."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from edgewise.bench.exits import decision_figures
from edgewise.device.load import load_between, read_cpu_counters
from edgewise.device.monitor import Monitor
from edgewise.device.sensor import make_sensors
from edgewise.device.simulated import load_device, load_work, run_campaign
from edgewise.device.simulated.device import SimulatedDevice
from edgewise.device.simulated.traces import static_max, static_min
from edgewise.exits import PolicyInputs, make_policy
from edgewise.predict import CostTable
from edgewise.predict.fitting import fit_kind
from edgewise.predict.state_samples import StateSamples
from edgewise.runtime.repricing import Repricer

Say = Callable[[str], None]
Float64 = npt.NDArray[np.float64]

# 16 stages and 8 heads, as the paper's ResNet-50 has them.
_STAGES, _HEADS = 16, 8
_KINDS = ("static", "physical", "mlp", "lut")


def run(*, quick: bool = False, say: Say = lambda _: None) -> dict[str, Any]:
    """Measure all figures of this bench.

    Args:
        quick: Fewer rounds.
        say: Told what is being measured.

    Returns:
        A mapping ready for JSON; ``notes`` says how each figure came about.
    """
    calls = 300 if quick else 3000
    before = read_cpu_counters()
    began_s = time.perf_counter()
    say("the monitor")
    monitor = monitor_figures(duration_s=2.0 if quick else 10.0)
    say("the router's decision, with the monitor running")
    with Monitor(make_sensors()):
        decision = decision_figures(calls=10_000 if quick else 50_000)
    say("decisions without it")
    alone = decision_figures(calls=10_000 if quick else 50_000)
    say("predictors")
    predictors = predictor_figures(calls=calls, quick=quick)
    say("publishing")
    reprice_s = publishing_s(calls=calls)
    load = load_between(before, read_cpu_counters(), window_s=time.perf_counter() - began_s)
    others = load.other_ratio
    return {
        "predict_all_units_p50_s": predictors["physical"]["p50_s"],
        "predictor_bytes": predictors["physical"]["bytes"],
        "decision_p50_s": decision["decision_p50_s"],
        "decision_p99_s": decision["decision_p99_s"],
        "decision_without_monitor_p50_s": alone["decision_p50_s"],
        "monitor_cpu_ratio": monitor["cpu_ratio"],
        "monitor": monitor,
        "predictors": predictors,
        "reprice_p50_s": reprice_s,
        "other_load_ratio": others,
        "threads": 1,
        "provenance": "measured",
        "notes": _notes(others),
    }


def _notes(others: float | None) -> list[str]:
    share = "an unknown share" if others is None else f"{others:.0%}"
    fitted = f"predictors of {_STAGES} stages and {_HEADS} heads, fitted to a simulated Orin Nano"
    monitor = "monitor_cpu_ratio: CPU time of the monitor's thread at 10 ms over wall time"
    return [
        f"{fitted}; their times and sizes are of this machine; the default kind is physical",
        f"{monitor}, callbacks left out; 0.02 is 2 % of one core",
        "reprice: one new state to a published table of 8 exits, off the request path",
        f"other programs used {share} of all cores meanwhile",
    ]


def monitor_figures(*, duration_s: float, period_s: float = 0.01) -> dict[str, Any]:
    """Let the monitor run for a while and ask it what it cost."""
    with Monitor(make_sensors(), period_s=period_s) as monitor:
        time.sleep(duration_s)
        return dataclasses.asdict(monitor.cost)


def predictor_figures(*, calls: int, quick: bool) -> dict[str, dict[str, float]]:
    """Time of predicting all units at once from a device state, and memory, for each kind."""
    model = load_device("jetson-orin-nano")
    work = load_work("resnet50")
    device = SimulatedDevice(model, static_max(model.clocks), work, seed=0)
    campaign = run_campaign(model, work, seed=0)
    rows = np.random.default_rng(0).choice(len(campaign.states), 400, replace=False)
    names, seconds = _as_many_units(campaign.units, campaign.seconds[rows])
    samples = StateSamples(
        features=campaign.features,
        states=campaign.states[rows],
        units=names,
        seconds=seconds,
        provenance="simulated",
    )
    state = device.state(0.0)
    figures = {}
    for kind in _KINDS:
        options = {"steps": 200} if kind == "mlp" and quick else {}
        fitted = fit_kind(kind, samples, seed=0, options=options)
        spent_s = []
        for _ in range(calls):
            begin_s = time.perf_counter()
            fitted.predict(state)
            spent_s.append(time.perf_counter() - begin_s)
        figures[kind] = {
            "p50_s": float(np.quantile(spent_s, 0.5)),
            "p99_s": float(np.quantile(spent_s, 0.99)),
            "bytes": fitted.num_bytes,
        }
    return figures


def _as_many_units(units: tuple[str, ...], seconds: Float64) -> tuple[tuple[str, ...], Float64]:
    """16 stages and 8 heads out of 8 of each: a stage of two blocks is taken twice, halved."""
    stages = [n for n, name in enumerate(units) if name.startswith("stage:")]
    heads = [n for n, name in enumerate(units) if name.startswith("head:")][:_HEADS]
    doubled = np.repeat(seconds[..., stages] / 2, 2, axis=-1)[..., :_STAGES]
    names = [f"stage:{k}" for k in range(doubled.shape[-1])] + [f"head:{k}" for k in range(_HEADS)]
    return tuple(names), np.concatenate([doubled, seconds[..., heads]], axis=-1)


def publishing_s(*, calls: int) -> float:
    """Median time from a new state to the table that requests read, 8 exits."""
    model, work = load_device("jetson-orin-nano"), load_work("resnet50")
    campaign = run_campaign(model, work, seed=0)
    rows = np.random.default_rng(1).choice(len(campaign.states), 200, replace=False)
    samples = StateSamples(
        features=campaign.features,
        states=campaign.states[rows],
        units=campaign.units,
        seconds=campaign.seconds[rows],
        provenance="simulated",
    )
    fitted = fit_kind("physical", samples, seed=0)
    num = fitted.num_stages
    costs = CostTable.from_costs([1e-3] * num, [2e-4] * num)
    segments = frozenset((k, k + 1) for k in range(num))
    policy = make_policy("edgewise", PolicyInputs(costs=costs, segments=segments))
    repricer = Repricer(fitted, [policy], min_change_ratio=0.0)
    levels = model.clocks
    states = [
        SimulatedDevice(model, trace, work, seed=0).state(0.0)
        for trace in (static_max(levels), static_min(levels))
    ]
    spent_s = []
    for n in range(calls):
        state = dataclasses.replace(states[n % 2], at_s=0.01 * n)
        begin_s = time.perf_counter()
        repricer.on_state(state)
        spent_s.append(time.perf_counter() - begin_s)
    return float(np.median(spent_s))
