"""How commands speak: one JSON object for programs, tables for people, errors with a next step."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]

_PIPED_WIDTH = 100


def emit_json(obj: object) -> None:
    """Write exactly one JSON object on standard output, and nothing else.

    Args:
        obj: A mapping or a dataclass. Records, paths, enumerations and numpy values inside it are
            turned into JSON; NaN and infinities become null, since JSON has none.

    Raises:
        TypeError: It is not an object in JSON's sense, or holds something JSON cannot say.
    """
    plain = to_plain(obj)
    if not isinstance(plain, dict):
        raise TypeError(f"expected a mapping or a record, found {type(obj).__name__}")
    sys.stdout.write(json.dumps(plain, indent=2, allow_nan=False) + "\n")
    sys.stdout.flush()


def to_plain(obj: object) -> Plain:  # noqa: PLR0911 - one line per kind of value
    """Turn records into what JSON can say.

    Example:
        >>> to_plain({"wait_s": math.nan, "path": (1, 2)})
        {'wait_s': None, 'path': [1, 2]}
    """
    if isinstance(obj, enum.Enum):
        return to_plain(obj.value)
    if obj is None or isinstance(obj, bool | int | str):
        return obj
    if isinstance(obj, float):
        return float(obj) if math.isfinite(obj) else None
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        return {each.name: to_plain(getattr(obj, each.name)) for each in dataclasses.fields(obj)}
    if isinstance(obj, Mapping):
        return {str(key): to_plain(value) for key, value in obj.items()}
    if isinstance(obj, list | tuple | set | frozenset):
        return [to_plain(each) for each in obj]
    if isinstance(obj, os.PathLike):
        return os.fsdecode(obj)
    if hasattr(obj, "tolist"):  # numpy scalars and arrays
        return to_plain(obj.tolist())
    raise TypeError(f"cannot write {type(obj).__name__} as JSON")


def stdout_console() -> Console:
    """A console for results: colours on a terminal, plain text in a pipe."""
    return _console(stderr=False)


def stderr_console() -> Console:
    """A console for progress, so that results can be piped away from it."""
    return _console(stderr=True)


def print_error(message: str, *, help: str | None = None, label: str = "error") -> None:  # noqa: A002 - the word users see
    """Say on standard error what went wrong and what to do next."""
    console = stderr_console()
    _say(console, label, message, style="bold red")
    if help is not None:
        _say(console, "help", help, style="bold cyan")


def _say(console: Console, label: str, text: str, *, style: str) -> None:
    from rich.text import Text

    console.print(Text.assemble((f"{label}:", style), " ", text), soft_wrap=True)


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    class PipeConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would leave with code 1; main() knows the usual one

    stream = sys.stderr if stderr else sys.stdout
    asked = os.environ.get("COLUMNS", "")
    width = None if stream.isatty() or asked.isdecimal() else _PIPED_WIDTH
    return PipeConsole(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)
