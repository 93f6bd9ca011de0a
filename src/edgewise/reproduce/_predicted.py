"""What the claims about predictors share: simulated profiles, fits, and timed calls."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edgewise.device.simulated import (
    SIMULATED_FEATURES,
    down_up,
    load_device,
    load_work,
    run_campaign,
)
from edgewise.exits import make_policy
from edgewise.predict.cache import PredictionCache
from edgewise.predict.features import unit_groups
from edgewise.predict.fitted import FittedPredictor
from edgewise.predict.fitting import fit_kind
from edgewise.predict.kinds.mlp import WIDTHS, Mlp
from edgewise.predict.kinds.static import StaticTable
from edgewise.predict.state_costs import StateCosts
from edgewise.predict.state_samples import StateSamples
from edgewise.profiles.statistics import quantile_interval
from edgewise.reproduce._simulated import NETS, TITLES, case, predictor
from edgewise.reproduce.registry import Figure

Float64 = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]

ORIN, XAVIER = "jetson-orin-nano", "jetson-xavier-nx"
LM = "llama-3.2-1b"
WORKLOADS = (*NETS, LM)
# UniExit, Figure 13: of an image, and of a token.
CNN_DEADLINE_S, LM_DEADLINE_S = 0.016, 0.118
LEVEL = 0.95

# What decisions are made of; see `controller_calls`.
TORCH = "network in PyTorch, one unit"
NUMPY = "network in numpy, one unit"
HIT = "cache, a hit"
MISS = "cache, a miss without its prediction"
TABLE = "published table, one decision"
PUBLISH = "predicting all units and publishing, off the request path"

# The paper's Table 3 read as one decision: 0.60 ms of a CNN for two stages and a head, about 0.20
# ms of an LM for a stage and a head. So one prediction, seconds:
CALL_S = {**dict.fromkeys(NETS, 0.20e-3), LM: 0.10e-3}

_NAMES = {**TITLES, LM: "LLaMA 3.2-1B"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long one call takes, measured here; seconds.

    Attributes:
        p50_s: Median over rounds of the mean of a round.
        low_s: Lower end of its 95 % interval; ``None`` with too few rounds.
        high_s: Upper end.
    """

    p50_s: float
    low_s: float | None
    high_s: float | None


def named(device: str, net: str) -> str:
    """A network on a device, for people.

    Example:
        >>> named("jetson-orin-nano", "llama-3.2-1b")
        'LLaMA 3.2-1B, Orin Nano'
    """
    return f"{_NAMES[net]}, {_NAMES[device]}"


def profiled(
    device: str, net: str, *, seed: int, states: Float64 | None = None, repeats: int = 3
) -> StateSamples:
    """Profile a network on a simulated device, by default in every state of the full factorial."""
    found = run_campaign(
        load_device(device), load_work(net), seed=seed, states=states, repeats=repeats
    )
    return StateSamples.simulated(found, with_energy=False)


def on_trace(device: str, states: Float64) -> npt.NDArray[np.bool_]:
    """[N], which states have clocks that the paper's down-up trace passes through."""
    model = load_device(device)
    passed = {_clocks(np.array(row[:3]) / model.max_hz) for row in down_up(model.clocks).rows}
    return np.array([_clocks(state[:3]) in passed for state in states])


def spread(num_states: int, count: int, *, seed: int) -> Rows:
    """Rows drawn at random, ascending."""
    rows = np.random.default_rng([seed, 0x5EED]).permutation(num_states)[:count]
    return np.sort(rows)


def fit(  # noqa: PLR0913 - all named
    kind: str,
    samples: StateSamples,
    *,
    net: str,
    seed: int,
    steps: int | None = None,
    calibration: StateSamples | None = None,
) -> FittedPredictor:
    """Fit a kind as the paper would: its network knows a unit's number for CNNs only."""
    options: dict[str, Any] = {}
    if kind == "mlp":
        options = {"unit_id": net != LM} | ({} if steps is None else {"steps": steps})
    return fit_kind(kind, samples, calibration=calibration, level=LEVEL, seed=seed, options=options)


def read(states: Float64, features: tuple[str, ...]) -> Float64:
    """What a predictor reads of states in the order of the simulated features."""
    return states[:, [SIMULATED_FEATURES.index(name) for name in features]]


def timed(
    calls: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    repeats: int,
    now_s: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time calls in turns, so that whatever disturbs the machine disturbs all alike.

    Args:
        calls: By name. Each is called some times before it counts.
        rounds: How often each has its turn.
        repeats: Calls of one turn; their mean is one sample.
        now_s: Tells time.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for n in range(rounds + 1):
        for name, call in calls.items():
            turn = range(repeats)
            begin_s = now_s()
            for _ in turn:
                call()
            if n:
                samples[name].append((now_s() - begin_s) / repeats)
    return {name: _timing(each) for name, each in samples.items()}


def timing_figure(
    name: str, found: Timing, *, paper: float | None = None, note: str = ""
) -> Figure:
    """A measured time as a figure."""
    return Figure(
        name=name,
        unit="s",
        paper=paper,
        ours=found.p50_s,
        low=found.low_s,
        high=found.high_s,
        provenance="measured",
        note=note,
    )


def _timing(samples: list[float]) -> Timing:
    within = quantile_interval(samples, 0.5)
    finite = math.isfinite(within.low) and math.isfinite(within.high)
    return Timing(
        p50_s=float(np.median(samples)),
        low_s=within.low if finite else None,
        high_s=within.high if finite else None,
    )


def _clocks(ratios: Float64) -> tuple[float, ...]:
    return tuple(np.round(ratios, 6).tolist())


def controller_calls(*, seed: int = 0) -> tuple[dict[str, Callable[[], object]], str]:
    """What a decision can be made of, ready to be timed.

    Args:
        seed: Of the network's weights; its time does not depend on them.

    Returns:
        By name; and why the call through PyTorch is not among them, empty where it is.
    """
    here = case(ORIN, NETS[0])
    names = tuple(unit.name for unit in here.work)
    fitted = predictor(ORIN, NETS[0])
    state = np.array([0.62, 0.5, 0.667, 0.21, 0.37])
    one = _random_mlp(("stage:0",), seed=seed)
    every = _random_mlp(names, seed=seed)
    table = StaticTable(np.ones(len(names)), units=names)
    warm, cold = PredictionCache(table), PredictionCache(table, capacity=1)
    units = itertools.cycle((0, 1))
    policy = make_policy("edgewise", here.inputs)
    costs = StateCosts(at_s=0.0, stage_s=here.costs.stage_s, head_s=here.costs.head_s)
    physical = read(state[None], fitted.predictor.features)[0]

    def publish() -> None:
        fitted.predictor.predict(physical)
        policy.reprice(costs)

    calls: dict[str, Callable[[], object]] = {
        NUMPY: lambda: float(one.predict(state)[0]),
        "network in numpy, all units": lambda: every.predict(state),
        "physical model, all units": lambda: fitted.predictor.predict(physical),
        HIT: lambda: warm.unit_s(state, 0),
        MISS: lambda: cold.unit_s(state, next(units)),
        TABLE: lambda: policy.decide(3, 0.004, 0.0, 0.016),
        PUBLISH: publish,
    }
    try:
        return {TORCH: _torch_call(state.tolist()), **calls}, ""
    except ImportError:
        return (
            calls,
            "PyTorch is not installed: its call is left out (pip install 'edgewise[torch]')",
        )


def _random_mlp(units: tuple[str, ...], *, seed: int) -> Mlp:
    rng = np.random.default_rng(seed)
    arrays: dict[str, Any] = {}
    for group, where in unit_groups(units).items():
        sizes = (len(SIMULATED_FEATURES) + 1, *WIDTHS, 1)
        for n, (before, after) in enumerate(itertools.pairwise(sizes), start=1):
            arrays[f"{group}.w{n}"] = rng.standard_normal((before, after)) / before
            arrays[f"{group}.b{n}"] = np.zeros(after)
        arrays |= {
            f"{group}.in_mean": np.zeros(sizes[0]),
            f"{group}.in_scale": np.ones(sizes[0]),
            f"{group}.out_mean": np.zeros(where.stop - where.start),
            f"{group}.out_scale": np.ones(()),
        }
    return Mlp(arrays, features=SIMULATED_FEATURES, units=units)


def _torch_call(state: list[float]) -> Callable[[], object]:
    """From a list of numbers to a number, as a Python controller calls a network."""
    import torch
    from torch import nn

    inputs = [*state, 0.5]
    net = nn.Sequential(
        nn.Linear(len(inputs), WIDTHS[0]),
        nn.ReLU(),
        nn.Linear(WIDTHS[0], WIDTHS[1]),
        nn.ReLU(),
        nn.Linear(WIDTHS[1], 1),
    ).eval()

    def call() -> float:
        with torch.inference_mode():
            return float(net(torch.tensor([inputs])).item())

    return call
