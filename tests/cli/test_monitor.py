from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console

from edgewise.cli import monitor as cli
from edgewise.cli.main import COMMANDS, INTERRUPTED, main
from edgewise.clock import VirtualClock
from edgewise.device.monitor import THREAD_NAME, MonitorCost
from edgewise.device.recording import Recorder, Replay
from edgewise.device.state import DeviceState, Quantity

SLOW_BUS = Quantity.missing("denied", "for root only")
QUANTITIES = {
    "power.VDD_IN_w": Quantity.ok(4.025),
    "emc.frequency_hz": SLOW_BUS,
    "emc.frequency_ratio": SLOW_BUS,
    "thermal.zone10_celsius": Quantity.ok(44.0),
    "thermal.zone9_celsius": Quantity.missing("masked", "the zone is gated"),
    "gpu.frequency_hz": Quantity.ok(306e6),
    "gpu.utilisation_ratio": Quantity(value=0.1, quality="stale", reason="read 2 s ago"),
    "cpu.frequency_hz": Quantity.ok(1.19e9),
    "cpu.utilisation_ratio": Quantity.ok(0.5),
    "cpu0.frequency_hz": Quantity.ok(1.19e9),
    "cpu1.frequency_hz": Quantity.missing("masked", "the core is offline"),
    "throttle.events_count": Quantity.ok(3),
    "energy.package-0_j": Quantity.ok(12.34),
    "board.fan_ratio": Quantity.ok(0.25),
}
COST = MonitorCost(
    reads=124,
    cpu_ratio=0.0123,
    read_p50_s=85e-6,
    read_p99_s=210e-6,
    callback_p50_s=None,
    callback_cpu_ratio=0.0,
    late_ratio=0.003,
)


def shown(quantities: dict[str, Quantity], *, everything: bool = False) -> list[str]:
    page = cli._page(
        DeviceState(at_s=0.0, quantities=quantities),
        heading="a board",
        footer=cli._footer(COST, None),
        everything=everything,
    )
    console = Console(width=100, force_terminal=False, markup=False, highlight=False)
    with console.capture() as captured:
        console.print(page)
    return [each.rstrip() for each in captured.get().splitlines()]


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """One second in which the load goes from 0 to 100 %."""
    with Recorder(tmp_path / "device.jsonl", period_s=0.1, note="a board") as recorder:
        for step in range(11):
            load = {"cpu.utilisation_ratio": Quantity.ok(step / 10)}
            recorder(DeviceState(at_s=7 + step / 10, quantities={**QUANTITIES, **load}))
    return recorder.path


def test_a_person_sees_parts_in_order_units_bars_reasons_and_the_cost() -> None:
    assert shown(QUANTITIES) == [
        "Device state · a board",
        "",
        "cpu       frequency_hz              1.19 GHz          ok",
        "          utilisation_ratio             50 %  ━━━───  ok",
        "gpu       frequency_hz               306 MHz          ok",
        "          utilisation_ratio             10 %  ━─────  stale   read 2 s ago",
        "emc       frequency_hz,                    –          denied  for root only",
        "          frequency_ratio",
        "thermal   zone10_celsius             44.0 °C          ok",
        "          zone9_celsius                    –          masked  the zone is gated",
        "throttle  events_count                     3          ok",
        "power     VDD_IN_w                    4.03 W          ok",
        "energy    package-0_j                 12.3 J          ok",
        "board     fan_ratio                     25 %  ━━────  ok",
        "",
        "watching costs 1.2 % of one core · a reading 85 µs, p99 210 µs · 124 readings, 0.3 % late",
    ]


def test_all_gives_each_core_and_each_missing_quantity_a_line() -> None:
    lines = [each.split() for each in shown(QUANTITIES, everything=True)]

    names = [next((word for word in line if "_" in word), "") for line in lines]
    assert names[2:6] == [
        "frequency_hz",
        "utilisation_ratio",
        "cpu0.frequency_hz",
        "cpu1.frequency_hz",
    ]
    assert names.count("frequency_ratio") == 1
    assert names.index("zone9_celsius") < names.index("zone10_celsius")


def test_a_state_without_quantities_says_so() -> None:
    assert "nothing has been read yet" in "\n".join(shown({}))


def test_a_live_table_cuts_names_and_reasons_and_nothing_else() -> None:
    long = Quantity(value=2e9, quality="stale", reason="because " * 40)
    page = cli._page(
        DeviceState(at_s=0.0, quantities={"emc." + "long" * 20 + "_hz": long}),
        heading="",
        footer="",
        everything=False,
        one_line=True,
    )
    console = Console(width=80, force_terminal=False)
    with console.capture() as captured:
        console.print(page)

    (row,) = [each for each in captured.get().splitlines() if "because" in each]
    assert re.fullmatch(r"emc  (long){5}lon… +2\.00 GHz +stale  because .*…", row.rstrip()), row


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("gpu.frequency_hz", 918e6, "918 MHz"),
        ("cpu.frequency_hz", 1.1904e9, "1.19 GHz"),
        ("gpu.utilisation_ratio", 0.333, "33 %"),
        ("thermal.cpu_celsius", 45.25, "45.2 °C"),
        ("power.VDD_IN_w", 4.025, "4.03 W"),
        ("energy.package-0_j", 1234.56, "1234.6 J"),
        ("cpu.window_s", 0.05, "50 ms"),
        ("memory.free_bytes", 1536.0, "1.5 KiB"),
        ("throttle.events_count", 3.0, "3"),
        ("gpu.frequency_hz", None, "–"),
    ],
)
def test_values_carry_their_units(name: str, value: float | None, text: str) -> None:
    assert cli._format(name, value) == text


def test_elsewhere_than_on_a_terminal_one_table_is_printed_at_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["monitor", "--for", "30 ms"]) == 0

    out = capsys.readouterr().out
    assert out.startswith("Device state · ")
    assert out.count("Device state") == 1
    assert "\n\nwatching costs " in out
    assert not _threads()


def test_json_is_one_object_with_values_reasons_and_cost(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["monitor", "--for", "50 ms", "--period", "5 ms", "--json"]) == 0

    said = capsys.readouterr()
    found = json.loads(said.out)
    assert said.err == ""
    assert found["source"] == "/"
    assert found["period_s"] == 0.005
    assert found["recording"] is None
    assert found["cost"]["reads"] >= 1
    assert list(found["cost"]) == list(MonitorCost.__dataclass_fields__)
    assert found["quantities"]
    for each in found["quantities"].values():
        assert (each["quality"] == "ok") == (each["reason"] == "")
        assert (each["value"] is None) <= (each["quality"] != "ok")


def test_a_bare_machine_has_reasons_and_no_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["monitor", "--for", "20 ms", "--json", "--root", str(tmp_path)]) == 0

    quantities = json.loads(capsys.readouterr().out)["quantities"]
    from_files = {n: q for n, q in quantities.items() if q["quality"] == "ok"}
    assert not {n for n in from_files if n.startswith(("cpu.frequency", "emc.", "thermal."))}
    for each in quantities.values():
        assert each["value"] != 0 or each["quality"] == "ok"


def test_what_is_recorded_can_be_shown_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "device.jsonl"
    assert main(["monitor", "--for", "50 ms", "--record", str(path), "--json"]) == 0
    recorded = json.loads(capsys.readouterr().out)
    assert main(["monitor", "--replay", str(path), "--json"]) == 0
    replayed = json.loads(capsys.readouterr().out)

    assert recorded["recording"]["path"] == str(path)
    assert recorded["recording"]["states"] >= recorded["cost"]["reads"] - 1
    assert replayed["recording"]["states"] == len(Replay(path, VirtualClock()).states)
    assert set(replayed["quantities"]) == set(recorded["quantities"])
    assert replayed["cost"] is None


def test_a_replay_shows_the_instant_that_was_asked_for(
    recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(*options: str) -> float:
        assert main(["monitor", "--replay", str(recording), "--json", *options]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["source"] == str(recording)
        value: float = found["quantities"]["cpu.utilisation_ratio"]["value"]
        return value

    assert load() == 1.0
    assert load("--for", "350 ms") == 0.3
    assert load("--for", "1 min") == 1.0


def test_a_replay_is_labelled_as_one(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor", "--replay", str(recording), "--for", "300 ms"]) == 0

    out = capsys.readouterr().out
    assert "a board · recording device.jsonl at 0.3 of 1.0 s" in out
    assert "11 states recorded; this machine is not read" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(["--for", "3"], "has no unit", id="no unit"),
        pytest.param(["--period", "1 us"], "from 1 ms to 1 h", id="period too short"),
        pytest.param(["--root", "{tmp}/none"], "is not a directory", id="no root"),
        pytest.param(["--replay", "{tmp}/none"], "No such file", id="no recording"),
        pytest.param(["--replay", __file__], "is not a recording", id="another file"),
        pytest.param(["--record", __file__], "exists and is not a recording", id="not replaced"),
        pytest.param(["--record", "{tmp}/none/r"], "cannot record", id="no folder"),
        pytest.param(["--replay", "a", "--record", "b"], "with --record", id="both"),
        pytest.param(["--replay", "a", "--root", "b"], "with --root", id="replay of a root"),
    ],
)
def test_mistakes_are_told_with_the_next_step(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["monitor", *(each.format(tmp=tmp_path) for each in arguments)])

    err = capsys.readouterr().err
    assert code == 2
    assert said in err
    assert "\nhelp: " in err
    assert not _threads()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_told_and_the_table_is_shown_all_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["monitor", "--for", "50 ms", "--record", "/dev/full"]) == 1

    said = capsys.readouterr()
    assert "Device state" in said.out
    assert "error: the recording stopped: No space left on device: /dev/full\nhelp: " in said.err


PROGRAM = "import sys; from edgewise.cli.main import main; sys.exit(main(sys.argv[1:]))"


def _on_a_terminal(*arguments: str, wait_for: bytes | None = None) -> tuple[str, int]:
    """Run the command on a terminal of 100 columns; press Ctrl-C when something appears."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "100", "LINES": "60", "TERM": "xterm"}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "monitor", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
    ) as process:
        os.close(theirs)
        out = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # how Linux says that the other end is closed
                break
            out += piece
            if wait_for is not None and wait_for in out:
                process.send_signal(signal.SIGINT)
                wait_for = None
            if not piece:
                break
        code = process.wait()
    os.close(ours)
    return out.decode(errors="replace"), code


def test_on_a_terminal_the_table_is_live_until_ctrl_c(tmp_path: Path) -> None:
    path = tmp_path / "device.jsonl"
    # The second table: the first may appear before anything is recorded.
    out, code = _on_a_terminal("--record", str(path), wait_for=b"\x1b[1A")

    assert code == INTERRUPTED
    assert out.count("Device state") >= 2
    assert "edgewise monitor watched for" in out
    assert f"{path} holds " in out.replace("\r\n", "")
    assert "Traceback" not in out
    assert out.rindex("\x1b[?25h") > out.rindex("Device state")  # the cursor is back
    replay = Replay(path, VirtualClock())
    assert replay.problem == ""
    assert len(replay.states) >= 1


def test_on_a_terminal_the_time_may_be_limited(recording: Path) -> None:
    out, code = _on_a_terminal("--replay", str(recording), "--for", "300 ms")

    assert code == 0
    assert out.count("recording device.jsonl at ") >= 2


def test_the_command_is_in_the_table_of_commands() -> None:
    assert COMMANDS["monitor"].target == "edgewise.cli.monitor:monitor"


def _threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == THREAD_NAME]
