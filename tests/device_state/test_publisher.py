from __future__ import annotations

import configparser
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path

import pytest

from edgewise.clock import MonotonicClock, VirtualClock
from edgewise.device.publisher import (
    MAX_AGE_S,
    PUBLISHED,
    UNIT,
    EmcPublisher,
    read_boot_id,
    read_published,
)
from edgewise.device.state import Quantity
from edgewise.errors import ConfigError, EdgeError

Plant = Callable[[Mapping[str, str]], Path]

BOOT = "1b4e28ba-2fa1-11d2-883f-0016d3cca427"
EMC = "sys/kernel/debug/bpmp/debug/clk/emc"
ORIN = {
    "proc/sys/kernel/random/boot_id": f"{BOOT}\n",
    f"{EMC}/rate": "665600000\n",
    f"{EMC}/max_rate": "3199000000\n",
    "sys/kernel/nvpmodel_emc_cap/emc_iso_cap": "2133000000\n",
}
GOOD: dict[str, object] = {
    "boot_id": BOOT,
    "monotonic_s": 100.0,
    "frequency_hz": 665.6e6,
    "max_frequency_hz": 2133e6,
    "version": 1,
}
US = frozenset({os.geteuid()})


def read(path: Path, now_s: float = 100.01) -> tuple[Quantity, Quantity]:
    return read_published(path, now_s=now_s, boot_id=BOOT, owners=US)


@pytest.fixture
def published(tmp_path: Path) -> Path:
    path = tmp_path / "emc.json"
    path.write_text(json.dumps(GOOD))
    path.chmod(0o644)
    return path


def test_what_was_published_a_moment_ago_is_good(published: Path) -> None:
    assert read(published) == (Quantity.ok(665.6e6), Quantity.ok(2133e6))


def test_what_is_too_old_is_stale_and_says_its_age(published: Path) -> None:
    frequency_hz, max_hz = read(published, now_s=103.0)

    assert (frequency_hz.value, frequency_hz.quality) == (665.6e6, "stale")
    assert (max_hz.value, max_hz.quality) == (2133e6, "stale")
    assert "published 3 s ago" in frequency_hz.reason


def test_how_old_it_may_be_is_the_readers_choice(published: Path) -> None:
    found, _ = read_published(published, now_s=103.0, max_age_s=5.0, boot_id=BOOT, owners=US)

    assert found.quality == "ok"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        pytest.param({"boot_id": "another"}, "before this machine was last started", id="boot"),
        pytest.param({"boot_id": None}, "before this machine was last started", id="no boot"),
        pytest.param({"monotonic_s": 200.0}, "in the future", id="future"),
        pytest.param({"monotonic_s": "100"}, "lacks a stamp", id="stamp is a text"),
        pytest.param({"monotonic_s": float("nan")}, "lacks a stamp", id="stamp is no number"),
        pytest.param({"frequency_hz": 0}, "lacks a stamp or a frequency", id="zero"),
        pytest.param({"frequency_hz": -1.0}, "lacks a stamp or a frequency", id="negative"),
        pytest.param({"frequency_hz": True}, "lacks a stamp or a frequency", id="truth value"),
        pytest.param({"frequency_hz": 2**64 - 1}, "lacks a stamp or a frequency", id="2^64-1"),
        pytest.param({"frequency_hz": 10**400}, "lacks a stamp or a frequency", id="huge"),
        pytest.param({"version": 2}, "has version 2, not 1", id="newer version"),
    ],
)
def test_content_that_cannot_be_believed_is_unsupported(
    published: Path, change: dict[str, object], why: str
) -> None:
    published.write_text(json.dumps(GOOD | change))

    frequency_hz, max_hz = read(published)

    assert (frequency_hz.value, frequency_hz.quality) == (None, "unsupported")
    assert frequency_hz == max_hz
    assert why in frequency_hz.reason


@pytest.mark.parametrize("length", range(0, len(json.dumps(GOOD)), 7))
def test_a_truncated_file_is_unsupported(published: Path, length: int) -> None:
    published.write_text(json.dumps(GOOD)[:length])

    frequency_hz, _ = read(published)

    assert frequency_hz.quality == "unsupported"
    assert "truncated or damaged" in frequency_hz.reason


@pytest.mark.parametrize("data", [b"\xff\xfe\0", b"[" * 4096, b"[1]", b"null", b"1e999", b"{}"])
def test_garbage_is_unsupported(published: Path, data: bytes) -> None:
    published.write_bytes(data)

    assert "truncated or damaged" in read(published)[0].reason


def test_a_machine_without_a_boot_id_believes_nothing(published: Path) -> None:
    found, _ = read_published(published, now_s=100.01, boot_id=None, owners=US)

    assert found.quality == "unsupported"
    assert "boot id" in found.reason


def test_an_unknown_highest_frequency_does_not_hide_the_frequency(published: Path) -> None:
    published.write_text(json.dumps(GOOD | {"max_frequency_hz": None}))

    frequency_hz, max_hz = read(published)

    assert frequency_hz == Quantity.ok(665.6e6)
    assert (max_hz.value, max_hz.quality) == (None, "unsupported")


def test_a_file_of_another_user_is_not_trusted(published: Path) -> None:
    found, _ = read_published(published, now_s=100.01, boot_id=BOOT, owners=frozenset({4242}))

    assert found.quality == "unsupported"
    assert f"belongs to user {os.geteuid()}" in found.reason


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_a_file_that_others_may_write_is_not_trusted(published: Path, mode: int) -> None:
    published.chmod(mode)

    found, _ = read(published)

    assert found.quality == "unsupported"
    assert "others may write it" in found.reason


def test_links_folders_and_pipes_are_not_read(published: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(published)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe", 0o644)

    found = [read(tmp_path / name)[0] for name in ("link", "folder", "pipe")]

    assert [each.quality for each in found] == ["unsupported"] * 3


def test_without_a_publisher_the_reason_names_the_command(tmp_path: Path) -> None:
    found, _ = read(tmp_path / PUBLISHED)

    assert found.quality == "unsupported"
    assert "edgewise publish-emc" in found.reason


def test_a_file_that_may_not_be_read_is_denied(
    plant: Plant, as_somebody: Callable[[], None]
) -> None:
    path = plant({"emc.json": json.dumps(GOOD)}) / "emc.json"
    path.chmod(0)
    as_somebody()

    assert read(path)[0].quality == "denied"


def test_what_is_published_is_what_is_read(plant: Plant) -> None:
    root, clock = plant(ORIN), VirtualClock(50.0)
    with EmcPublisher(root, clock=clock) as publisher:
        assert publisher.publish() == Quantity.ok(665.6e6)
        first = read(root / PUBLISHED, 50.01)
        plant({f"{EMC}/rate": "204000000\n"})
        clock.sleep_s(0.01)
        publisher.publish()
        second = read(root / PUBLISHED, 50.02)

    assert first == (Quantity.ok(665.6e6), Quantity.ok(2133e6))
    assert second == (Quantity.ok(204e6), Quantity.ok(2133e6))
    assert read_boot_id(root) == BOOT


@pytest.mark.parametrize(
    ("files", "max_hz"),
    [
        ({"sys/kernel/nvpmodel_emc_cap/emc_iso_cap": "0\n"}, 3199e6),
        ({"sys/kernel/nvpmodel_emc_cap/emc_iso_cap": "<unknown>\n"}, 3199e6),
        ({f"{EMC}/max_rate": "18446744073709551615\n"}, None),
    ],
    ids=["no cap", "garbled cap", "unset highest rate"],
)
def test_the_highest_frequency_is_the_lower_of_rate_and_cap(
    plant: Plant, files: dict[str, str], max_hz: float | None
) -> None:
    root = plant(ORIN | files)
    with EmcPublisher(root, clock=VirtualClock(50.0)) as publisher:
        publisher.publish()

        assert read(root / PUBLISHED, 50.0)[1].value == max_hz


def test_the_file_may_be_read_by_all_and_written_by_its_owner_only(plant: Plant) -> None:
    root = plant(ORIN)
    before = os.umask(0o077)
    try:
        with EmcPublisher(root) as publisher:
            publisher.publish()
            modes = [publisher.path.stat().st_mode & 0o777]
            modes.append(publisher.path.parent.stat().st_mode & 0o777)
            names = [each.name for each in publisher.path.parent.iterdir()]
    finally:
        os.umask(before)

    assert [oct(each) for each in modes] == ["0o644", "0o755"]
    assert names == ["emc.json"]


def test_a_publisher_that_stops_removes_its_file(plant: Plant) -> None:
    root = plant(ORIN)
    stopping = threading.Event()
    with EmcPublisher(root, period_s=1e-3) as publisher:
        thread = threading.Thread(target=publisher.run, args=(stopping,))
        thread.start()
        while not publisher.path.exists():
            time.sleep(1e-3)
        stopping.set()
        thread.join()

    assert list(publisher.path.parent.iterdir()) == []


def test_a_rate_that_cannot_be_read_for_a_while_grows_old(plant: Plant) -> None:
    root, clock = plant(ORIN), VirtualClock(50.0)
    with EmcPublisher(root, clock=clock) as publisher:
        publisher.publish()
        plant({f"{EMC}/rate": "0\n"})
        clock.sleep_s(0.1)

        assert publisher.publish().quality == "unsupported"
        assert read(publisher.path, clock.now_s())[0].quality == "stale"


def test_a_link_where_the_temporary_file_belongs_is_not_followed(
    plant: Plant, tmp_path: Path
) -> None:
    root, victim = plant(ORIN), tmp_path / "victim"
    victim.write_text("precious")
    with EmcPublisher(root) as publisher:
        (publisher.path.parent / ".emc.json.tmp").symlink_to(victim)
        publisher.publish()

        assert victim.read_text() == "precious"
        assert not publisher.path.is_symlink()


def test_two_publishers_do_not_write_one_file(plant: Plant) -> None:
    root, clock = plant(ORIN), VirtualClock(50.0)
    with EmcPublisher(root, clock=clock) as publisher:
        publisher.publish()
        with pytest.raises(EdgeError, match="another publisher"):
            EmcPublisher(root, clock=clock)

        assert publisher.path.exists()


def test_a_machine_that_is_no_jetson_is_told_so(plant: Plant) -> None:
    root = plant({"proc/sys/kernel/random/boot_id": BOOT})

    with pytest.raises(EdgeError, match="memory clock cannot be read") as caught:
        EmcPublisher(root)

    assert "only Jetson boards" in str(caught.value.help)
    assert not (root / "run").exists()


def test_somebody_without_privileges_is_told_to_be_root(
    plant: Plant, as_somebody: Callable[[], None]
) -> None:
    root = plant(ORIN)
    # Of the file, as those of the folder would keep the test from cleaning up.
    (root / EMC / "rate").chmod(0o400 if os.geteuid() == 0 else 0)
    as_somebody()

    with pytest.raises(EdgeError, match="no permission") as caught:
        EmcPublisher(root)

    assert "sudo edgewise publish-emc" in str(caught.value.help)


def test_a_place_that_cannot_be_written_is_named(
    plant: Plant, as_somebody: Callable[[], None]
) -> None:
    root = plant(ORIN)
    root.chmod(0o555)
    as_somebody()

    with pytest.raises(EdgeError, match="cannot be written"):
        EmcPublisher(root)


@pytest.mark.parametrize("period_s", [0.0, 5e-4, 0.03, float("nan")])
def test_a_period_that_readers_would_take_for_stale_is_refused(
    plant: Plant, period_s: float
) -> None:
    with pytest.raises(ConfigError, match="expected a period"):
        EmcPublisher(plant(ORIN), period_s=period_s)


def test_a_machine_without_a_boot_id_publishes_nothing(plant: Plant) -> None:
    with pytest.raises(EdgeError, match="boot_id"):
        EmcPublisher(plant({f"{EMC}/rate": "665600000\n"}))


_RUN = """
import sys, threading
from pathlib import Path
from edgewise.device.publisher import EmcPublisher
EmcPublisher(Path(sys.argv[1]), period_s=1e-3).run(threading.Event())
"""


def test_a_publisher_that_is_killed_leaves_a_whole_file_that_is_soon_old(plant: Plant) -> None:
    root = plant(ORIN)
    path, clock = root / PUBLISHED, MonotonicClock()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for after in (1, 20, 137):
        path.unlink(missing_ok=True)
        with subprocess.Popen([sys.executable, "-c", _RUN, str(root)], env=environment) as process:
            seen: set[float] = set()
            while len(seen) < after:  # each is whole, however often one looks
                assert process.poll() is None
                if path.exists():
                    content = json.loads(path.read_text())
                    assert content.keys() == GOOD.keys()
                    seen.add(content["monotonic_s"])
            process.send_signal(signal.SIGKILL)
        left = {each.name for each in path.parent.iterdir()}
        now_s = clock.now_s()

        assert left <= {"emc.json", ".emc.json.tmp"}
        assert json.loads(path.read_text()).keys() == GOOD.keys()
        assert read(path, now_s + 2 * MAX_AGE_S)[0].quality == "stale"

    clock.sleep_s(2 * MAX_AGE_S)  # what was killed must not pass for one that runs
    with EmcPublisher(root) as publisher:
        publisher.publish()
    assert list(path.parent.iterdir()) == []


_RUN_UNTIL_RENAMING = """
import os, signal, sys
from pathlib import Path
from edgewise.device.publisher import EmcPublisher
rename, left = Path.replace, int(sys.argv[2])
def rename_or_die(self, target):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(self, target)
Path.replace = rename_or_die
publisher = EmcPublisher(Path(sys.argv[1]))
while True:
    publisher.publish()
"""


@pytest.mark.parametrize("renamings", [0, 3])
def test_one_that_is_killed_before_renaming_leaves_the_file_before_or_none(
    plant: Plant, renamings: int
) -> None:
    root = plant(ORIN)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", _RUN_UNTIL_RENAMING, str(root), str(renamings)],
        env=environment,
        check=False,
    )

    path = root / PUBLISHED
    assert done.returncode == -signal.SIGKILL
    assert path.exists() == (renamings > 0)
    if renamings:
        assert json.loads(path.read_text()).keys() == GOOD.keys()
    with EmcPublisher(root, clock=VirtualClock(1e9)) as publisher:
        publisher.publish()  # not in the way of the next one
    assert list(path.parent.iterdir()) == []


def test_stamps_are_on_the_clock_that_all_processes_share() -> None:
    assert time.get_clock_info("perf_counter").implementation == "clock_gettime(CLOCK_MONOTONIC)"
    assert abs(MonotonicClock().now_s() - time.clock_gettime(time.CLOCK_MONOTONIC)) < 1.0


def test_the_systemd_unit_makes_the_folder_and_starts_the_publisher() -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(files("edgewise.device").joinpath(UNIT).read_text(encoding="utf-8"))

    assert unit["Service"]["ExecStart"].endswith("edgewise publish-emc")
    assert f"run/{unit['Service']['RuntimeDirectory']}/emc.json" == PUBLISHED
    assert unit["Unit"]["ConditionPathExists"] == f"/{EMC}/rate"
