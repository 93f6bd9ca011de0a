from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgewise.device.sensors.rapl import Zone, make


def _load(name: str) -> Any:
    path = Path(__file__).parents[1] / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


trees = _load("energy_trees")

Plant = Callable[[Mapping[str, str]], Path]

ZONES = {"package-0", "package-0.core", "package-0.uncore", "psys"}


def count(energy_uj: int, path: str = trees.PACKAGE) -> dict[str, str]:
    return {f"{path}/energy_uj": f"{energy_uj}\n"}


def test_zones_are_named_after_what_they_are_part_of_and_the_duplicate_is_left_out(
    plant: Plant,
) -> None:
    found = make(plant(trees.x86_laptop(mmio=True))).read(0.0)

    assert set(found) == {f"energy.{zone}_j" for zone in ZONES} | {
        f"power.{zone}_w" for zone in ZONES
    }
    assert {found[f"energy.{zone}_j"].value for zone in ZONES} == {0.0}


def test_the_duplicate_counts_where_the_package_itself_is_not_there(plant: Plant) -> None:
    root = plant(trees.zone(trees.MMIO, "package-0", 1_000_000))
    sensor = make(root)
    sensor.read(0.0)
    plant(count(3_000_000, trees.MMIO))

    assert sensor.read(1.0)["energy.package-0_j"].value == pytest.approx(2.0)


def test_a_zone_of_the_second_package_bears_its_name(plant: Plant) -> None:
    # The number of a zone need not be that of the package: psys may come between.
    files = trees.x86_laptop() | trees.zone(f"{trees.RAPL}/intel-rapl:2", "package-1", 7)
    root = plant(files | trees.zone(f"{trees.RAPL}/intel-rapl:2:0", "dram", 7))

    assert "energy.package-1.dram_j" in make(root).read(0.0)


def test_energy_and_power_are_right_across_a_wrap(plant: Plant) -> None:
    root = plant(trees.x86_laptop())  # 5 J before the end of its range
    sensor = make(root)
    first = sensor.read(10.0)
    plant(count(trees.RANGE_UJ - 2_000_000))
    before = sensor.read(10.1)
    plant(count(3_000_000))
    after = sensor.read(10.6)

    assert first["power.package-0_w"].value is None
    assert "second reading" in first["power.package-0_w"].reason
    assert before["energy.package-0_j"].value == pytest.approx(3.0)
    assert before["power.package-0_w"].value == pytest.approx(30.0)
    assert after["energy.package-0_j"].value == pytest.approx(8.0)
    assert after["power.package-0_w"].value == pytest.approx(10.0)


@settings(max_examples=50)
@given(
    range_uj=st.integers(10**6, 2**40),
    start=st.floats(0, 1, exclude_max=True),
    shares=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=8),
)
def test_what_is_accumulated_is_the_truth_at_every_reading(
    range_uj: int, start: float, shares: list[float]
) -> None:
    root = Path(tempfile.mkdtemp(prefix="edgewise-rapl-"))
    try:
        counter = root / trees.PACKAGE / "energy_uj"
        counter.parent.mkdir(parents=True)
        for name, text in trees.zone(trees.PACKAGE, "package-0", 0, range_uj=range_uj).items():
            (root / name).write_text(text)
        raw_uj, true_uj, now_s = int(start * range_uj), 0, 0.0
        counter.write_text(f"{raw_uj}\n")
        zone = Zone(counter.parent)
        zone.read(now_s)
        for share in shares:
            step_uj = int(share * range_uj)
            true_uj += step_uj
            raw_uj = (raw_uj + step_uj) % range_uj
            counter.write_text(f"{raw_uj}\n")
            duration_s = 1.0 + step_uj * 1e-6 / 200  # at most 200 W, as machines have it
            now_s += duration_s
            energy, power = zone.read(now_s)

            if true_uj == 0:
                assert energy.value is power.value is None
            else:
                assert energy.value == pytest.approx(true_uj * 1e-6, rel=1e-12)
                assert power.value == pytest.approx(step_uj * 1e-6 / duration_s, rel=1e-6)
        zone.close()
    finally:
        shutil.rmtree(root)


def test_a_counter_that_was_set_back_to_zero_is_not_taken_for_a_wrap(plant: Plant) -> None:
    root = plant(trees.x86_laptop(energy_uj=150_000_000_000))
    sensor = make(root)
    sensor.read(0.0)
    plant(count(150_002_000_000))
    sensor.read(0.1)
    plant(count(1_000_000))  # as after sleep: not 112 kJ in a tenth of a second

    found = sensor.read(0.2)

    assert found["energy.package-0_j"].value == pytest.approx(3.0)
    assert found["power.package-0_w"].value == pytest.approx(10.0)


def test_counters_for_root_only_are_denied_and_never_guessed(
    plant: Plant, as_somebody: Callable[[], None]
) -> None:
    root = plant(trees.x86_laptop())
    trees.for_root_only(root)
    as_somebody()

    found = make(root).read(0.0)

    assert {each.quality for each in found.values()} == {"denied"}
    assert {each.value for each in found.values()} == {None}
    reason = found["energy.package-0_j"].reason
    assert "root only" in reason
    assert f"sudo chmod a+r {root / trees.PACKAGE}/energy_uj" in reason


def test_counters_that_are_opened_to_all_while_watching_are_read(
    plant: Plant, as_somebody: Callable[[], None]
) -> None:
    root = plant(trees.x86_laptop())
    trees.for_root_only(root)
    as_somebody()
    sensor = make(root)
    denied = sensor.read(0.0)["energy.package-0_j"]
    os.seteuid(os.getuid())
    (root / trees.PACKAGE / "energy_uj").chmod(0o644)
    as_somebody()

    assert denied.quality == "denied"
    assert sensor.read(2.0)["energy.package-0_j"].quality == "ok"


def test_a_counter_that_never_moves_measures_nothing(plant: Plant) -> None:
    sensor = make(plant(trees.x86_laptop(energy_uj=0)))
    sensor.read(0.0)
    found = sensor.read(0.1)

    assert {each.value for each in found.values()} == {None}
    assert "has not moved" in found["energy.package-0_j"].reason


def test_a_counter_that_rests_after_it_has_moved_says_no_watts(plant: Plant) -> None:
    root = plant(trees.x86_laptop())
    sensor = make(root)
    sensor.read(0.0)
    plant(count(3_000_000, trees.UNCORE))
    sensor.read(0.1)

    assert sensor.read(0.2)["power.package-0.uncore_w"].value == 0.0


def test_no_powercap_is_said(plant: Plant) -> None:
    found = make(plant({})).read(0.0)

    assert set(found) == {"energy.package-0_j", "power.package-0_w"}
    assert {each.quality for each in found.values()} == {"unsupported"}
    assert "no RAPL" in found["energy.package-0_j"].reason


def test_zones_that_appear_late_are_found(plant: Plant) -> None:
    root = plant({})
    sensor = make(root)
    sensor.read(0.0)
    plant(trees.x86_laptop())

    assert sensor.read(6.0)["energy.package-0_j"].quality == "ok"


def test_energy_goes_on_where_it_was_after_a_reading_that_failed(plant: Plant) -> None:
    root = plant(trees.x86_laptop(energy_uj=1_000_000))
    sensor = make(root)
    sensor.read(0.0)
    plant(count(2_000_000))
    sensor.read(0.1)
    plant({f"{trees.PACKAGE}/energy_uj": "<unknown>\n"})
    failed = sensor.read(0.2)["energy.package-0_j"]
    plant(count(4_000_000))
    found = sensor.read(0.3)

    assert failed.value is None
    assert "<unknown>" in failed.reason
    assert found["energy.package-0_j"].value == pytest.approx(3.0)
    assert found["power.package-0_w"].value == pytest.approx(10.0)  # over 0.2 s


@pytest.mark.parametrize("text", ["", "0\n", "<unknown>\n", "18446744073709551615\n"])
def test_without_its_range_a_counter_is_not_summed(plant: Plant, text: str) -> None:
    root = plant(trees.x86_laptop() | {f"{trees.PACKAGE}/max_energy_range_uj": text})

    energy = make(root).read(0.0)["energy.package-0_j"]

    assert energy.quality == "unsupported"
    assert "max_energy_range_uj" in energy.reason
