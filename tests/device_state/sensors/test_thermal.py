from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgewise.device.sensors.thermal import make

ZONES = "sys/class/thermal"


def test_zones_are_named_by_their_type_and_a_gated_one_is_masked(
    trees: Any, tmp_path: Path
) -> None:
    found = make(trees.orin_nano_jp6(tmp_path)).read(0.0)

    assert found["thermal.cpu-thermal_celsius"].value == 48.562
    assert found["thermal.gpu-thermal_celsius"].value == 47.031
    assert found["thermal.cv0-thermal_celsius"].quality == "masked"
    assert "switched off" in found["thermal.cv0-thermal_celsius"].reason


def test_a_zone_that_is_switched_on_has_a_value_again(trees: Any, tmp_path: Path) -> None:
    root = trees.orin_nano_jp6(tmp_path)
    sensor = make(root)
    sensor.read(0.0)
    trees.write(root, {f"{ZONES}/thermal_zone2/temp": "44000\n"})

    assert sensor.read(0.5)["thermal.cv0-thermal_celsius"].value == 44.0


def test_a_second_zone_of_one_type_gets_a_number(trees: Any, tmp_path: Path) -> None:
    for number in (0, 1, 10):
        zone = f"{ZONES}/thermal_zone{number}"
        trees.write(tmp_path, {f"{zone}/type": "pch skylake\n", f"{zone}/temp": f"{number}000\n"})

    found = make(tmp_path).read(0.0)

    assert {name: each.value for name, each in found.items()} == {
        "thermal.pch-skylake_celsius": 0.0,
        "thermal.pch-skylake-2_celsius": 1.0,
        "thermal.pch-skylake-3_celsius": 10.0,
    }


def test_frost_is_a_temperature(trees: Any, tmp_path: Path) -> None:
    root = trees.write(tmp_path, {f"{ZONES}/thermal_zone0/type": "ambient\n"})
    trees.write(root, {f"{ZONES}/thermal_zone0/temp": "-12500\n"})

    assert make(root).read(0.0)["thermal.ambient_celsius"].value == -12.5


@pytest.mark.parametrize("text", ["", "<unknown>\n", "18446744073709551615\n", "4e4\n", "\0"])
def test_garbage_has_no_value(trees: Any, tmp_path: Path, text: str) -> None:
    root = trees.rpi4(tmp_path)
    trees.write(root, {f"{ZONES}/thermal_zone0/temp": text})

    found = make(root).read(0.0)["thermal.cpu-thermal_celsius"]

    assert found.value is None
    assert found.reason


def test_a_zone_that_fails_to_read_or_is_gone_is_masked_and_late_ones_are_noticed(
    trees: Any, tmp_path: Path
) -> None:
    root = trees.rpi4(tmp_path)
    sensor = make(root)
    sensor.read(0.0)
    temperature = root / f"{ZONES}/thermal_zone0/temp"
    temperature.unlink()
    temperature.mkdir()  # reading a folder fails, as a gated zone does
    trees.write(root, {f"{ZONES}/thermal_zone1/type": "rp1\n"})
    trees.write(root, {f"{ZONES}/thermal_zone1/temp": "50000\n"})

    found = sensor.read(5.0)

    assert found["thermal.cpu-thermal_celsius"].quality == "masked"
    assert found["thermal.rp1_celsius"].value == 50.0


def test_a_machine_without_zones_says_so(trees: Any, tmp_path: Path) -> None:
    found = make(trees.vm(tmp_path)).read(0.0)

    assert [each.quality for each in found.values()] == ["unsupported"]
