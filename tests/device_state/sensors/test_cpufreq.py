from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgewise.device.sensors.cpufreq import CpuFrequency, make

CPUS = "sys/devices/system/cpu"


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_cores_of_one_policy_are_read_through_one_descriptor(trees: Any, tmp_path: Path) -> None:
    before = open_descriptors()
    with make(trees.orin_nano_jp6(tmp_path)) as sensor:
        found = sensor.read(0.0)

        assert [found[f"cpu{core}.frequency_hz"].value for core in range(6)] == [1_036_800e3] * 6
        assert open_descriptors() == before + 3  # two policies and the list of cores
    assert open_descriptors() == before


def test_the_ratio_is_the_mean_of_cores_each_to_what_its_silicon_can_do(
    trees: Any, tmp_path: Path
) -> None:
    root = trees.orin_nano_jp6(tmp_path)
    trees.write(root, {f"{CPUS}/cpufreq/policy4/scaling_cur_freq": "500000\n"})
    trees.write(root, {f"{CPUS}/cpufreq/policy4/cpuinfo_max_freq": "1000000\n"})

    found = make(root).read(0.0)

    assert found["cpu.frequency_hz"].value == pytest.approx((4 * 1_036_800e3 + 2 * 500e6) / 6)
    ratio = (4 * 1_036_800 / 1_728_000 + 2 * 0.5) / 6
    assert found["cpu.frequency_ratio"].value == pytest.approx(ratio)


def test_a_core_that_goes_offline_is_masked_and_comes_back(trees: Any, tmp_path: Path) -> None:
    root = trees.orin_nano_jp6(tmp_path)
    sensor = make(root)
    sensor.read(0.0)
    trees.take_offline(root, {4, 5})
    away = sensor.read(0.1)
    trees.bring_online(root, 5, policy=4)
    back = sensor.read(0.2)

    assert away["cpu4.frequency_hz"].quality == away["cpu5.frequency_hz"].quality == "masked"
    assert "offline" in away["cpu5.frequency_hz"].reason
    assert away["cpu.frequency_ratio"].value == pytest.approx(0.6)
    assert back["cpu5.frequency_hz"].value == 1_036_800e3
    assert back["cpu4.frequency_hz"].quality == "masked"


def test_a_core_that_was_offline_from_the_start_is_masked(trees: Any, tmp_path: Path) -> None:
    found = make(trees.xavier_nx_jp5(tmp_path)).read(0.0)

    assert found["cpu5.frequency_hz"].quality == "masked"
    assert found["cpu.frequency_hz"].value == 1_190_400e3


def test_who_is_online_is_asked_at_once_when_a_clock_stops_answering(
    trees: Any, tmp_path: Path
) -> None:
    root = trees.thor_jp7(tmp_path)
    # Its cores and their only file go within one interval; the descriptor then fails to read.
    sensor = CpuFrequency(root, hotplug_s=1000.0, rescan_s=1000.0)
    sensor.read(0.0)
    trees.take_offline(root, {13})
    (root / CPUS / "cpufreq/policy13/scaling_cur_freq").unlink()

    found = sensor.read(1.5)

    assert found["cpu13.frequency_hz"].quality == "masked"


def test_a_virtual_machine_has_no_clock_and_says_why(trees: Any, tmp_path: Path) -> None:
    sensor = make(trees.vm(tmp_path))
    for now_s in (0.0, 0.01, 1.0):
        found = sensor.read(now_s)

        assert set(found) == {
            "cpu0.frequency_hz",
            "cpu1.frequency_hz",
            "cpu.frequency_hz",
            "cpu.frequency_ratio",
        }
        assert {each.quality for each in found.values()} == {"unsupported"}
        assert all("no cpufreq" in each.reason for each in found.values())


def test_cpufreq_that_appears_late_is_noticed(trees: Any, tmp_path: Path) -> None:
    root = trees.vm(tmp_path)
    sensor = make(root)
    sensor.read(0.0)
    trees.write(root, {f"{CPUS}/cpu0/cpufreq/scaling_cur_freq": "1000000\n"})
    trees.write(root, {f"{CPUS}/cpu0/cpufreq/cpuinfo_max_freq": "2000000\n"})

    found = sensor.read(1.0)

    assert found["cpu.frequency_ratio"].value == 0.5
    assert found["cpu1.frequency_hz"].quality == "unsupported"


@pytest.mark.parametrize("text", ["0\n", "", None], ids=["zero", "empty", "absent"])
def test_without_a_highest_clock_there_is_a_frequency_and_no_ratio(
    trees: Any, tmp_path: Path, text: str | None
) -> None:
    root = trees.rpi4(tmp_path)
    highest = root / CPUS / "cpufreq/policy0/cpuinfo_max_freq"
    highest.unlink()
    if text is not None:
        highest.write_text(text, encoding="ascii")

    found = make(root).read(0.0)

    assert found["cpu.frequency_hz"].value == 1.5e9
    assert found["cpu.frequency_ratio"].value is None
    assert "cpuinfo_max_freq" in found["cpu.frequency_ratio"].reason


def test_a_power_mode_does_not_change_what_the_ratio_is_to(trees: Any, tmp_path: Path) -> None:
    root = trees.rpi4(tmp_path)
    sensor = make(root)
    before = sensor.read(0.0)["cpu.frequency_ratio"]
    trees.write(root, {f"{CPUS}/cpufreq/policy0/scaling_max_freq": "600000\n"})

    assert sensor.read(1.0)["cpu.frequency_ratio"] == before


def test_a_kernel_that_lists_no_cores_is_asked_for_their_folders(
    trees: Any, tmp_path: Path
) -> None:
    root = trees.rpi4(tmp_path)
    (root / CPUS / "online").unlink()
    (root / CPUS / "present").unlink()

    assert make(root).read(0.0)["cpu3.frequency_hz"].value == 1.5e9


def test_a_tree_without_any_cpu_says_so(tmp_path: Path) -> None:
    found = make(tmp_path).read(0.0)

    assert "lists no CPU" in found["cpu.frequency_hz"].reason


def test_a_closed_sensor_reads_on_when_asked(trees: Any, tmp_path: Path) -> None:
    sensor = make(trees.rpi5(tmp_path))
    before = sensor.read(0.0)
    sensor.close()

    assert sensor.read(0.01) == before
