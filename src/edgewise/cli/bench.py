"""``edgewise bench``: measurements whose figures stand in the documentation."""

from __future__ import annotations

import importlib
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
    seconds = any(part.endswith("_s") for part in path.split("."))
    return [(path, format_duration(value) if seconds else f"{value:.3g}")]
