from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgewise.device.sensors.procfs import CpuUtilisation, make


def test_what_others_use_is_told_from_what_this_process_uses(trees: Any, tmp_path: Path) -> None:
    root = trees.vm(tmp_path)
    sensor = make(root)
    trees.tick(root, busy={0: 1000, 1: 1000}, idle={0: 500, 1: 500}, own=300)
    first = sensor.read(5.0)
    trees.tick(root, busy={0: 1010, 1: 1005}, idle={0: 500, 1: 505}, own=308)
    second = sensor.read(5.1)

    assert first["cpu.utilisation_ratio"].quality == "masked"
    assert "window" in first["cpu.utilisation_ratio"].reason
    assert second["cpu0.utilisation_ratio"].value == 1.0
    assert second["cpu1.utilisation_ratio"].value == 0.5
    assert second["cpu.total_utilisation_ratio"].value == 0.75
    assert second["cpu.utilisation_ratio"].value == pytest.approx(7 / 20)


@dataclass(frozen=True)
class Step:
    length_s: float
    busy: Mapping[int, int]
    idle: Mapping[int, int]
    own: int


def steps(cores: int = 3) -> st.SearchStrategy[list[Step]]:
    ticks = st.integers(0, 20)

    @st.composite
    def one(draw: st.DrawFn) -> Step:
        busy = {core: draw(ticks) for core in range(cores)}
        return Step(
            length_s=draw(st.sampled_from([0.01, 0.05, 0.1, 0.25])),
            busy=busy,
            idle={core: draw(ticks) for core in range(cores)},
            own=draw(st.integers(0, sum(busy.values()))),
        )

    return st.lists(one(), min_size=2, max_size=20)


@settings(max_examples=40)
@given(steps=steps(), window_s=st.sampled_from([0.1, 0.2]))
def test_utilisation_from_counters_is_the_truth_at_every_step(
    trees: Any, tmp_path_factory: pytest.TempPathFactory, steps: list[Step], window_s: float
) -> None:
    root = tmp_path_factory.getbasetemp() / "counters"
    sensor = CpuUtilisation(root, window_s=window_s)
    # Since boot the machine was nearly idle: who took that for the present would be far off.
    busy, idle, own = dict.fromkeys(range(3), 7), dict.fromkeys(range(3), 1_000_000), 7
    trees.tick(root, busy=busy, idle=idle, own=own)
    sensor.read(0.0)
    now_s, starts_s = 0.0, [0.0]
    for number, step in enumerate(steps):
        now_s += step.length_s
        busy = {core: ticks + step.busy[core] for core, ticks in busy.items()}
        idle = {core: ticks + step.idle[core] for core, ticks in idle.items()}
        own += step.own
        trees.tick(root, busy=busy, idle=idle, own=own)

        found = sensor.read(now_s)

        # The truth: the fewest of the latest steps that make up a window, added up.
        first = max(
            (i for i, at in enumerate(starts_s) if now_s - at >= window_s - 1e-6), default=-1
        )
        starts_s.append(now_s)
        if first < 0:
            assert {each.value for name, each in found.items() if "utilisation" in name} == {None}
            continue
        window = steps[first : number + 1]
        spent_busy = [sum(each.busy[core] for each in window) for core in range(3)]
        spent = [sum(each.busy[c] + each.idle[c] for each in window) for c in range(3)]
        for core in range(3):
            expected = spent_busy[core] / spent[core] if spent[core] else None
            assert found[f"cpu{core}.utilisation_ratio"].value == expected
        others = sum(spent_busy) - sum(each.own for each in window)
        for name, ticks in {"cpu.total_": sum(spent_busy), "cpu.": others}.items():
            expected = ticks / sum(spent) if sum(spent) else None
            assert found[f"{name}utilisation_ratio"].value == expected


def test_a_core_that_goes_offline_is_masked_and_the_others_go_on(
    trees: Any, tmp_path: Path
) -> None:
    root = trees.orin_nano_jp6(tmp_path)
    sensor = make(root)
    sensor.read(0.0)
    cores = dict.fromkeys(range(4), 510)
    trees.take_offline(root, {4, 5})
    trees.tick(root, busy=cores, idle=dict.fromkeys(range(4), 9510), own=100)
    away = sensor.read(0.1)
    trees.tick(root, busy={**cores, 5: 500}, idle=dict.fromkeys([*range(4), 5], 9530), own=100)
    back = sensor.read(0.2)
    trees.tick(root, busy={**cores, 5: 510}, idle=dict.fromkeys([*range(4), 5], 9540), own=100)
    later = sensor.read(0.3)

    assert away["cpu5.utilisation_ratio"].quality == "masked"
    assert "offline" in away["cpu5.utilisation_ratio"].reason
    assert away["cpu.total_utilisation_ratio"].value == 0.5
    assert "came online" in back["cpu5.utilisation_ratio"].reason
    assert back["cpu.total_utilisation_ratio"].value == 0.0
    assert back["cpu4.utilisation_ratio"].quality == "masked"
    assert later["cpu5.utilisation_ratio"].value == 0.5


def test_counters_that_step_back_never_give_a_ratio_outside_0_to_1(
    trees: Any, tmp_path: Path
) -> None:
    root = trees.vm(tmp_path)
    sensor = make(root)
    trees.tick(root, busy={0: 1000, 1: 1000}, idle={0: 500, 1: 500}, own=300)
    sensor.read(0.0)
    trees.tick(root, busy={0: 1010, 1: 900}, idle={0: 490, 1: 510}, own=200)
    found = sensor.read(0.1)

    assert found["cpu0.utilisation_ratio"].value == 1.0
    assert found["cpu1.utilisation_ratio"].value == 0.0
    assert found["cpu.utilisation_ratio"].value == 0.5


def test_a_window_without_a_tick_has_no_value(trees: Any, tmp_path: Path) -> None:
    sensor = make(trees.vm(tmp_path))
    sensor.read(0.0)

    found = sensor.read(0.1)

    assert found["cpu.utilisation_ratio"].value is None
    assert "no tick" in found["cpu0.utilisation_ratio"].reason


def test_a_clock_that_is_set_back_begins_a_new_window(trees: Any, tmp_path: Path) -> None:
    root = trees.vm(tmp_path)
    sensor = make(root)
    sensor.read(1000.0)
    trees.tick(root, busy={0: 200, 1: 200}, idle={0: 100, 1: 100}, own=10)

    assert sensor.read(3.0)["cpu.utilisation_ratio"].quality == "masked"

    trees.tick(root, busy={0: 205, 1: 205}, idle={0: 105, 1: 105}, own=10)

    assert sensor.read(3.1)["cpu.utilisation_ratio"].value == 0.5


def test_counters_that_disappear_keep_their_names_with_a_reason(trees: Any, tmp_path: Path) -> None:
    root = trees.vm(tmp_path)
    sensor = make(root)
    names = set(sensor.read(0.0))
    trees.write(root, {"proc/stat": "intr 1 2 3\n"})

    found = sensor.read(0.1)

    assert set(found) == names
    assert "lists no core" in found["cpu1.utilisation_ratio"].reason


def test_without_its_own_time_only_the_total_is_known(trees: Any, tmp_path: Path) -> None:
    root = trees.vm(tmp_path)
    sensor = make(root)
    sensor.read(0.0)
    trees.tick(root, busy={0: 110, 1: 110}, idle={0: 110, 1: 110}, own=10)
    trees.write(root, {"proc/self/stat": "garbage\n"})

    found = sensor.read(0.1)

    assert found["cpu.total_utilisation_ratio"].value == 0.5
    assert found["cpu.utilisation_ratio"].quality == "unsupported"


def test_pressure_is_a_ratio_where_the_kernel_tells_it(trees: Any, tmp_path: Path) -> None:
    root = trees.vm(tmp_path)
    sensor = make(root)

    assert sensor.read(0.0)["cpu.pressure_ratio"].quality == "unsupported"

    some = "some avg10=12.50 avg60=2.36 avg300=3.98 total=2930653063\n"
    trees.write(root, {"proc/pressure/cpu": some + some.replace("some", "full")})

    assert sensor.read(1.0)["cpu.pressure_ratio"].value == 0.125

    trees.write(root, {"proc/pressure/cpu": "some avg10=nan avg60=1\n"})

    assert sensor.read(2.0)["cpu.pressure_ratio"].quality == "unsupported"


def test_this_machine_is_somewhere_between_idle_and_busy() -> None:
    with make(Path("/")) as sensor:
        sensor.read(0.0)

        assert set(sensor.read(0.01)) >= {"cpu.utilisation_ratio", "cpu.total_utilisation_ratio"}
