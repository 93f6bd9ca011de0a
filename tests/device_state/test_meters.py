from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from edgewise.device import find_meters

Plant = Callable[[Mapping[str, str]], Path]

RAPL = "sys/class/powercap"
INA = "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon3"


def laptop(plant: Plant) -> Path:
    return plant(
        {
            f"{RAPL}/intel-rapl:0/name": "package-0\n",
            f"{RAPL}/intel-rapl:0/energy_uj": "52414127433\n",
            f"{RAPL}/intel-rapl:0:0/name": "core\n",
            f"{RAPL}/intel-rapl:0:0/energy_uj": "1234\n",
            f"{RAPL}/intel-rapl-mmio:0/name": "package-0\n",
            f"{RAPL}/intel-rapl-mmio:0/energy_uj": "52414127433\n",
            "sys/class/power_supply/BAT0/type": "Battery\n",
            "sys/class/power_supply/AC/type": "Mains\n",
        }
    )


def test_a_virtual_machine_has_no_meter(plant: Plant) -> None:
    assert find_meters(plant({})) == []


def test_a_package_that_is_listed_twice_is_one_meter(plant: Plant) -> None:
    meters = find_meters(laptop(plant))

    assert [(each.name, each.quality) for each in meters] == [
        ("rapl package-0", "ok"),
        ("rapl package-0 core", "ok"),
        ("battery BAT0", "unsupported"),
    ]


def test_a_counter_for_root_only_is_denied_with_the_command_that_opens_it(
    plant: Plant, as_somebody: Callable[[], None]
) -> None:
    root = laptop(plant)
    for path in (root / RAPL).glob("*/energy_uj"):
        path.chmod(0o400)
    as_somebody()

    meter = find_meters(root)[0]

    assert meter.quality == "denied"
    assert "root only" in meter.reason
    assert meter.help == f"sudo chmod a+r {root / RAPL}/intel-rapl:0/energy_uj"


@pytest.mark.parametrize("text", ["", "<unknown>\n", "-3\n", "18446744073709551615\n"])
def test_a_counter_that_reads_garbage_is_unsupported(plant: Plant, text: str) -> None:
    root = plant({f"{RAPL}/intel-rapl:0/name": "package-0", f"{RAPL}/intel-rapl:0/energy_uj": text})

    (meter,) = find_meters(root)

    assert meter.quality == "unsupported"
    assert meter.reason
    assert meter.help is None


def test_rails_of_a_jetson_are_found_by_their_label(plant: Plant) -> None:
    root = plant(
        {
            f"{INA}/in1_label": "VDD_IN\n",
            f"{INA}/in1_input": "4984\n",
            f"{INA}/curr1_input": "1856\n",
            f"{INA}/in2_label": "VDD_CPU_GPU_CV\n",
            f"{INA}/in2_input": "4976\n",
            f"{INA}/in7_label": "sum of shunt voltages\n",
            f"{INA}/in7_input": "12\n",
        }
    )

    meters = find_meters(root)

    assert [(each.name, each.kind, each.quality) for each in meters] == [
        ("ina3221 VDD_IN", "power", "ok"),
        ("ina3221 VDD_CPU_GPU_CV", "power", "unsupported"),
    ]
    assert "curr2_input" in meters[1].reason
