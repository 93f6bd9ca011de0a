"""What a workload file may say, key by key, and where in a file something stands."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, get_args

from edgewise.errors import ConfigError, EdgeError, nearest_names
from edgewise.placement.problem import Objective

RateKind = Literal["poisson", "periodic", "stepped", "trace"]
Residencies = Literal["switch", "pinned", "best"]

PROFILE_SUFFIX = ".partition.json"
SILENT = "a tenant that is never asked needs no place: leave it out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of a workload file.

    Attributes:
        kind: What is expected, in words.
        meaning: For the documentation.
        default: What holds without it; ``None`` where it must be there or where absence is meant.
        needed: Whether it must be there.
        choices: Words that are allowed; empty for any.
        least: Least number that is allowed.
        above: Number that it must exceed.
    """

    kind: str
    meaning: str
    default: Any = None
    needed: bool = False
    choices: tuple[str, ...] = ()
    least: float | None = None
    above: float | None = None


SCHEMA: Mapping[str, Mapping[str, Key]] = {
    "device": {
        "accelerator": Key(
            kind="text",
            needed=True,
            meaning='A description by name or file; `"none"` plans for the CPU alone.',
        ),
        "cores": Key(kind="whole number", needed=True, least=1, meaning="CPU cores for suffixes."),
        "objective": Key(
            kind="text",
            default="mean",
            choices=get_args(Objective),
            meaning="What a plan minimises.",
        ),
        "residency": Key(
            kind="text",
            default="switch",
            choices=get_args(Residencies),
            meaning="Whether models displace each other in the accelerator's memory, have fixed"
            " shares of it, or whichever is predicted to be better.",
        ),
        "horizon_s": Key(
            kind="number",
            default=60.0,
            above=0,
            meaning="How long the workload is played, and a change of plan has to pay off.",
        ),
        "seed": Key(kind="whole number", default=0, least=0, meaning="Of arrivals."),
    },
    "tenant": {
        "name": Key(kind="text", needed=True, meaning="Unique."),
        "model": Key(
            kind="text",
            needed=True,
            meaning="A file, `.onnx` or `.tflite`; the folder of a model with exits, as `edgewise"
            " prepare` makes; or the name of a network or a shipped model, see below.",
        ),
        "profile": Key(
            kind="text",
            meaning="A file that `edgewise profile MODEL --segments --export FILE` wrote, or a"
            f" shipped name. By default `MODEL{PROFILE_SUFFIX}` beside the model's file; for a name"
            " beside the workload, else what ships under that name.",
        ),
        "rate": Key(
            kind="number or table",
            needed=True,
            meaning="Requests per second, at random (Poisson); or a table, see below.",
        ),
        "budget": Key(
            kind="duration", meaning='Time within which it should answer, such as `"50 ms"`.'
        ),
        "weight": Key(
            kind="number",
            default=1.0,
            least=0,
            meaning="How much its response time counts under the objective `weighted`.",
        ),
        "priority": Key(
            kind="whole number", default=16, least=0, meaning="0 is served first, 16 is usual."
        ),
        "exits": Key(
            kind="true or false",
            default=False,
            meaning="Whether its suffix may be left at an early exit under its budget; for models"
            " with exits.",
        ),
    },
    "rate": {
        "kind": Key(
            kind="text",
            default="poisson",
            choices=get_args(RateKind),
            meaning="`poisson`: at random; `periodic`: as a camera; `stepped`: at random, at a rate"
            " that steps; `trace`: at the instants of a file, once.",
        ),
        "per_s": Key(
            kind="number", above=0, meaning="Requests per second, of `poisson` and `periodic`."
        ),
        "jitter_ratio": Key(
            kind="number",
            least=0,
            meaning="How late a periodic request may come, as a share of the period, at most 1;"
            " 0 by default.",
        ),
        "steps": Key(
            kind="list of [seconds, per second]",
            meaning="Of `stepped`: when each rate begins; the first begins at 0.",
        ),
        "file": Key(
            kind="text", meaning="Of `trace`: one instant a line, seconds since the start, rising."
        ),
    },
}
KEYS_OF_KIND: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # needed, allowed beside them
    "poisson": (("per_s",), ()),
    "periodic": (("per_s",), ("jitter_ratio",)),
    "stepped": (("steps",), ()),
    "trace": (("file",), ()),
}
_TYPES: Mapping[str, tuple[type, ...]] = {
    "text": (str,),
    "duration": (str,),
    "true or false": (bool,),
    "whole number": (int,),
    "number": (int, float),
    "number or table": (int, float, dict),
    "list of [seconds, per second]": (list,),
}


def workload_schema() -> str:
    """Write what a workload file may say, as Markdown tables."""
    titles = {
        "device": "`[device]`",
        "tenant": "`[[tenant]]`, once for each",
        "rate": "`rate` of a tenant, as a table",
    }
    lines: list[str] = []
    for table, title in titles.items():
        lines += [f"**{title}**", "", "| key | expects | default | meaning |", "|---|---|---|---|"]
        for name, key in SCHEMA[table].items():
            expects = " or ".join(f'`"{c}"`' for c in key.choices) or _expected(key)
            default = "needed" if key.needed else _written(key.default)
            lines.append(f"| `{name}` | {expects} | {default} | {key.meaning} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _written(default: Any) -> str:
    if default is None:
        return "–"
    text = str(default).lower() if isinstance(default, bool) else repr(default)
    return f"`{text}`".replace("'", '"')


def _expected(key: Key) -> str:
    bound = ""
    if key.above is not None:
        bound = f" above {key.above:g}"
    elif key.least is not None:
        bound = f" of at least {key.least:g}"
    return f"{key.kind}{bound}"


def checked(found: dict[str, Any], kind: str, table: Table) -> dict[str, Any]:
    """Return all keys of a table with their defaults.

    Args:
        found: What the file says.
        kind: Name of the table in `SCHEMA`.
        table: Its lines.

    Raises:
        ConfigError: A key is unknown or missing, of another type, or out of bounds.
    """
    schema = SCHEMA[kind]
    for name, value in found.items():
        if name not in schema:
            table.fail(name, f"unknown key {name!r}", help=nearest_names(name, schema))
        key = schema[name]
        types = _TYPES[key.kind]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            table.fail(name, f"expected {name} as {_expected(key)}, found {value!r}", _quoted(key))
        if key.choices and value not in key.choices:
            table.fail(
                name, f"unknown {name} {value!r}", help=nearest_names(str(value), key.choices)
            )
        if isinstance(value, int | float) and not isinstance(value, bool):
            low = key.least is not None and value < key.least
            if low or not math.isfinite(value) or (key.above is not None and value <= key.above):
                table.fail(
                    name,
                    f"expected {name} as {_expected(key)}, found {value!r}",
                    SILENT if name == "per_s" else None,
                )
        if isinstance(value, str) and not value.strip():
            table.fail(name, f"{name} is empty")
    for name, key in schema.items():
        if key.needed and name not in found:
            table.fail(name, f"the key {name!r} is missing")
    return {name: found.get(name, key.default) for name, key in schema.items()}


def _quoted(key: Key) -> str | None:
    return 'write it with its unit in quotes, as in "50 ms"' if key.kind == "duration" else None


_HEADER = re.compile(r"\s*\[\[?\s*([A-Za-z_-]+)[^\]]*\]")


class Source:
    """The text of a workload, to say where in it something stands."""

    def __init__(self, text: str, where: str) -> None:
        self._where = where
        self._lines = [line.split("#", 1)[0] for line in text.splitlines()]
        self._starts: list[tuple[str, int]] = []  # tables with their first line, from 0
        for number, line in enumerate(self._lines):
            header = _HEADER.match(line)
            # [tenant.rate] belongs to the [[tenant]] above it.
            if header and ("[[" in line or "." not in line):
                self._starts.append((header.group(1), number))

    def table(self, name: str, index: int = 0) -> Table:
        """One table, for example the second ``[[tenant]]``."""
        starts = [n for found, n in self._starts if found == name]
        first = starts[index] if index < len(starts) else 0
        last = min((n for _, n in self._starts if n > first), default=len(self._lines))
        return Table(self._where, self._lines, first, last)

    def fail(self, key: str, message: str, help: str | None = None) -> NoReturn:  # noqa: A002
        """Refuse the file because of a table, or of a key outside of all."""
        line = next((n for name, n in self._starts if name == key), None)
        whole = Table(self._where, self._lines, 0 if line is None else line, len(self._lines))
        whole.fail(key, message, help)


class Table:
    """Lines of one table."""

    def __init__(self, where: str, lines: Sequence[str], first: int, last: int) -> None:
        self._where = where
        self._lines = lines
        self._first = first
        self._last = last

    def place(self, key: str) -> str:
        """File and line of a key; of the table where the key is missing."""
        pattern = re.compile(rf"(?:^|[\s{{,.\[])[\"']?{re.escape(key)}[\"']?\s*[=.\]]")
        found = (n for n in range(self._first, self._last) if pattern.search(self._lines[n]))
        return f"{self._where}, line {next(found, self._first) + 1}"

    def fail(self, key: str, message: str, help: str | None = None) -> NoReturn:  # noqa: A002
        """Refuse the file because of a key."""
        raise ConfigError(f"{self.place(key)}: {message}", help=help)

    @contextlib.contextmanager
    def asking(self, key: str) -> Iterator[None]:
        """Say of errors in what a key names where that key stands."""
        try:
            yield
        except EdgeError as error:
            raise type(error)(f"{self.place(key)}: {error.message}", help=error.help) from error
