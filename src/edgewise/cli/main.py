"""Finds the command, runs it, and turns whatever stops it into a message and an exit code.

A command's module is imported when that command is called, so help is quick and needs no runtime.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgewise.cli.output import print_error, stdout_console
from edgewise.errors import (
    BackendError,
    CheckpointError,
    ConfigError,
    DataError,
    EdgeError,
    Infeasible,
    ModelError,
    ProfileError,
    nearest_names,
)


@dataclass(frozen=True, slots=True)
class Command:
    """One line of the table of commands.

    Attributes:
        target: ``"module:function"``; Typer reads the function's signature. Or
            ``"module:COMMANDS"``, a table like :data:`COMMANDS` of the words that may follow.
        help: What it does, one imperative line.
    """

    target: str
    help: str


COMMANDS = {
    "demo": Command(
        "edgewise.cli.demo:demo",
        "Watch a classifier meet its latency budget here while load comes and goes.",
    ),
    "doctor": Command(
        "edgewise.cli.doctor:doctor",
        "Say what this machine offers, what is missing and which command would change it.",
    ),
    "stage": Command(
        "edgewise.cli.stage:stage", "Show where a model can be cut and what each stage costs."
    ),
    "prepare": Command(
        "edgewise.cli.prepare:prepare", "Fit exit heads on a model and save the result."
    ),
    "monitor": Command(
        "edgewise.cli.monitor:monitor",
        "Show the device's state: clocks, load, heat, throttling, power, energy.",
    ),
    "publish-emc": Command(
        "edgewise.cli.publish:publish_emc",
        "As root: publish the memory clock for programs that may not read it.",
    ),
    "profile": Command(
        "edgewise.cli.profile:profile", "Measure what each stage of a model costs on this machine."
    ),
    "fit": Command(
        "edgewise.cli.fit:fit",
        "Fit a predictor of a model's costs in every state of a device.",
    ),
    "fit-exits": Command(
        "edgewise.cli.fit_exits:fit_exits",
        "Fit a language model's exits on text, and score them on other text.",
    ),
    "place": Command(
        "edgewise.cli.place:place", "Plan who runs where: several models, one accelerator, cores."
    ),
    "run-workload": Command(
        "edgewise.cli.run_workload:run_workload",
        "Play a workload of several models: predicted against observed.",
    ),
    "dispatch": Command(
        "edgewise.cli.dispatch:COMMANDS",
        "Choose which backend runs each operator of a transformer, and run that.",
    ),
    "pull": Command(
        "edgewise.cli.pull:pull", "Make a language model from an installed package, or list them."
    ),
    "run": Command("edgewise.cli.run:run", "Answer inputs within a latency budget."),
    "generate": Command(
        "edgewise.cli.generate:generate",
        "Continue a text within a time per token, at full depth or leaving earlier.",
    ),
    "evaluate": Command(
        "edgewise.cli.evaluate:evaluate",
        "Compare exit policies: same inputs, interleaved, at several budgets.",
    ),
    "reproduce": Command(
        "edgewise.cli.reproduce:reproduce",
        "Run one claim of a paper and say whether it holds here.",
    ),
    "bench": Command("edgewise.cli.bench:bench", "Measure what this program claims about itself."),
}

# The most specific kind comes first.
EXIT_CODES: tuple[tuple[type[EdgeError], int], ...] = (
    (ConfigError, 2),
    (DataError, 2),
    (ProfileError, 3),
    (CheckpointError, 3),
    (BackendError, 4),
    (ModelError, 4),
    (Infeasible, 5),
)
INTERNAL_ERROR = 70  # EX_SOFTWARE of sysexits.h
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
BROKEN_PIPE = 141  # 128 + SIGPIPE

_MACHINE_SAYS_NO = {
    errno.ENOSPC: "free some space and run the command again; finished work is kept",
    errno.EDQUOT: "free some space and run the command again; finished work is kept",
    errno.EROFS: "name a place that can be written",
    errno.EACCES: "name a place that this user may use, or change its permissions",
    errno.EPERM: "name a place that this user may use, or change its permissions",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program's name; those of the process by default.

    Returns:
        The exit code: 0 done, 1 another failure, 2 a mistake in arguments or data, 3 a damaged or
        foreign profile or checkpoint, 4 a runtime or model that cannot be used, 5 no decision meets
        the constraints, 70 a fault of ours, 130 interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    _open_what_is_closed()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A terminal that cannot show "µ" gets "?" rather than a traceback.
            stream.reconfigure(errors="replace")
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt as stop:
        _show_traceback_if_asked()
        kept = str(stop) or "stopped before it was done"
        print_error(f"{_called(arguments)} {kept}", label="interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        _silence_stdout()
        return BROKEN_PIPE
    except EdgeError as error:
        _show_traceback_if_asked()
        print_error(error.message, help=error.help)
        return exit_code(error)
    except Exception as error:  # noqa: BLE001 - the last place that can say something useful
        _show_traceback_if_asked()
        return _report_unexpected(error)
    return code


def exit_code(error: EdgeError) -> int:
    """Exit code for an error of ours.

    Example:
        >>> exit_code(ConfigError("no such file")), exit_code(EdgeError("something else"))
        (2, 1)
    """
    return next((code for kind, code in EXIT_CODES if isinstance(error, kind)), 1)


def version() -> str:
    """Version of the installed package, ``"unknown"`` where it runs without being installed."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("edgewise")
    except PackageNotFoundError:
        return "unknown"


def _dispatch(arguments: list[str]) -> int:
    first = arguments[0] if arguments else "--help"
    if first == "help" and len(arguments) > 1:
        return _dispatch([*arguments[1:], "--help"])
    if first in {"--help", "-h", "help"}:
        _print_help(COMMANDS, f"Edgewise {version()}: neural networks whose answers arrive in time")
        return 0
    if first in {"--version", "-V"}:
        sys.stdout.write(f"edgewise {version()}\n")
        return 0
    if first not in COMMANDS:
        what = "option" if first.startswith("-") else "command"
        known = ("--help", "--version") if what == "option" else tuple(COMMANDS)
        raise ConfigError(
            f"edgewise has no {what} {first!r}; {nearest_names(first, known)}",
            help="edgewise --help",
        )
    return _run(first, COMMANDS[first], arguments[1:])


def _run(name: str, entry: Command, arguments: list[str]) -> int:
    import typer
    import typer.main

    module_name, _, attribute = entry.target.partition(":")
    found = getattr(importlib.import_module(module_name), attribute)
    if isinstance(found, Mapping):
        return _run_in_group(name, entry, found, arguments)
    function: Callable[..., Any] = found
    # Markdown, since in rich's own markup "edgewise[onnx]" would lose its brackets.
    app = typer.Typer(add_completion=False, rich_markup_mode="markdown")
    app.command(name=name, help=_help_text(function) or entry.help)(function)
    command = typer.main.get_command(app)
    called = f"edgewise {name}"
    try:
        # Not command.main(): it would turn an interrupt into a code and lose its message.
        with command.make_context(called, arguments) as context:
            result = command.invoke(context)
    except typer.Exit as stop:
        return stop.exit_code
    except typer.Abort:
        raise KeyboardInterrupt from None
    except typer.TyperException as error:
        raise ConfigError(error.format_message(), help=f"{called} --help") from error
    return result if isinstance(result, int) else 0


def _run_in_group(
    group: str, entry: Command, commands: Mapping[str, Command], arguments: list[str]
) -> int:
    first = arguments[0] if arguments else "--help"
    if first in {"--help", "-h", "help"}:
        _print_help(commands, entry.help, group=f" {group}")
        return 0
    if first not in commands:
        raise ConfigError(
            f"edgewise {group} has no command {first!r}; {nearest_names(first, tuple(commands))}",
            help=f"edgewise {group} --help",
        )
    return _run(f"{group} {first}", commands[first], arguments[1:])


def _help_text(function: Callable[..., Any]) -> str:
    text = inspect.getdoc(function) or ""
    return re.split(r"\n\n(?:Args|Returns|Raises|Source|Example):", text)[0]


def _print_help(commands: Mapping[str, Command], title: str, *, group: str = "") -> None:
    from rich.table import Table
    from rich.text import Text

    console = stdout_console()
    console.print(f"{title}\n")
    console.print(Text.assemble(("Usage:", "bold"), f" edgewise{group} COMMAND [OPTIONS]\n"))
    table = Table.grid(padding=(0, 2))
    for name, command in commands.items():
        table.add_row("", Text(name, style="bold cyan"), command.help)
    console.print(table)
    console.print(f"\nedgewise{group} COMMAND --help explains one command.")


def _called(arguments: list[str]) -> str:
    return f"edgewise {arguments[0]}" if arguments and arguments[0] in COMMANDS else "edgewise"


def _report_unexpected(error: Exception) -> int:
    if isinstance(error, OSError) and error.errno in _MACHINE_SAYS_NO:
        where = f": {error.filename}" if error.filename else ""
        print_error(f"{error.strerror}{where}", help=_MACHINE_SAYS_NO[error.errno])
        return 1
    message = " ".join(str(error).split()) or "no message"
    print_error(f"{type(error).__name__}: {message}", label="internal error", help=_debug_help())
    return INTERNAL_ERROR


def _debug_help() -> str | None:
    if _debugging():
        return None
    return "this is a fault of edgewise; EDGEWISE_DEBUG=1 before the command shows where it is"


def _debugging() -> bool:
    return os.environ.get("EDGEWISE_DEBUG", "") not in {"", "0"}


def _show_traceback_if_asked() -> None:
    if _debugging():
        traceback.print_exc()


def _open_what_is_closed() -> None:
    """Give a stream that the shell has closed (``>&-``) somewhere to write; work is done anyway."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115 - stays open


def _silence_stdout() -> None:
    # Python flushes standard output once more when it exits, and would complain.
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
