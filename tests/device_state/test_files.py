from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from edgewise.device.files import exists, matching, parse_cpu_list, read_text

Plant = Callable[[Mapping[str, str]], Path]


def test_looking_into_a_closed_folder_does_not_raise(
    plant: Plant, as_somebody: Callable[[], None]
) -> None:
    root = plant({"sys/kernel/debug/clk": "1\n"})
    (root / "sys/kernel/debug").chmod(0o700)
    as_somebody()

    assert not exists(root / "sys/kernel/debug/clk")
    assert read_text(root / "sys/kernel/debug/clk").quality == "denied"
    assert list(matching(root, "sys/kernel/debug/*")) == []


def test_numbered_paths_come_in_the_order_of_their_numbers(plant: Plant) -> None:
    root = plant({f"zone{number}": "" for number in (10, 2, 1)})

    assert [path.name for path in matching(root, "zone*")] == ["zone1", "zone2", "zone10"]


@pytest.mark.parametrize("text", ["", "<unknown>", "3-1", "a-b"])
def test_what_is_no_list_of_cpus_is_unknown(text: str) -> None:
    assert parse_cpu_list(text) is None
