from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from edgewise.device import read_memory

Plant = Callable[[Mapping[str, str]], Path]

MEMINFO = "MemTotal:        8000000 kB\nMemFree:          100000 kB\nMemAvailable:    4000000 kB\n"


def test_kernel_units_become_bytes(plant: Plant) -> None:
    memory = read_memory(plant({"proc/meminfo": MEMINFO}))

    assert memory.total_bytes == 8000000 * 1024
    assert memory.available_bytes == 4000000 * 1024
    assert memory.limit_bytes is None


def test_the_limit_of_a_container_is_found(plant: Plant) -> None:
    root = plant(
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/app\n",
            "proc/self/mountinfo": "30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
            "sys/fs/cgroup/app/memory.max": "max\n",
            "sys/fs/cgroup/memory.max": "536870912\n",
        }
    )

    assert read_memory(root).limit_bytes == 512 * 1024**2


@pytest.mark.parametrize("text", ["", "<unknown>", "MemTotal: -5 kB\n", "MemTotal: 0 kB\n"])
def test_garbage_is_unknown_and_never_zero(plant: Plant, text: str) -> None:
    assert read_memory(plant({"proc/meminfo": text})).total_bytes is None
