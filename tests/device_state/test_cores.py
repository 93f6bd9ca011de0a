from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from edgewise.device import usable_cores

Plant = Callable[[Mapping[str, str]], Path]

ONLINE = "sys/devices/system/cpu/online"
V2_MOUNT = "30 24 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "33 25 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"


def test_all_cores_are_usable_where_nothing_limits_them(plant: Plant) -> None:
    root = plant({ONLINE: "0-3\n"})

    cores = usable_cores(root, affinity=range(4))

    assert (cores.host, cores.affinity, cores.quota_cores) == (4, 4, None)
    assert cores.usable == 4.0
    assert cores.quota_source == "no control group limits CPU time"


def test_affinity_counts_where_it_is_tighter_than_the_machine(plant: Plant) -> None:
    cores = usable_cores(plant({ONLINE: "0-7\n"}), affinity={2, 5})

    assert cores.usable == 2.0


def test_the_tightest_ancestor_limits_a_version_2_group(plant: Plant) -> None:
    root = plant(
        {
            ONLINE: "0-7\n",
            "proc/self/cgroup": "0::/system.slice/pod/app\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/system.slice/pod/app/cpu.max": "400000 100000\n",
            "sys/fs/cgroup/system.slice/pod/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/system.slice/cpu.max": "max 100000\n",
        }
    )

    cores = usable_cores(root, affinity=range(8))

    assert cores.quota_cores == 1.5
    assert cores.usable == 1.5
    assert cores.threads == 1
    assert cores.quota_source.endswith("system.slice/pod/cpu.max")


def test_a_container_sees_its_version_2_limit_at_the_root_of_its_own_view(plant: Plant) -> None:
    root = plant(
        {
            ONLINE: "0-7\n",
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/cpu.max": "200000 100000\n",
        }
    )

    assert usable_cores(root, affinity=range(8)).usable == 2.0


def test_a_version_1_quota_is_found_through_the_mounted_part_of_the_hierarchy(
    plant: Plant,
) -> None:
    mount = V1_MOUNT.replace(" / /sys", " /docker/abc /sys")
    root = plant(
        {
            ONLINE: "0-3\n",
            "proc/self/cgroup": "4:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc\n",
            "proc/self/mountinfo": mount,
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        }
    )

    cores = usable_cores(root, affinity=range(4))

    assert cores.quota_cores == 0.5
    assert cores.threads == 1


def test_a_version_1_quota_of_minus_one_is_no_limit(plant: Plant) -> None:
    root = plant(
        {
            ONLINE: "0-3\n",
            "proc/self/cgroup": "4:cpu,cpuacct:/a\n",
            "proc/self/mountinfo": V1_MOUNT,
            "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
        }
    )

    assert usable_cores(root, affinity=range(4)).quota_cores is None


@pytest.mark.parametrize(
    "text",
    ["<unknown>", "-5 100000", "50000 0", "50000", "", "18446744073709551615 100000"],
    ids=["a word", "negative", "no period", "no second number", "empty", "largest number"],
)
def test_an_unreadable_quota_is_unknown_and_never_zero(plant: Plant, text: str) -> None:
    root = plant(
        {
            ONLINE: "0-3\n",
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/cpu.max": text,
        }
    )

    cores = usable_cores(root, affinity=range(4))

    assert cores.quota_cores is None
    assert cores.usable == 4.0


def test_a_quota_that_may_not_be_read_is_unknown_with_the_reason(
    plant: Plant, as_somebody: Callable[[], None]
) -> None:
    root = plant(
        {
            ONLINE: "0-3\n",
            "proc/self/cgroup": "0::/app\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/app/cpu.max": "50000 100000\n",
        }
    )
    (root / "sys/fs/cgroup/app").chmod(0)
    as_somebody()

    cores = usable_cores(root, affinity=range(4))

    assert cores.quota_cores is None
    assert "no permission" in cores.quota_source


def test_a_machine_that_says_nothing_has_one_usable_core(plant: Plant) -> None:
    cores = usable_cores(plant({ONLINE: "<unknown>\n"}), affinity=())

    assert cores.host is None
    assert "is not a list of CPUs" in cores.host_source
    assert cores.usable == 1.0


def test_this_machine_gives_this_process_at_least_part_of_a_core() -> None:
    assert usable_cores().usable > 0
