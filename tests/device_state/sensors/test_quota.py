from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgewise.device.cores import usable_cores
from edgewise.device.sensors.quota import CpuQuota

V1_MOUNT = "31 23 0:28 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n"


def test_the_tightest_group_counts_and_for_one_thread_at_most_one_core(
    trees: Any, tmp_path: Path
) -> None:
    root = trees.orin_nano_jp6(tmp_path)
    trees.quota(root, "cpu.max", "max 100000\n")
    trees.quota(root, "cpu.max", "250000 100000\n", group="app")
    sensor = CpuQuota(root, affinity=range(6))
    wide = sensor.read(0.0)
    trees.quota(root, "cpu.max", "25000 100000\n")
    tight = sensor.read(0.1)

    assert (wide["cpu.quota_cores"].value, wide["cpu.quota_ratio"].value) == (2.5, 1.0)
    assert (tight["cpu.quota_cores"].value, tight["cpu.quota_ratio"].value) == (0.25, 0.25)


def test_without_a_quota_all_usable_cores_are_allowed_and_nothing_is_throttled(
    trees: Any, tmp_path: Path
) -> None:
    found = CpuQuota(trees.orin_nano_jp6(tmp_path), affinity=range(4)).read(0.0)

    assert found["cpu.quota_cores"].value == 4.0
    assert found["cpu.quota_ratio"].value == 1.0
    assert found["cpu.throttled_ratio"].value == 0.0


def test_a_quota_beyond_the_cores_is_no_more_than_the_cores(trees: Any, tmp_path: Path) -> None:
    root = trees.vm(tmp_path)
    trees.quota(root, "cpu.max", "800000 100000\n")

    assert CpuQuota(root, affinity=range(2)).read(0.0)["cpu.quota_cores"].value == 2.0


@pytest.mark.parametrize(
    ("text", "cores"), [("50000\n", 0.5), ("-1\n", 2.0)], ids=["a quota", "none"]
)
def test_version_1_is_read_too(trees: Any, tmp_path: Path, text: str, cores: float) -> None:
    root = trees.vm(tmp_path)
    trees.write(root, {"proc/self/cgroup": "1:cpu,cpuacct:/app\n"})
    trees.write(root, {"proc/self/mountinfo": V1_MOUNT})
    group = "sys/fs/cgroup/cpu/app"
    trees.write(root, {f"{group}/cpu.cfs_quota_us": text})
    trees.write(root, {f"{group}/cpu.cfs_period_us": "100000\n"})

    found = CpuQuota(root, affinity=range(2)).read(0.0)

    assert found["cpu.quota_cores"].value == cores
    assert found["cpu.quota_cores"].value == usable_cores(root, affinity=range(2)).usable


def test_throttling_is_the_share_of_periods_since_the_last_reading(
    trees: Any, tmp_path: Path
) -> None:
    root = trees.vm(tmp_path)
    trees.quota(root, "cpu.max", "50000 100000\n")
    sensor = CpuQuota(root, affinity=range(2))
    shares = []
    for now_s, (periods, throttled) in enumerate([(100, 90), (110, 94), (110, 94), (112, 96)]):
        text = f"usage_usec 5\nnr_periods {periods}\nnr_throttled {throttled}\nthrottled_usec 9\n"
        trees.quota(root, "cpu.stat", text)
        shares.append(sensor.read(float(now_s))["cpu.throttled_ratio"])

    assert [each.quality for each in shares] == ["masked", "ok", "stale", "ok"]
    assert [each.value for each in shares] == [None, 0.4, 0.4, 1.0]


def test_a_process_that_is_moved_to_another_group_is_noticed_at_once(
    trees: Any, tmp_path: Path
) -> None:
    root = trees.vm(tmp_path)
    trees.quota(root, "cpu.max", "75000 100000\n", group="tight")
    sensor = CpuQuota(root, affinity=range(2))
    before = sensor.read(0.0)["cpu.quota_ratio"]
    trees.write(root, {"proc/self/cgroup": "0::/tight\n"})

    assert before.value == 1.0
    assert sensor.read(0.1)["cpu.quota_ratio"].value == 0.75


@pytest.mark.parametrize(
    "text",
    ["", "<unknown>\n", "-5 100000\n", "100000\n", "50000 0\n", "18446744073709551615 100000\n"],
)
def test_a_quota_that_makes_no_sense_is_unknown(trees: Any, tmp_path: Path, text: str) -> None:
    root = trees.vm(tmp_path)
    trees.quota(root, "cpu.max", text)

    found = CpuQuota(root, affinity=range(2)).read(0.0)

    assert {each.quality for each in found.values()} == {"unsupported"}
    assert all("cpu.max" in each.reason for each in found.values())
