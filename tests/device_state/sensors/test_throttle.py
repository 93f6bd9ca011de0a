from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgewise.device.sensors.throttle import make

FLAGS = (
    "throttle.under_voltage",
    "throttle.frequency_capped",
    "throttle.throttled",
    "throttle.soft_temperature_limit",
)
ALARM = "sys/class/hwmon/hwmon1/in0_lcrit_alarm"
COUNTERS = "sys/class/hwmon/hwmon2"


@pytest.mark.parametrize("board", ["rpi4", "rpi5"])
@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("50000\n", (0.0, 0.0, 0.0, 0.0)),
        ("50005\n", (1.0, 0.0, 1.0, 0.0)),
        ("e0008\n", (0.0, 0.0, 0.0, 1.0)),
        ("2\n", (0.0, 1.0, 0.0, 0.0)),
        ("0\n", (0.0, 0.0, 0.0, 0.0)),
    ],
    ids=["only sticky bits", "two and sticky bits", "soft limit", "capped", "nothing"],
)
def test_flags_are_the_present_and_not_what_was_since_boot(
    trees: Any, tmp_path: Path, board: str, text: str, flags: tuple[float, ...]
) -> None:
    root = getattr(trees, board)(tmp_path)
    place = trees.PI_THROTTLED[board == "rpi5"]
    trees.write(root, {place: text})

    found = make(root).read(0.0)

    assert tuple(found[name].value for name in FLAGS) == flags


@pytest.mark.parametrize("text", ["", "xyz\n", "-1\n", "18446744073709551615\n", "<unknown>\n"])
def test_garbage_from_the_firmware_is_unknown_and_the_alarm_still_counts(
    trees: Any, tmp_path: Path, text: str
) -> None:
    root = trees.rpi4(tmp_path)
    trees.write(root, {trees.PI_THROTTLED[0]: text, ALARM: "1\n"})

    found = make(root).read(0.0)

    assert found["throttle.under_voltage"].value == 1.0
    assert {found[name].value for name in FLAGS[1:]} == {None}
    assert all(found[name].reason for name in FLAGS[1:])


def test_a_file_that_moves_with_a_new_kernel_is_found(trees: Any, tmp_path: Path) -> None:
    root = trees.rpi4(tmp_path)
    sensor = make(root)
    sensor.read(0.0)
    (root / trees.PI_THROTTLED[0]).unlink()
    trees.write(root, {trees.PI_THROTTLED[1]: "4\n"})

    assert sensor.read(5.0)["throttle.throttled"].value == 1.0


def test_events_are_counted_between_readings(trees: Any, tmp_path: Path) -> None:
    root = trees.orin_nano_jp6(tmp_path)
    sensor = make(root)
    first = sensor.read(0.0)
    trees.write(root, {f"{COUNTERS}/oc1_event_cnt": "4\n", f"{COUNTERS}/oc3_event_cnt": "1\n"})
    second = sensor.read(0.1)

    assert {first[f"throttle.oc{n}_events"].value for n in (1, 2, 3)} == {None}
    assert second["throttle.oc1_events"].value == 3.0
    assert second["throttle.oc2_events"].value == 0.0
    assert second["throttle.oc3_events"].quality == "masked"
    assert "anew" in second["throttle.oc3_events"].reason
    assert sensor.read(0.2)["throttle.oc3_events"].value == 0.0


@pytest.mark.parametrize("board", ["vm", "thor_jp7"])
def test_a_board_whose_firmware_says_nothing_is_unsupported(
    trees: Any, tmp_path: Path, board: str
) -> None:
    found = make(getattr(trees, board)(tmp_path)).read(0.0)

    assert set(found) == set(FLAGS)
    assert {each.quality for each in found.values()} == {"unsupported"}
