from __future__ import annotations

import functools
import math

import numpy as np
import pytest

from edgewise.clock import VirtualClock
from edgewise.device.simulated import (
    SIMULATED_FEATURES,
    Contention,
    DeviceModel,
    Levels,
    SimulatedClock,
    SimulatedDevice,
    SimulatedMonitor,
    StepTrace,
    Trace,
    down_up,
    full_factorial,
    load_device,
    load_work,
    random_walk,
    run_campaign,
    static_max,
    thermal_throttle,
)
from edgewise.device.simulated.jetson import Power
from edgewise.device.state import FEATURES
from edgewise.errors import ConfigError

ORIN = load_device("jetson-orin-nano")
RESNET = load_work("resnet50")
LLAMA = load_work("llama-3.2-1b")


def make(trace: Trace, *, model: DeviceModel = ORIN, seed: int = 0) -> SimulatedDevice:
    return SimulatedDevice(model, trace, RESNET, seed=seed)


def held(levels: Levels) -> StepTrace:
    return StepTrace(name="held", step_s=1.0, rows=(levels,))


def test_the_time_of_a_unit_is_the_documented_sum(device: DeviceModel) -> None:
    units = (*RESNET, *LLAMA)
    levels = device.clocks.at((3, 2, 1), u_cpu=0.4, u_gpu=0.2)
    simulated = SimulatedDevice(device, held(levels), LLAMA, seed=0)
    top_cpu_hz = device.clocks.cpu_hz[-1]
    states = [[f / t for f, t in zip(levels[:3], device.max_hz, strict=True)] + [0.4, 0.2]]
    found = device.costs_s(units, np.array(states))[0]
    for unit, seconds in zip(units, found, strict=True):
        # As cycles over clocks: the constants of the docs, written out once more.
        cycles = 0.1 * device.launch_s[unit.kind] * top_cpu_hz
        fixed_s = 0.9 * device.launch_s[unit.kind]
        launches_s = unit.launches * (fixed_s + cycles / levels.f_cpu_hz) * (1 + 0.6 * 0.4)
        rate = device.compute_efficiency * device.flops_per_cycle * levels.f_gpu_hz
        compute_s = unit.flops / rate * (1 + 1.0 * 0.2)
        traffic_s = unit.traffic_bytes / (0.95 * 32 * levels.f_emc_hz) * (1 + 0.3 * 0.4 + 0.5 * 0.2)
        assert seconds == pytest.approx(launches_s + compute_s + traffic_s, rel=1e-12)
        if unit.kind == "token":
            assert simulated.true_median_s(unit.name, levels) == pytest.approx(seconds, rel=1e-12)


def by_tiny_steps(simulated: SimulatedDevice, unit: str, start_s: float, work: float) -> float:
    """Time until the progress reaches ``work``, added up in slices of 2 microseconds."""
    slice_s, k, done = 2e-6, 0, 0.0
    while done < work:
        levels = simulated.trace.levels(start_s + (k + 0.5) * slice_s)
        done += slice_s / simulated.true_median_s(unit, levels)
        k += 1
    return k * slice_s


@pytest.mark.parametrize(
    "trace",
    [
        down_up(ORIN.clocks),
        random_walk(ORIN.clocks, seed=2, steps=200, step_s=0.0007, max_utilisation=0.8),
        Contention(base=down_up(ORIN.clocks), off_s=0.013, on_s=0.0031),
    ],
    ids=lambda t: t.name,
)
@pytest.mark.parametrize("start_s", [0.0, 0.0093, 0.0312, 0.2, 0.2099999, 1.2345])
def test_a_unit_takes_what_tiny_steps_through_the_trace_add_up_to(
    trace: Trace, start_s: float
) -> None:
    simulated = make(trace)
    noise = make(static_max(ORIN.clocks))
    at_top = ORIN.clocks.at(ORIN.clocks.top)
    for unit, request in (("stage:0", 7), ("stage:6", 7), ("head:0", 8)):
        factor = noise.cost_s(unit, 0.0, request=request) / noise.true_median_s(unit, at_top)
        expected_s = by_tiny_steps(simulated, unit, start_s, factor)
        found_s = simulated.cost_s(unit, start_s, request=request)
        assert found_s == pytest.approx(expected_s, abs=6e-6)


def test_a_unit_that_starts_at_a_change_of_levels_is_priced_after_it() -> None:
    top, floor = ORIN.clocks.at(ORIN.clocks.top), ORIN.clocks.at((0, 0, 0))
    simulated = make(StepTrace(name="drop", step_s=0.1, rows=(top, floor), repeats=False))
    noise = make(static_max(ORIN.clocks)).cost_s("head:3", 0.0, request=0)
    ratio = noise / simulated.true_median_s("head:3", top)
    at_floor_s = simulated.true_median_s("head:3", floor)
    assert simulated.cost_s("head:3", 0.1, request=0) == pytest.approx(ratio * at_floor_s)


def test_the_luck_of_a_request_is_the_same_whatever_was_asked_before() -> None:
    first, second = make(down_up(ORIN.clocks)), make(down_up(ORIN.clocks))
    asked = [(f"stage:{k}", 0.01 * k, request) for k in range(8) for request in (0, 255, 256, 9000)]
    forward = [first.cost_s(unit, at_s, request=r) for unit, at_s, r in asked]
    backward = [second.cost_s(unit, at_s, request=r) for unit, at_s, r in reversed(asked)]
    assert forward == backward[::-1]
    assert len(set(forward)) == len(forward)


def test_another_seed_brings_another_luck() -> None:
    costs = {
        make(static_max(ORIN.clocks), seed=s).cost_s("stage:0", 0.0, request=0) for s in range(5)
    }
    assert len(costs) == 5


def test_noise_has_the_error_that_its_distribution_says(device: DeviceModel) -> None:
    simulated = SimulatedDevice(device, static_max(device.clocks), RESNET, seed=1)
    median_s = simulated.true_median_s("stage:3", device.clocks.at(device.clocks.top))
    ratios = np.array(
        [simulated.cost_s("stage:3", 0.0, request=r) / median_s for r in range(20_000)]
    )
    outliers = ratios > 1.04
    assert outliers.mean() == pytest.approx(0.01, abs=0.003)
    # Folded normal: mean sigma * sqrt(2 / pi), 95th percentile 1.96 sigma.
    errors = np.abs(ratios[~outliers] - 1)
    assert errors.mean() == pytest.approx(device.noise.sigma * math.sqrt(2 / math.pi), rel=0.03)
    assert np.quantile(errors, 0.95) == pytest.approx(1.96 * device.noise.sigma, rel=0.03)
    assert np.median(ratios) == pytest.approx(1.0, abs=5e-4)


def test_a_neighbour_makes_every_unit_slower_and_an_idle_one_none() -> None:
    free = ORIN.clocks.at(ORIN.clocks.top)
    simulated = make(held(free))
    for unit in simulated.units:
        alone_s = simulated.true_median_s(unit, free)
        for busy in ({"u_cpu": 0.5}, {"u_gpu": 0.5}):
            assert simulated.true_median_s(unit, free._replace(**busy)) > 1.01 * alone_s


@pytest.mark.parametrize("start_s", [0.0, 0.0093, 0.2099])
def test_energy_is_power_added_up_over_the_trace(start_s: float) -> None:
    simulated = make(down_up(ORIN.clocks))
    power_w = functools.cache(lambda levels: make(held(levels)).energy_j("stage:2", 0.0, 1.0))
    duration_s, slice_s, joules = 0.0317, 1e-5, 0.0
    for k in range(3170):
        levels = simulated.trace.levels(start_s + (k + 0.5) * slice_s)
        joules += power_w(levels) * slice_s
    found = simulated.energy_j("stage:2", start_s, duration_s)
    assert found == pytest.approx(joules, rel=2e-4)


def test_power_lies_between_idle_and_the_highest_mode(device: DeviceModel) -> None:
    highest_w = {"jetson-orin-nano": 25.0, "jetson-xavier-nx": 20.0}[device.name]
    states = full_factorial(device)
    watts = device.watts(RESNET, states)
    assert watts.min() > device.power.idle_w
    assert watts.max() <= highest_w + 1e-9
    assert device.full_load_w(device.clocks.at(device.clocks.top)) == pytest.approx(highest_w)


def test_power_is_that_of_its_law() -> None:
    power = Power(idle_w=1.0, peak_w=(2.0, 3.0, 4.0), voltage_floor=(0.5, 0.6, 1.0))
    found = power.watts(np.array([0.5, 0.25, 0.1]), np.array([1.0, 0.5, 0.25]))
    cpu = 2.0 * 0.5 * 0.75**2
    gpu = 3.0 * 0.25 * 0.7**2 * 0.5
    emc = 4.0 * 0.1 * 0.25
    assert float(found) == pytest.approx(1.0 + cpu + gpu + emc)


def test_the_state_says_what_a_monitor_would_say(device: DeviceModel) -> None:
    levels = device.clocks.at((4, 3, 2), u_cpu=0.3, u_gpu=0.2)
    state = SimulatedDevice(device, held(levels), RESNET, seed=0).state(1.5)
    assert state.at_s == 1.5
    assert all(state.value(name) is not None for name in FEATURES)
    for part, hz, top in zip(("cpu", "gpu", "emc"), levels[:3], device.max_hz, strict=True):
        assert state.value(f"{part}.frequency_hz") == hz
        assert state.value(f"{part}.frequency_ratio") == pytest.approx(hz / top)
    assert state.value("cpu.utilisation_ratio") == 0.3
    assert state.value("gpu.utilisation_ratio") == 0.2
    watts = state.value("power.total_w")
    assert watts is not None
    assert device.power.idle_w < watts < 25.0
    assert state.value("thermal.gpu-thermal_celsius") is None
    assert "no temperature" in state.reason("thermal.gpu-thermal_celsius")


def test_the_state_under_throttling_has_the_temperature() -> None:
    trace = thermal_throttle(ORIN.clocks, ORIN.full_load_w)
    assert make(trace).state(0.0).value("thermal.cpu-thermal_celsius") == 70.0


def test_a_monitor_reads_at_its_own_times() -> None:
    clock = VirtualClock()
    simulated = make(down_up(ORIN.clocks))
    now = SimulatedMonitor(simulated, clock)
    delayed = SimulatedMonitor(simulated, clock, period_s=0.025)
    clock.sleep_s(0.0449)
    assert now.latest().at_s == clock.now_s()
    assert delayed.latest().at_s == 0.025
    assert delayed.latest() == simulated.state(0.025)
    with pytest.raises(ConfigError, match="zero seconds or more"):
        SimulatedMonitor(simulated, clock, period_s=-1.0)


def test_a_monitor_on_a_ticking_clock_sees_every_level_of_the_trace() -> None:
    clock = SimulatedClock()
    simulated = make(down_up(ORIN.clocks))
    monitor = SimulatedMonitor(simulated, clock)
    seen: list[float | None] = []
    clock.every(0.01, lambda _: seen.append(monitor.latest().value("cpu.frequency_hz")))
    clock.sleep_s(0.4205)
    expected = [row.f_cpu_hz for row in down_up(ORIN.clocks).rows]
    assert seen == [*expected[1:], expected[0]]


def test_a_full_campaign_has_the_papers_size_and_is_fixed_by_its_seed() -> None:
    states = full_factorial(ORIN)
    assert states.shape == (17_600, 5)
    assert len(np.unique(states, axis=0)) == 17_600
    assert [len(np.unique(column)) for column in states.T] == [22, 8, 4, 5, 5]
    campaign = run_campaign(ORIN, RESNET, seed=3)
    assert campaign.features == SIMULATED_FEATURES == FEATURES[:5]
    assert campaign.seconds.shape == campaign.joules.shape == (17_600, 3, 16)
    again = run_campaign(ORIN, RESNET, seed=3)
    assert np.array_equal(campaign.seconds, again.seconds)
    assert not np.array_equal(campaign.seconds, run_campaign(ORIN, RESNET, seed=4).seconds)


def test_records_scatter_round_the_noise_free_costs() -> None:
    states = full_factorial(ORIN)[::300]
    campaign = run_campaign(ORIN, RESNET, seed=0, states=states, repeats=200)
    costs_s = make(static_max(ORIN.clocks)).costs_s(states)
    ratio = np.median(campaign.seconds, axis=1) / costs_s
    assert np.abs(ratio - 1).max() < 0.005
    power_w = campaign.joules / campaign.seconds
    np.testing.assert_allclose(power_w[:, 0], ORIN.watts(RESNET, states))
    # Two passes over all units and a tenth of a second per record.
    expected_s = 2 * campaign.seconds.sum() + 0.1 * len(states) * 200
    assert campaign.elapsed_s == pytest.approx(expected_s)


def test_what_does_not_exist_is_named_with_what_does() -> None:
    with pytest.raises(ConfigError, match="stage:7"):
        make(static_max(ORIN.clocks)).cost_s("stage:77", 0.0, request=0)
    with pytest.raises(ConfigError, match="jetson-orin-nano"):
        load_device("jetson-orin")
    with pytest.raises(ConfigError, match="resnet50"):
        load_work("resnet5")
