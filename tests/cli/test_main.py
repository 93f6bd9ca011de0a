from __future__ import annotations

import errno
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import pytest
import typer

from edgewise.cli import main as cli
from edgewise.errors import (
    BackendUnavailable,
    CheckpointError,
    ConfigError,
    EdgeError,
    Infeasible,
    ModelError,
    ProfileError,
    ShapeError,
)

ROOT = Path(__file__).parents[2]

_raised: BaseException | None = None


def fake(
    *, count: Annotated[int, typer.Option(help="How many, see 'edgewise[onnx]'.")] = 1
) -> None:
    """Do what the test asks.

    Args:
        count: Not for the terminal.
    """
    sys.stdout.write(f"count {count}\n")
    if _raised is not None:
        raise _raised


@pytest.fixture(autouse=True)
def _table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add a command whose behaviour the test chooses."""
    monkeypatch.setitem(sys.modules, "edgewise_fake_command", sys.modules[__name__])
    monkeypatch.setitem(cli.COMMANDS, "fake", cli.Command("edgewise_fake_command:fake", "Fake."))
    monkeypatch.delenv("EDGEWISE_DEBUG", raising=False)


def run_raising(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys.modules[__name__], "_raised", error)
    return cli.main(["fake"])


def test_help_names_every_command_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0

    shown = capsys.readouterr().out
    for name, command in cli.COMMANDS.items():
        assert any(name in line and command.help in line for line in shown.splitlines())


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert "Usage: edgewise COMMAND" in capsys.readouterr().out


def test_the_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("edgewise ")


def test_an_unknown_command_gets_the_nearest_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["docter"]) == 2

    said = capsys.readouterr()
    assert "did you mean 'doctor'?" in said.err
    assert "help: edgewise --help" in said.err
    assert said.out == ""


def test_a_command_gets_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fake", "--count", "3"]) == 0
    assert capsys.readouterr().out == "count 3\n"


@pytest.mark.parametrize("form", [["fake", "--help"], ["help", "fake"]])
def test_help_of_a_command_is_its_docstring_without_the_sections(
    form: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(form) == 0

    shown = capsys.readouterr().out
    assert "Do what the test asks." in shown
    assert "edgewise[onnx]" in shown
    assert "Not for the terminal" not in shown


@pytest.mark.parametrize(
    "arguments",
    [["--count", "many"], ["--cuont", "3"], ["surplus"]],
    ids=["not a number", "misspelt option", "surplus argument"],
)
def test_a_mistyped_argument_ends_with_error_and_help(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["fake", *arguments]) == 2

    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.endswith("help: edgewise fake --help\n")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (ShapeError("x"), 2),
        (ProfileError("x"), 3),
        (CheckpointError("x"), 3),
        (BackendUnavailable("x"), 4),
        (ModelError("x"), 4),
        (Infeasible("x"), 5),
        (EdgeError("x"), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_each_kind_of_error_has_its_exit_code(
    error: EdgeError, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_raising(error, monkeypatch) == code


def test_an_error_says_what_to_do_next(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_raising(BackendUnavailable("no [b]openvino[/b]", help="edgewise doctor"), monkeypatch)

    assert capsys.readouterr().err == "error: no [b]openvino[/b]\nhelp: edgewise doctor\n"


def test_an_interrupt_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_raising(KeyboardInterrupt("kept 12 samples"), monkeypatch) == 130
    assert capsys.readouterr().err == "interrupted: edgewise fake kept 12 samples\n"


def test_our_own_fault_is_one_line_and_the_way_to_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_raising(ZeroDivisionError("by\nzero"), monkeypatch) == 70

    first, second = capsys.readouterr().err.splitlines()
    assert first == "internal error: ZeroDivisionError: by zero"
    assert "EDGEWISE_DEBUG=1" in second


def test_debugging_shows_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EDGEWISE_DEBUG", "1")
    run_raising(ZeroDivisionError("x"), monkeypatch)

    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_a_full_disk_is_no_fault_of_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "/data/x")

    assert run_raising(full, monkeypatch) == 1
    assert capsys.readouterr().err.startswith("error: No space left on device: /data/x\nhelp: ")


def test_a_reader_that_goes_away_is_not_complained_about() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    program = "import sys; from edgewise.cli.main import main; sys.exit(main(['--help']))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
        timeout=60,
    )
    os.close(writing)

    assert done.returncode == 141
    assert done.stderr == b""


def _targets(commands: Mapping[str, cli.Command]) -> Iterator[object]:
    for command in commands.values():
        module, _, name = command.target.partition(":")
        found = getattr(importlib.import_module(module), name)
        if isinstance(found, Mapping):
            yield from _targets(found)
        else:
            yield found


def test_every_command_in_the_table_exists() -> None:
    assert all(callable(target) for target in _targets(cli.COMMANDS))


def test_a_command_of_a_group_is_found_and_its_neighbours_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["dispatch"]) == 0
    assert "edgewise dispatch COMMAND" in capsys.readouterr().out
    assert cli.main(["dispatch", "trase"]) == 2
    assert "did you mean 'trace'" in capsys.readouterr().err


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_stream_that_the_shell_has_closed_stops_no_work(closed: str) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", f'"$0" -m edgewise doctor --help {closed}', sys.executable],
        check=False,
        timeout=60,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr


def test_the_documentation_lists_every_exit_code() -> None:
    page = (ROOT / "docs/reference/exit-codes.md").read_text(encoding="utf-8")
    codes = {code for _, code in cli.EXIT_CODES}

    for code in sorted(codes | {0, 1, cli.INTERNAL_ERROR, cli.INTERRUPTED, cli.BROKEN_PIPE}):
        assert f"\n| {code} | " in page
