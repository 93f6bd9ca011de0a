from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from edgewise.device.simulated import (
    ClockLevels,
    Contention,
    DeviceModel,
    Levels,
    StepTrace,
    Thermal,
    Trace,
    down_up,
    idle_then_spike,
    load_device,
    random_walk,
    static_max,
    static_min,
    thermal_throttle,
)
from edgewise.device.simulated.traces import step_index
from edgewise.errors import ConfigError


def clocks_of(cpu: int, gpu: int, emc: int) -> ClockLevels:
    """So many levels; the frequency of a level is its number plus one."""
    lists = (tuple(float(k + 1) for k in range(n)) for n in (cpu, gpu, emc))
    return ClockLevels(**dict(zip(("cpu_hz", "gpu_hz", "emc_hz"), lists, strict=True)))


SMALL = clocks_of(5, 3, 2)


def walked(sizes: tuple[int, int, int], steps: int) -> list[tuple[float, ...]]:
    """The paper's description as a machine: fall until all are at the end, then rise."""
    at, falls, found = [n - 1 for n in sizes], True, []
    for _ in range(steps):
        found.append(tuple(float(k + 1) for k in at))
        if falls and not any(at):
            falls = False
        elif not falls and at == [n - 1 for n in sizes]:
            falls = True
        at = [max(k - 1, 0) if falls else min(k + 1, n - 1) for k, n in zip(at, sizes, strict=True)]
    return found


@given(st.tuples(*[st.integers(1, 9)] * 3))
def test_the_down_up_trace_is_the_papers_description_step_by_step(
    sizes: tuple[int, int, int],
) -> None:
    trace = down_up(clocks_of(*sizes))
    steps = 3 * len(trace.rows) + 5
    found = [tuple(trace.levels((k + 0.5) * 0.01)[:3]) for k in range(steps)]
    assert found == walked(sizes, steps)


@given(st.tuples(*[st.integers(2, 12)] * 3))
def test_the_way_up_is_not_the_way_down_unless_all_lists_are_as_long(
    sizes: tuple[int, int, int],
) -> None:
    rows = down_up(clocks_of(*sizes)).rows
    longest = max(sizes)
    assert len(rows) == 2 * (longest - 1)
    assert len(set(rows)) == (longest if len(set(sizes)) == 1 else 2 * (longest - 1))


@pytest.mark.parametrize(
    ("name", "levels", "states", "period_s"),
    [("jetson-orin-nano", (22, 8, 4), 42, 0.42), ("jetson-xavier-nx", (25, 15, 6), 48, 0.48)],
)
def test_the_devices_have_the_papers_levels_and_period(
    name: str, levels: tuple[int, ...], states: int, period_s: float
) -> None:
    clocks = load_device(name).clocks
    trace = down_up(clocks)
    assert tuple(len(each) for each in clocks.lists) == levels
    assert len(set(trace.rows)) == states
    assert trace.period_s == pytest.approx(period_s, abs=1e-12)


def test_the_gpu_of_the_orin_is_at_its_floor_for_a_third_of_the_time() -> None:
    clocks = load_device("jetson-orin-nano").clocks
    rows = down_up(clocks).rows
    at_floor = sum(row.f_gpu_hz == clocks.gpu_hz[0] for row in rows)
    assert at_floor == 15  # from 70 ms to 210 ms, and the first step of the way up


@given(st.integers(-10_000, 10_000), st.sampled_from([0.01, 0.1, 1 / 3, 0.42, 1e-4]))
def test_a_step_holds_its_start_and_not_its_end(k: int, step_s: float) -> None:
    assert step_index(k * step_s, step_s) == k
    assert step_index(math.nextafter(k * step_s, -math.inf), step_s) == k - 1


ALL_TRACES: list[Trace] = [
    static_max(SMALL),
    static_min(SMALL),
    down_up(SMALL),
    idle_then_spike(SMALL),
    random_walk(SMALL, seed=1, steps=50, max_utilisation=0.5),
    thermal_throttle(SMALL, lambda _: 25.0, duration_s=10.0),
    Contention(base=down_up(SMALL), off_s=0.123, on_s=0.071),
    Contention(base=Contention(base=static_max(SMALL)), off_s=0.07, on_s=0.03, u_cpu=0.9),
]


@pytest.mark.parametrize("trace", ALL_TRACES, ids=lambda t: t.name)
@given(at_s=st.floats(0.0, 30.0), part=st.floats(0.0, 1.0, exclude_max=True))
def test_levels_hold_until_the_next_change(trace: Trace, at_s: float, part: float) -> None:
    change_s = trace.next_change_s(at_s)
    assert change_s > at_s
    between_s = at_s + part * (min(change_s, at_s + 100.0) - at_s)
    if between_s < change_s:
        assert trace.levels(between_s) == trace.levels(at_s)
        assert trace.next_change_s(between_s) == change_s


@pytest.mark.parametrize("trace", ALL_TRACES, ids=lambda t: t.name)
def test_walking_from_change_to_change_sees_every_level(trace: Trace) -> None:
    at_s, seen = 0.0, set()
    while at_s < 4.0:
        seen.add(trace.levels(at_s))
        at_s = trace.next_change_s(at_s)
    assert seen == {trace.levels(k * 1e-3 + 5e-4) for k in range(4000)}


def test_static_traces_stay_at_their_end(device: DeviceModel) -> None:
    top, floor = static_max(device.clocks), static_min(device.clocks)
    assert top.levels(123.4)[:3] == tuple(device.max_hz)
    assert floor.levels(123.4)[:3] == tuple(each[0] for each in device.clocks.lists)
    assert top.next_change_s(0.0) == floor.next_change_s(0.0) == math.inf


def test_after_a_pause_clocks_are_low_and_climb_to_the_top() -> None:
    clocks = load_device("jetson-orin-nano").clocks
    trace = idle_then_spike(clocks, idle_s=0.2, busy_s=0.3)
    lowest, highest = clocks.at((0, 0, 0)), clocks.at(clocks.top)
    assert trace.levels(0.0) == trace.levels(0.2) == lowest
    assert trace.levels(0.2 + 0.205) != highest
    assert trace.levels(0.2 + 0.215) == trace.levels(0.499) == highest
    assert trace.levels(0.501) == lowest  # it repeats


def test_a_neighbour_pauses_first_then_works_and_adds_to_what_is_used() -> None:
    busy = StepTrace(name="busy", step_s=1.0, rows=(Levels(1.0, 1.0, 1.0, 0.5, 0.1),))
    trace = Contention(base=busy, u_cpu=0.75, u_gpu=0.25, off_s=2.0, on_s=1.0)
    used = [trace.levels(k + 0.5)[3:] for k in range(6)]
    assert used == [(0.5, 0.1), (0.5, 0.1), (1.0, 0.35)] * 2
    assert [trace.next_change_s(t) for t in (0.0, 1.9, 2.0, 2.9, 3.0)] == [2.0, 2.0, 3.0, 3.0, 5.0]


@pytest.mark.parametrize("wrong", [{"on_s": 0.0}, {"off_s": -1.0}, {"u_cpu": 1.5}, {"u_gpu": -0.1}])
def test_a_neighbour_with_impossible_numbers_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="neighbour"):
        Contention(base=static_max(SMALL), **wrong)


def test_a_random_walk_is_fixed_by_its_seed_and_moves_by_one_level() -> None:
    walk = random_walk(SMALL, seed=3, steps=400, max_utilisation=0.5)
    assert walk == random_walk(SMALL, seed=3, steps=400, max_utilisation=0.5)
    assert walk.rows != random_walk(SMALL, seed=4, steps=400, max_utilisation=0.5).rows
    for before, after in zip(walk.rows, walk.rows[1:], strict=False):
        assert all(abs(b - a) <= 1 for b, a in zip(before[:3], after[:3], strict=True))
        assert all(abs(b - a) <= 0.0501 for b, a in zip(before[3:], after[3:], strict=True))
    for column, allowed in zip(zip(*walk.rows, strict=True), (5, 3, 2, 11, 11), strict=True):
        assert len(set(column)) == allowed
    assert max(row.u_cpu for row in walk.rows) == 0.5


def test_temperature_follows_its_equation() -> None:
    thermal = Thermal()
    power_w = {level + 1.0: 10.0 + 3.0 * level for level in range(5)}
    trace = thermal_throttle(SMALL, lambda row: power_w[row.f_cpu_hz], duration_s=20.0)
    celsius, slice_s, worst = thermal.start_celsius, 1e-3, 0.0
    for k in range(20_000):  # Euler in slices of 1 ms, on the levels that the trace says
        if k % 100 == 0:
            found = trace.temperature_celsius(k * slice_s + 1e-9)
            assert found is not None
            worst = max(worst, abs(found - celsius))
        power = power_w[trace.levels((k + 0.5) * slice_s).f_cpu_hz]
        celsius += slice_s / 12.0 * (35.0 + 3.0 * power - celsius)
    assert worst < 0.01


def test_full_load_throttles_both_devices_and_holds_them_near_the_trip_point(
    device: DeviceModel,
) -> None:
    trace = thermal_throttle(device.clocks, device.full_load_w)
    highest, last = device.clocks.at(device.clocks.top), trace.rows[-1]
    assert trace.rows[0] == highest
    assert last.f_cpu_hz < highest.f_cpu_hz
    assert last.f_gpu_hz < highest.f_gpu_hz
    assert all(row.f_emc_hz == highest.f_emc_hz for row in trace.rows)
    assert 80.0 < max(trace.celsius) < 82.0
    assert min(trace.celsius[300:]) > 76.0
    assert trace.levels(1e6) == last
    assert trace.next_change_s(1e6) == math.inf


def test_a_cool_device_is_not_throttled() -> None:
    trace = thermal_throttle(SMALL, lambda _: 10.0)  # settles at 65 degrees
    assert set(trace.rows) == {SMALL.at(SMALL.top)}


def test_a_scenario_without_heat_has_no_temperature() -> None:
    assert down_up(SMALL).temperature_celsius(1.0) is None
    assert Contention(base=down_up(SMALL)).temperature_celsius(1.0) is None


@pytest.mark.parametrize("wrong", [(), (2.0, 1.0), (1.0, 1.0), (0.0, 1.0)])
def test_levels_must_ascend_from_above_zero(wrong: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="ascending"):
        ClockLevels(cpu_hz=(1.0,), gpu_hz=wrong, emc_hz=(1.0,))


def test_a_trace_without_rows_or_with_too_few_temperatures_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a row"):
        StepTrace(name="empty", step_s=1.0, rows=())
    with pytest.raises(ConfigError, match="one temperature per row"):
        StepTrace(name="short", step_s=1.0, rows=(SMALL.at((0, 0, 0)),) * 2, celsius=(1.0,))
