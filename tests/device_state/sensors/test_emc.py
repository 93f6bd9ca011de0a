from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from edgewise.device.sensors.emc import MemoryClock, make

Plant = Callable[[Mapping[str, str]], Path]

ME = frozenset({os.geteuid()})
CAP = "sys/kernel/nvpmodel_emc_cap/emc_iso_cap"


def test_root_reads_the_clock_from_debugfs(trees: Any, tmp_path: Path) -> None:
    found = make(trees.orin_nano_jp6(tmp_path)).read(0.0)

    assert found["emc.frequency_hz"].value == 2.133e9
    assert found["emc.frequency_ratio"].value == pytest.approx(2.133 / 3.199)


def test_a_power_modes_cap_is_the_highest_clock(trees: Any, tmp_path: Path) -> None:
    root = trees.orin_nano_jp6(tmp_path)
    trees.write(root, {CAP: "2133000000\n"})

    assert make(root).read(0.0)["emc.frequency_ratio"].value == 1.0


@pytest.mark.parametrize("board", ["xavier_nx_jp5", "orin_nano_jp6", "thor_jp7", "vm"])
def test_the_load_of_the_memory_is_unknown_and_never_zero(
    trees: Any, tmp_path: Path, board: str
) -> None:
    load = make(getattr(trees, board)(tmp_path)).read(0.0)["emc.utilisation_ratio"]

    assert (load.value, load.quality) == (None, "unsupported")
    assert "mc_all" in load.reason


def test_the_bandwidth_manager_tells_everybody(trees: Any, tmp_path: Path) -> None:
    found = make(trees.thor_jp7(tmp_path)).read(0.0)

    assert found["emc.frequency_hz"].value == 2.133e9
    assert found["emc.frequency_ratio"].value == 0.5


def test_without_root_and_publisher_it_is_denied_with_what_would_help(
    trees: Any, plant: Plant, as_somebody: Callable[[], None]
) -> None:
    root = trees.orin_nano_jp6_nonroot(plant({}))
    as_somebody()

    found = make(root).read(0.0)

    assert found["emc.frequency_hz"].quality == found["emc.frequency_ratio"].quality == "denied"
    assert "no permission" in found["emc.frequency_ratio"].reason
    assert "publish-emc" in found["emc.frequency_ratio"].reason


def test_without_root_the_published_clock_is_taken_while_it_is_fresh(
    trees: Any, plant: Plant, as_somebody: Callable[[], None]
) -> None:
    root = trees.orin_nano_jp6_nonroot(plant({}))
    trees.publish(root, stamp_s=5.0)
    as_somebody()
    sensor = MemoryClock(root, owners=ME)

    fresh, stale = sensor.read(5.01), sensor.read(6.0)

    assert fresh["emc.frequency_hz"].value == 2.133e9
    assert fresh["emc.frequency_ratio"].value == pytest.approx(2.133 / 3.199)
    assert stale["emc.frequency_ratio"].quality == "stale"
    assert "ago" in stale["emc.frequency_ratio"].reason


def test_a_publisher_that_starts_late_is_noticed(
    trees: Any, plant: Plant, as_somebody: Callable[[], None]
) -> None:
    root = trees.orin_nano_jp6_nonroot(plant({"run/x": ""}))
    (root / "run").chmod(0o777)
    as_somebody()
    sensor = MemoryClock(root, owners=frozenset({os.geteuid()}))
    assert sensor.read(0.0)["emc.frequency_hz"].quality == "denied"

    trees.publish(root, stamp_s=1.0)

    assert sensor.read(1.0)["emc.frequency_hz"].value == 2.133e9


def test_what_a_stranger_publishes_is_not_believed(
    trees: Any, plant: Plant, as_somebody: Callable[[], None]
) -> None:
    root = trees.orin_nano_jp6_nonroot(plant({}))
    trees.publish(root, stamp_s=5.0)
    as_somebody()

    stranger = MemoryClock(root, owners=frozenset({12345})).read(5.0)

    assert stranger["emc.frequency_hz"].value is None
    assert "not trusted" in stranger["emc.frequency_hz"].reason


def test_a_truncated_or_another_boots_file_is_not_believed(trees: Any, tmp_path: Path) -> None:
    path = trees.publish(trees.vm(tmp_path), stamp_s=5.0)
    sensor = MemoryClock(tmp_path, owners=ME)
    good = sensor.read(5.0)["emc.frequency_hz"]
    path.write_text(path.read_text(encoding="utf-8")[:-9], encoding="utf-8")
    cut = sensor.read(5.01)["emc.frequency_hz"]
    trees.publish(tmp_path, stamp_s=7.0, boot_id="another")
    old = sensor.read(7.0)["emc.frequency_hz"]

    assert good.value == 2.133e9
    assert (cut.value, old.value) == (None, None)
    assert "truncated" in cut.reason
    assert "before this machine was last started" in old.reason


def test_a_permission_that_is_given_later_is_noticed(
    trees: Any, plant: Plant, as_somebody: Callable[[], None]
) -> None:
    root = plant({})
    trees.orin_nano_jp6_nonroot(root)
    uid = os.geteuid()
    as_somebody()
    sensor = make(root)
    assert sensor.read(0.0)["emc.frequency_hz"].quality == "denied"

    somebody = os.geteuid()
    os.seteuid(uid)
    (root / "sys/kernel/debug").chmod(0o755)
    os.seteuid(somebody)

    assert sensor.read(1.0)["emc.frequency_hz"].value == 2.133e9


def test_a_machine_without_a_memory_clock_says_where_it_looked(trees: Any, tmp_path: Path) -> None:
    found = make(trees.vm(tmp_path)).read(0.0)["emc.frequency_hz"]

    assert found.quality == "unsupported"
    assert "clk/emc/rate" in found.reason
