"""What every sensor of files owes on every machine, however strange."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from edgewise.device.sensor import Sensor

Plant = Callable[[Mapping[str, str]], Path]

SENSORS = ("cpufreq", "procfs", "devfreq", "emc", "thermal", "throttle", "quota")
BOARDS = ("xavier_nx_jp5", "orin_nano_jp6", "thor_jp7", "rpi4", "rpi5", "vm")
GARBAGE = ("", "<unknown>\n", "-1\n", "18446744073709551615\n", "\0", "12g\n", "\x80\ufffd\n")


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def make(name: str, root: Path) -> Sensor:
    sensor: Sensor = importlib.import_module(f"edgewise.device.sensors.{name}").make(root)
    return sensor


@pytest.mark.parametrize("name", SENSORS)
@pytest.mark.parametrize("board", BOARDS)
def test_a_value_is_good_or_has_a_reason_and_a_name_once_said_stays(
    trees: Any, tmp_path: Path, board: str, name: str
) -> None:
    root = getattr(trees, board)(tmp_path)
    before = open_descriptors()
    with make(name, root) as sensor:
        names: set[str] = set()
        for step in range(4):
            found = sensor.read(0.5 * step)

            assert names <= set(found)
            names = set(found)
            for each in found.values():
                assert (each.quality == "ok") == (each.reason == "")
                assert (each.value is None) == (each.quality not in {"ok", "stale"})
            if board != "vm":
                trees.take_offline(root, {step})
    assert open_descriptors() == before


@pytest.mark.parametrize("name", SENSORS)
@pytest.mark.parametrize("text", GARBAGE, ids=[ascii(text) for text in GARBAGE])
def test_garbage_is_never_a_value(trees: Any, tmp_path: Path, text: str, name: str) -> None:
    if (name, text) == ("thermal", "-1\n"):
        text = "-1x\n"  # a thousandth of a degree below zero is a temperature
    sensor = make(name, trees.garbage(tmp_path, text))

    for now_s in (0.0, 0.2, 1.5):
        for said, each in sensor.read(now_s).items():
            assert each.value is None, (said, each)
            assert each.reason


@pytest.mark.parametrize("name", SENSORS)
def test_a_value_that_becomes_garbage_is_not_remembered(
    trees: Any, tmp_path: Path, name: str
) -> None:
    trees.quota(trees.orin_nano_jp6(tmp_path), "cpu.max", "50000 100000\n")
    trees.quota(tmp_path, "cpu.stat", "nr_periods 10\nnr_throttled 5\n")
    sensor = make(name, tmp_path)
    names = set(sensor.read(0.0))
    trees.garbage_values(tmp_path, "<unknown>\n")

    found = sensor.read(2.5)

    assert names <= set(found)
    assert {each.value for said, each in found.items() if said in names} == {None}


@pytest.mark.parametrize("name", SENSORS)
def test_an_empty_or_forbidden_tree_raises_nothing(
    plant: Plant, as_somebody: Callable[[], None], name: str
) -> None:
    root = plant({"sys/x": "", "proc/x": "", "run/x": ""})
    for folder in ("sys", "proc", "run"):
        (root / folder).chmod(0o000)
    as_somebody()

    found = make(name, root).read(0.0)

    assert found
    assert all(each.value is None and each.reason for each in found.values())
