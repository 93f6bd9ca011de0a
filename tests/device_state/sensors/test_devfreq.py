from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgewise.device.sensors.cpufreq import make as make_cpufreq
from edgewise.device.sensors.devfreq import make

NAMES = {"gpu.frequency_hz", "gpu.frequency_ratio", "gpu.utilisation_ratio"}


@pytest.mark.parametrize(
    ("board", "hz", "max_hz"),
    [("xavier_nx_jp5", 599.25e6, 1109.25e6), ("orin_nano_jp6", 612e6, 1020e6)],
)
def test_a_jetsons_gpu_has_a_clock_and_a_load_in_thousandths(
    trees: Any, tmp_path: Path, board: str, hz: float, max_hz: float
) -> None:
    found = make(getattr(trees, board)(tmp_path)).read(0.0)

    assert found["gpu.frequency_hz"].value == hz
    assert found["gpu.frequency_ratio"].value == pytest.approx(hz / max_hz)
    assert found["gpu.utilisation_ratio"].value == 0.25


def test_thor_has_a_clock_and_says_that_it_has_no_load(trees: Any, tmp_path: Path) -> None:
    found = make(trees.thor_jp7(tmp_path)).read(0.0)

    assert found["gpu.frequency_hz"].value == 787.5e6
    assert found["gpu.frequency_ratio"].value == 0.5
    assert found["gpu.utilisation_ratio"].quality == "unsupported"
    assert "no load file" in found["gpu.utilisation_ratio"].reason


@pytest.mark.parametrize("board", ["vm", "rpi4"])
def test_a_machine_without_such_a_gpu_says_so(trees: Any, tmp_path: Path, board: str) -> None:
    found = make(getattr(trees, board)(tmp_path)).read(0.0)

    assert set(found) == NAMES
    assert {each.quality for each in found.values()} == {"unsupported"}


def test_a_gpu_that_appears_late_goes_and_comes_back_is_noticed(trees: Any, tmp_path: Path) -> None:
    root = trees.orin_nano_jp6(tmp_path)
    trees.remove_gpu(root)
    (root / "sys/devices/platform/17000000.gpu").unlink()
    sensor = make(root)
    early = sensor.read(0.0)
    trees.add_orin_gpu(root)
    late = sensor.read(1.0)
    trees.remove_gpu(root)
    gone = sensor.read(2.0)
    (root / "sys/devices/platform/17000000.gpu").unlink()
    trees.add_orin_gpu(root)
    back = sensor.read(3.0)

    assert early["gpu.utilisation_ratio"].value is None
    assert late["gpu.utilisation_ratio"].value == 0.25
    assert {each.quality for each in gone.values()} == {"unsupported"}
    assert set(gone) == NAMES
    assert back == late


def test_a_load_file_that_appears_after_the_clock_is_noticed(trees: Any, tmp_path: Path) -> None:
    root = trees.orin_nano_jp6(tmp_path)
    load = root / trees.ORIN_GPU / "load"
    load.unlink()
    sensor = make(root)
    assert sensor.read(0.0)["gpu.utilisation_ratio"].value is None

    load.write_text("980\n", encoding="ascii")

    assert sensor.read(1.0)["gpu.utilisation_ratio"].value == 0.98


def test_a_suspended_gpu_is_masked_and_its_old_clock_not_believed(
    trees: Any, tmp_path: Path
) -> None:
    root = trees.xavier_nx_jp5(tmp_path)
    power = f"{trees.XAVIER_GPU}/power/runtime_status"
    sensor = make(root)
    trees.write(root, {power: "suspended\n"})
    asleep = sensor.read(0.0)
    trees.write(root, {power: "active\n"})
    awake = sensor.read(0.01)

    assert {each.quality for each in asleep.values()} == {"masked"}
    assert awake["gpu.frequency_hz"].value == 599.25e6


def test_a_clock_of_zero_is_masked(trees: Any, tmp_path: Path) -> None:
    root = trees.orin_nano_jp6(tmp_path)
    trees.write(root, {f"{trees.ORIN_GPU}/devfreq/17000000.gpu/cur_freq": "0\n"})

    found = make(root).read(0.0)

    assert found["gpu.frequency_hz"].quality == found["gpu.frequency_ratio"].quality == "masked"


def test_a_load_beyond_a_thousand_is_not_believed(trees: Any, tmp_path: Path) -> None:
    root = trees.orin_nano_jp6(tmp_path)
    trees.write(root, {f"{trees.ORIN_GPU}/load": "1001\n"})

    assert make(root).read(0.0)["gpu.utilisation_ratio"].quality == "unsupported"


@pytest.mark.parametrize("alias", ["devfreq", "devfreq_dev"])
def test_a_gpu_that_is_listed_beside_its_device_only_is_found(
    trees: Any, tmp_path: Path, alias: str
) -> None:
    device = "sys/devices/17000000.ga10b"
    node = f"{device}/devfreq/17000000.ga10b" if alias == "devfreq" else f"{device}/{alias}"
    trees.write(tmp_path, {f"{node}/cur_freq": "306000000\n", f"{node}/max_freq": "612000000\n"})
    trees.write(tmp_path, {f"{device}/load": "100\n"})

    found = make(tmp_path).read(0.0)

    assert found["gpu.frequency_ratio"].value == 0.5
    assert found["gpu.utilisation_ratio"].value == 0.1


def test_a_clock_of_the_cpu_is_known_beside_that_of_the_gpu(trees: Any, tmp_path: Path) -> None:
    # What is launched from the CPU waits for the CPU's clock: jetson-inference issue 1533.
    root = trees.xavier_nx_jp5(tmp_path)

    found = {**make(root).read(0.0), **make_cpufreq(root).read(0.0)}

    assert found["cpu.frequency_ratio"].quality == found["gpu.frequency_ratio"].quality == "ok"
