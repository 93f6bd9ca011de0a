from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from edgewise.device.sensors.ina3221 import make
from edgewise.device.state import Quantity


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

ORIN = {"VDD_IN": (4984, 1856), "VDD_CPU_GPU_CV": (4976, 424), "VDD_SOC": (4976, 288)}
XAVIER = "sys/bus/i2c/drivers/ina3221/7-0040/hwmon/hwmon4"


@pytest.mark.parametrize("directory", [trees.JETSON, XAVIER], ids=["Orin", "Xavier"])
def test_rails_are_found_by_their_label_wherever_the_chip_is(plant: Plant, directory: str) -> None:
    found = make(plant(trees.rails(ORIN, directory))).read(0.0)

    assert set(found) == {"power.VDD_IN_w", "power.VDD_CPU_GPU_CV_w", "power.VDD_SOC_w"}
    assert found["power.VDD_IN_w"].value == pytest.approx(9.250304)  # 4984 mV x 1856 mA
    assert found["power.VDD_SOC_w"].value == pytest.approx(1.433088)


def test_unconnected_channels_are_no_rails(plant: Plant) -> None:
    two = {"VDD_IN": (4984, 1856), "VDD_SOC": (4976, 288)}
    found = make(plant(trees.rails(two, unconnected=True))).read(0.0)

    assert set(found) == {"power.VDD_IN_w", "power.VDD_SOC_w"}


def test_power_follows_the_chip(plant: Plant) -> None:
    root = plant(trees.rails(ORIN))
    sensor = make(root)
    sensor.read(0.0)
    plant({f"{trees.JETSON}/curr1_input": "1000\n"})

    assert sensor.read(0.1)["power.VDD_IN_w"].value == pytest.approx(4.984)


def test_a_machine_without_the_chip_says_so(plant: Plant) -> None:
    assert make(plant({})).read(0.0) == {
        "power.VDD_IN_w": Quantity.missing("unsupported", "no INA3221 watches a rail here")
    }


def test_a_chip_that_appears_late_is_found(plant: Plant) -> None:
    root = plant({})
    sensor = make(root)
    sensor.read(0.0)
    plant(trees.rails(ORIN))

    assert sensor.read(6.0)["power.VDD_IN_w"].quality == "ok"


def test_a_rail_whose_chip_gets_another_hwmon_number_is_followed(plant: Plant) -> None:
    root = plant(trees.rails(ORIN))
    sensor = make(root)
    sensor.read(0.0)
    shutil.move(root / trees.JETSON, (root / trees.JETSON).with_name("hwmon5"))

    assert sensor.read(6.0)["power.VDD_IN_w"].value == pytest.approx(9.250304)


def test_a_rail_that_goes_stays_with_a_reason(plant: Plant) -> None:
    root = plant(trees.rails(ORIN))
    sensor = make(root)
    sensor.read(0.0)
    shutil.rmtree(root / trees.JETSON)
    soon, later = sensor.read(2.0), sensor.read(8.0)

    assert set(soon) == set(later) == {f"power.{label}_w" for label in ORIN}
    assert {each.value for each in [*soon.values(), *later.values()]} == {None}
    assert "ENOENT" in soon["power.VDD_IN_w"].reason
    assert later["power.VDD_IN_w"].reason.endswith("is gone")


@pytest.mark.parametrize("text", ["", "<unknown>\n", "-8\n", "18446744073709551615\n"])
@pytest.mark.parametrize("file", ["in1_input", "curr1_input"])
def test_garbage_is_no_power(plant: Plant, file: str, text: str) -> None:
    found = make(plant(trees.rails(ORIN) | {f"{trees.JETSON}/{file}": text})).read(0.0)

    assert found["power.VDD_IN_w"].value is None
    assert found["power.VDD_IN_w"].quality == "unsupported"
    assert file in found["power.VDD_IN_w"].reason
    assert found["power.VDD_SOC_w"].quality == "ok"


def test_files_for_root_only_are_denied_with_the_command_that_opens_them(
    plant: Plant, as_somebody: Callable[[], None]
) -> None:
    root = plant(trees.rails(ORIN))
    (root / trees.JETSON / "curr1_input").chmod(0o400 if os.geteuid() == 0 else 0)
    as_somebody()

    power = make(root).read(0.0)["power.VDD_IN_w"]

    assert power.quality == "denied"
    assert f"sudo chmod a+r {root / trees.JETSON}/*_input" in power.reason
