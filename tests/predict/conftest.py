"""A device whose costs are known exactly, to compare predictors with."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from edgewise.device.state import FEATURES
from edgewise.predict.state_samples import StateSamples

Float64 = npt.NDArray[np.float64]


def grid_states() -> Float64:
    """Eleven CPU, six GPU and four memory clocks, three loads of each; all of the quota."""
    loads = (0.0, 0.4, 0.8)
    clocks = (np.linspace(0.1, 1, 11), np.linspace(0.3, 1, 6), np.linspace(0.25, 1, 4))
    states = np.array(list(itertools.product(*clocks, loads, loads)))
    return np.column_stack([states, np.ones(len(states))])


def true_costs(states: Float64, *, stages: int = 6, heads: int = 3) -> Float64:
    """A constant + launch/f_cpu + compute/f_gpu + traffic/f_emc, each longer under load."""
    units = np.arange(stages + heads)
    is_head = units >= stages
    launch = np.where(is_head, 0.03e-3, 0.08e-3)
    compute = np.where(is_head, 0.1e-3, 0.3e-3 + 0.05e-3 * units)
    traffic = np.where(is_head, 0.05e-3, 0.3e-3 - 0.02e-3 * units)
    cpu, gpu, emc, cpu_load, gpu_load = states[:, :5].T[:, :, None]
    costs: Float64 = (
        0.02e-3
        + launch * (1 + 0.8 * cpu_load) / cpu
        + compute * (1 + gpu_load) / gpu
        + traffic * (1 + 0.3 * cpu_load + 0.6 * gpu_load) / emc
    )
    return costs


def sample(
    states: Float64 | None = None,
    *,
    seed: int = 0,
    noise: float = 0.015,
    repeats: int = 3,
    stages: int = 6,
    heads: int = 3,
    joules: bool = False,
) -> StateSamples:
    """Observations with log-normal noise; joules are two watts of them."""
    states = grid_states() if states is None else states
    true = true_costs(states, stages=stages, heads=heads)
    rng = np.random.default_rng(seed)
    shape = (len(states), repeats, stages + heads)
    seconds = true[:, None, :] * np.exp(noise * rng.standard_normal(shape))
    return StateSamples(
        features=FEATURES,
        states=states,
        units=tuple(f"stage:{k}" for k in range(stages)) + tuple(f"head:{k}" for k in range(heads)),
        seconds=seconds,
        provenance="simulated",
        joules=2.0 * seconds if joules else None,
        elapsed_s=0.5 * len(states),
    )


@pytest.fixture(scope="session")
def synthetic() -> Callable[..., StateSamples]:
    """``synthetic(states=None, seed=0, noise=0.015, ...)``: samples of the device."""
    return sample


@pytest.fixture(scope="session")
def truth() -> Callable[..., Float64]:
    """``truth(states)``: what units cost without noise, [N, U]."""
    return true_costs
