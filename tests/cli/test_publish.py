from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edgewise.cli.main import COMMANDS, Command, main
from edgewise.cli.publish import unit_text

EMC = "sys/kernel/debug/bpmp/debug/clk/emc"
COMMAND = Command("edgewise.cli.publish:publish_emc", "Publish the memory clock.")
# In a process of its own: what it does with signals is what is tested.
RUN = """
import sys
from edgewise.cli.main import COMMANDS, Command, main
COMMANDS["publish-emc"] = Command("edgewise.cli.publish:publish_emc", "Publish the memory clock.")
sys.exit(main(["publish-emc", "--root", sys.argv[1]]))
"""


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "publish-emc", COMMAND)


@pytest.fixture
def board(tmp_path: Path) -> Path:
    for name, text in {
        "proc/sys/kernel/random/boot_id": "1b4e28ba\n",
        f"{EMC}/rate": "665600000\n",
        f"{EMC}/max_rate": "3199000000\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("stop", "code", "said"),
    [(signal.SIGTERM, 0, ""), (signal.SIGINT, 130, "was stopped")],
    ids=["SIGTERM", "Ctrl-C"],
)
def test_the_file_is_removed_when_the_publisher_is_stopped(
    board: Path, stop: signal.Signals, code: int, said: str
) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", RUN, str(board)],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        there = [each.name for each in (board / "run/edgewise").glob("*.json")]
        process.send_signal(stop)
        rest = process.stderr.read()

    assert "the memory clock is published" in first
    assert there == ["emc.json"]
    assert process.returncode == code
    assert said in rest
    assert "Traceback" not in rest
    assert list((board / "run/edgewise").iterdir()) == []


def test_a_machine_without_the_clock_gets_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["publish-emc", "--root", str(tmp_path)]) == 1
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize("period", ["10", "1 h", "60ms", "-1ms"])
def test_a_period_that_cannot_be_is_a_mistake_of_the_user(
    board: Path, capsys: pytest.CaptureFixture[str], period: str
) -> None:
    assert main(["publish-emc", "--root", str(board), "--period", period]) == 2
    assert "help:" in capsys.readouterr().err


def test_the_unit_runs_the_python_that_has_edgewise(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["publish-emc", "--unit"]) == 0

    said = capsys.readouterr().out
    assert said == unit_text()
    assert f'ExecStart="{sys.executable}" -m edgewise publish-emc' in said


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None or os.geteuid() != 0,
    reason="needs systemd-analyze, which needs root",
)
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    path = tmp_path / "edgewise-emc.service"
    path.write_text(unit_text())

    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0
    assert path.name not in done.stderr  # of other units it may say what it likes
