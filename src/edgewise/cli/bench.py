"""``edgewise bench``: measurements whose figures stand in the documentation."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgewise.cli.output import emit_json, stderr_console, stdout_console
from edgewise.errors import ConfigError, nearest_names

if TYPE_CHECKING:
    from rich.table import Table

# Name → module with ``run(quick=, say=)``, and what it measures.
_BENCHES = {
    "predict": ("edgewise.bench.predict", "watching the device and predicting its costs"),
    "dispatch": (
        "edgewise.bench.dispatch",
        "dispatch: planning, decisions, threads, gains, plans really run, and their peers",
    ),
    "place": ("edgewise.bench.place", "placement: decisions, gaps, queue, plan changes, errors"),
    "exits": ("edgewise.bench.exits", "the router's decision, staging, backends, import time"),
    "lm": (
        "edgewise.bench.language",
        "language models: time per token, bits, exits, deadlines, exact mode, and their peers",
    ),
}


def bench(
    name: Annotated[str | None, typer.Argument(help="Which; --list names them.")] = None,
    *,
    list_: Annotated[bool, typer.Option("--list", help="Name the benches and stop.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object on standard output.")
    ] = False,
) -> None:
    """Measure what the documentation claims, on this machine."""
    out = stdout_console()
    if list_:
        if json:
            emit_json({"benches": {n: what for n, (_, what) in _BENCHES.items()}})
            return
        for known, (_, what) in _BENCHES.items():
            out.print(f"{known}: {what}")
        return
    if name is None:
        raise ConfigError("which bench?", help="edgewise bench --list")
    if name not in _BENCHES:
        raise ConfigError(f"unknown bench {name!r}", help=nearest_names(name, _BENCHES))
    module = importlib.import_module(_BENCHES[name][0])
    say = stderr_console()
    with say.status(f"bench {name}") as status:
        result = module.run(quick=quick, say=lambda text: status.update(f"bench {name}: {text}"))
    if json:
        emit_json(result)
    else:
        out.print(_table(name, result))
        for table in _row_tables(result, getattr(module, "COLUMNS", {})):
            out.print(table)
        for note in result.get("notes", []):
            out.print(f"note: {note}")


def _table(name: str, result: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(title=f"bench {name} ({result['provenance']}, {result['threads']} thread)")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for key, value in _flat(result):
        table.add_row(key, value)
    return table


def _row_tables(result: dict[str, Any], columns: Mapping[str, Sequence[str]]) -> list[Table]:
    """A table for each list of rows; of wide ones the columns that a bench names for people."""
    from rich.table import Table

    tables = []
    for path, rows in _lists(result):
        shown = [c for c in columns.get(path, rows[0]) if c in rows[0]]
        table = Table(title=path)
        for column in shown:
            is_text = any(isinstance(row[column], str | list) for row in rows)
            title = column.removesuffix("_s").replace("_", " ")
            # Names that are cut short look alike.
            table.add_column(
                title, justify="left" if is_text else "right", no_wrap=column == "name"
            )
        for row in rows:
            table.add_row(*[_cell(column, row.get(column)) for column in shown])
        tables.append(table)
    return tables


def _lists(value: Any, path: str = "") -> list[tuple[str, list[dict[str, Any]]]]:
    """Each list of rows with its path."""
    if isinstance(value, dict):
        return [
            found
            for key, inner in value.items()
            for found in _lists(inner, f"{path}.{key}" if path else str(key))
        ]
    if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        return [(path, value)]
    return []


def _cell(column: str, value: Any) -> str:  # noqa: PLR0911 - one line per kind of value
    from edgewise.units import format_bytes, format_duration

    if value is None or value == []:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_cell('', inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return ", ".join(_cell("", inner) for inner in value)
    if isinstance(value, int | float):
        if column.endswith("_s"):
            return format_duration(value)
        if column.endswith("_bytes"):
            return format_bytes(value)
        return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
    return str(value)


def _flat(value: Any, path: str = "") -> list[tuple[str, str]]:
    """Each number with its path, lists and texts left out."""
    from edgewise.units import format_duration

    if isinstance(value, dict):
        return [
            row
            for key, inner in value.items()
            for row in _flat(inner, f"{path}.{key}" if path else str(key))
        ]
    if value is None:
        return [(path, "–")]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return []
    seconds = any(p.endswith("_s") and not p.endswith("_per_s") for p in path.split("."))
    return [(path, format_duration(value) if seconds else f"{value:.3g}")]
