"""``edgewise dispatch measure``: what operators cost on each backend, and what switching costs."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgewise.cli.output import emit_json, stderr_console, stdout_console
from edgewise.errors import BackendUnavailable, ConfigError, nearest_names

if TYPE_CHECKING:
    from rich.console import Console

    from edgewise.profiles.operators import OperatorShape, OperatorTable
    from edgewise.profiling.operators import OperatorProgress

_QUICK_MODEL = "smollm2-135m"
_TIE_RATIO = 0.02  # medians nearer than this are called equal
_LISTED = 5
_MATRIX_BYTES = 64 * 1024
_SECOND = 1


def measure(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="Names of models, configuration files or folders with one; `all` for every model"
            " that is known. Default: all, with --quick smollm2-135m.",
            show_default=False,
        ),
    ] = None,
    *,
    backends: Annotated[
        str | None,
        typer.Option(
            help="Where, separated by commas: torch:cpu,onnxruntime:CPU. Default: all found here.",
            show_default=False,
        ),
    ] = None,
    lengths: Annotated[str, typer.Option(help="Tokens of each prefill.")] = "16,32,64,128",
    decode: Annotated[bool, typer.Option(help="Measure decoding of one token too.")] = True,
    past: Annotated[int, typer.Option(help="Tokens in the cache when decoding.")] = 64,
    segments: Annotated[
        bool | None,
        typer.Option(
            help="Measure pieces compiled of several operators too. Default: yes, but with --quick"
            " for one model alone.",
            show_default=False,
        ),
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads of each call.")] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="Few samples, wider intervals.")] = False,
    time_cap: Annotated[
        float | None,
        typer.Option(
            help="Seconds for each pair of shape and backend, loading left out. Default: 0.6,"
            " or 0.1 with --quick.",
            show_default=False,
        ),
    ] = None,
    warm_weights: Annotated[
        bool,
        typer.Option(
            "--warm-weights",
            help="Call one copy of the weights in a loop, as the paper does, instead of having them"
            " come from memory as in a model.",
        ),
    ] = False,
    beside: Annotated[
        str | None,
        typer.Option(
            help="Measure while this load runs: cpu, memory, periodic, map or audio.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The table's file. Default: kept for this device.", show_default=False),
    ] = None,
    resume: Annotated[
        bool, typer.Option(help="Keep rows measured before, and measure what is missing.")
    ] = True,
    name: Annotated[
        str | None, typer.Option(help="What to call the table.", show_default=False)
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object on standard output.")
    ] = False,
) -> None:
    """Measure operators of transformers on every backend here, and switching between them.

    Rows are kept as they come: stopped at any moment, the same command goes on from there. What is
    in the table already is not measured again.
    """
    from edgewise.backends.threads import govern, require
    from edgewise.bench.background import LOAD_KINDS, Load
    from edgewise.device import device_fingerprint
    from edgewise.profiles.operator_file import read_operator_table, write_operator_table
    from edgewise.profiles.operator_tables import operator_table_path
    from edgewise.profiling.operators import FULL, QUICK_OPERATORS, measure_operators

    if beside is not None and beside not in LOAD_KINDS:
        raise ConfigError(f"unknown load {beside!r}", help=nearest_names(beside, LOAD_KINDS))
    effort = QUICK_OPERATORS if quick else FULL
    if time_cap is not None:
        effort = dataclasses.replace(effort, time_cap_s=time_cap)
    names, left_out = _models(models or [], quick=quick)
    with_segments = not quick or len(names) == 1 if segments is None else segments
    if not with_segments:
        left_out.append("segments: --segments measures them")
    shapes = shapes_of(
        names, lengths=_lengths(lengths), past=past if decode else None, segments=with_segments
    )
    policy = govern(threads)  # before torch is imported
    found = find_backends(backends)
    require(policy)
    device = device_fingerprint()
    load = None if beside is None else Load(beside)
    state = "calm" if load is None else f"beside {load.label}"
    file = out or operator_table_path(device.id, state=state)
    partial = file.with_name(f"{file.name}.partial")
    known = None
    if not resume:
        partial.unlink(missing_ok=True)
    elif file.exists():
        known = read_operator_table(file)
    with _progress(quiet=json) as on_progress, load or contextlib.nullcontext():
        table = measure_operators(
            shapes,
            backends=found,
            threads=threads,
            effort=effort,
            name=name or file.name.removesuffix(".gz").removesuffix(".json"),
            state=state,
            journal=partial,
            known=known,
            warm_weights=warm_weights,
            policy=policy,
            device=device,
            on_progress=on_progress,
        )
    write_operator_table(table, file)
    partial.unlink(missing_ok=True)
    said = summary(table, file=file, left_out=left_out)
    if json:
        emit_json(said)
    else:
        show(said)


def shapes_of(
    models: Sequence[str],
    *,
    lengths: Sequence[int],
    past: int | None = None,
    segments: bool = True,
) -> tuple[OperatorShape, ...]:
    """Distinct shapes of models: operators, those that stay on torch, and parts of segments.

    Args:
        models: Names or configuration files.
        lengths: Tokens of each prefill.
        past: Tokens in the cache of a decode call; ``None`` for no decoding. With it goes the
            decode call with an empty cache, as the paper counts it.
        segments: With the parts of segments.

    Returns:
        In an order that keeps shapes with the same weights together.
    """
    from edgewise.dispatch.forward import trace_forward
    from edgewise.model.transformer import load_architecture

    groups: dict[OperatorShape, dict[OperatorShape, None]] = {}
    for model in models:
        architecture = load_architecture(model)
        traces = [trace_forward(architecture, length=length) for length in lengths]
        if past is not None and architecture.causal:
            traces += [
                trace_forward(architecture, phase="decode", past=tokens) for tokens in {0, past}
            ]
        for trace in traces:
            wanted = [node.shape for node in trace.nodes]
            if segments and not (trace.phase == "decode" and trace.past != past):
                wanted += [part for each in trace.candidates for part in each.parts]
            for shape in wanted:
                groups.setdefault(dataclasses.replace(shape, m=1), {})[shape] = None
    return tuple(shape for group in groups.values() for shape in group)


def find_backends(asked: str | None) -> tuple[str, ...]:
    """Backends to measure on.

    Args:
        asked: Names separated by commas; all found here by default.

    Raises:
        BackendUnavailable: One is not here, or torch is missing.
    """
    from edgewise.backends.operators import operator_backends

    found = operator_backends()
    if asked is None:
        if not found:
            raise BackendUnavailable(
                "no runtime that runs operators is installed", help="pip install 'edgewise[torch]'"
            )
        return found
    by_lower = {each.lower(): each for each in found}
    names = []
    for each in asked.split(","):
        text = each.strip()
        match = by_lower.get(text.lower()) or next(
            (name for name in found if name.partition(":")[0] == text), None
        )
        if match is None:
            raise BackendUnavailable(
                f"backend {text!r} does not run operators here; found:"
                f" {', '.join(found) or 'none'}",
                help="edgewise doctor --backends",
            )
        names.append(match)
    return tuple(dict.fromkeys(names))


def summary(
    table: OperatorTable, *, file: Path | None = None, left_out: Sequence[str] = ()
) -> dict[str, Any]:
    """Summarise a table: what ``--json`` prints.

    Args:
        table: The table.
        file: Where it is.
        left_out: What was not measured, in words.
    """
    from edgewise.profiles.operator_file import excluded_in_words

    backends = table.backends()
    return {
        "table": table.name,
        "file": file,
        "provenance": table.provenance,
        "state": table.state,
        "device_id": table.device_id,
        "device": table.device,
        "thread_policy": table.thread_policy,
        "backends": list(backends),
        "shapes": len(table.shapes()),
        "rows": len(table.costs),
        "classes": _classes(table, backends),
        "energy_rows": sum(c.energy.energy_j is not None for c in table.costs.values()),
        "excluded": excluded_in_words(table.excluded()),
        "switches": [dataclasses.asdict(each) for each in table.switches.values()],
        "left_out": list(left_out),
        "notes": dict(table.notes),
    }


def show(found: Mapping[str, Any]) -> None:
    """Print a summary for people."""
    console = stdout_console()
    console.print(
        f"{found['table']}: {found['shapes']} shapes, {found['rows']} rows, {found['provenance']},"
        f" {found['state']}, {found['thread_policy'].key}",
        soft_wrap=True,
    )
    _show_classes(console, found)
    if found["switches"]:
        _show_switches(console, found)
    console.print()
    excluded = found["excluded"]
    lines = [f"{len(excluded)} rows are not used:"] if excluded else []
    lines += [f"  {line}" for line in excluded[:_LISTED]]
    if (more := len(excluded) - _LISTED) > 0:
        lines.append(f"  and {more} more: --json lists them")
    if not found["energy_rows"]:
        lines.append("energy: not known; the rows of the table say why")
    lines += [f"left out: {each}" for each in found["left_out"]]
    notes = found["notes"]
    lines += [f"note: {notes[key]}" for key in ("said", "load", "subnormal") if key in notes]
    lines += [f"note: {key}: {text}" for key, text in notes.items() if key.startswith("switch ")]
    lines += [] if found["file"] is None else [f"written to {found['file']}"]
    for line in lines:
        console.print(line, soft_wrap=True)


def _show_classes(console: Console, found: Mapping[str, Any]) -> None:
    from edgewise.cli.place import plain_table, print_table

    table = plain_table("fastest, in shapes")
    table.add_column("class", no_wrap=True)
    table.add_column("shapes", justify="right")
    for each in found["backends"]:
        table.add_column(each.replace(":", ":\n"), justify="right")
    for heading in ("equal within\n2 %", "median\nmargin"):
        table.add_column(heading, justify="right")
    for each in found["classes"]:
        margin = each["median_margin_ratio"]
        table.add_row(
            each["kind"],
            str(each["shapes"]),
            *(str(each["fastest"].get(name, 0)) for name in found["backends"]),
            str(each["ties"]),
            "–" if margin is None else f"{100 * margin:.1f} %",
        )
    print_table(console, table, "margin: what the second takes beyond the fastest")


def _show_switches(console: Console, found: Mapping[str, Any]) -> None:
    from edgewise.cli.place import plain_table, print_table
    from edgewise.units import format_duration

    table = plain_table("a switch that hands 64 KiB over")
    table.add_column("from", no_wrap=True)
    for each in found["backends"]:
        table.add_column(f"to {each}", justify="right")
    costs_s = {
        (each["source"], each["target"]): each["fixed_s"] + each["per_byte_s"] * _MATRIX_BYTES
        for each in found["switches"]
    }
    for source in found["backends"]:
        cells = (costs_s.get((source, target)) for target in found["backends"])
        table.add_row(source, *(format_duration(each) for each in cells))
    print_table(console, table)


def _classes(table: OperatorTable, backends: Sequence[str]) -> list[dict[str, Any]]:
    """Who is fastest how often, for each kind of operator that has a choice."""
    kinds = dict.fromkeys(shape.kind for shape in table.shapes() if not shape.is_fixed)
    found = []
    for kind in kinds:
        shapes = [shape for shape in table.shapes() if shape.kind == kind]
        fastest: dict[str, int] = {}
        margins = []
        for shape in shapes:
            costs = [table.costs.get((shape, backend)) for backend in backends]
            ranked = sorted(
                (cost.latency.median_s, cost.backend)
                for cost in costs
                if cost is not None and cost.usable and cost.latency is not None
            )
            if ranked:
                fastest[ranked[0][1]] = fastest.get(ranked[0][1], 0) + 1
            if len(ranked) > _SECOND and ranked[0][0] > 0:
                margins.append(ranked[_SECOND][0] / ranked[0][0] - 1)
        found.append(
            {
                "kind": kind,
                "shapes": len(shapes),
                "fastest": fastest,
                "ties": sum(margin < _TIE_RATIO for margin in margins),
                "median_margin_ratio": statistics.median(margins) if margins else None,
            }
        )
    return found


def _models(asked: Sequence[str], *, quick: bool) -> tuple[list[str], list[str]]:
    """Names of the models, and what is left out."""
    from edgewise.model.transformer import architecture_names

    known = list(architecture_names())
    if not asked and quick:
        others = ", ".join(each for each in known if each != _QUICK_MODEL)
        return [_QUICK_MODEL], [f"other models: {others}"]
    if not asked or "all" in asked:
        return list(dict.fromkeys([*known, *(each for each in asked if each != "all")])), []
    return list(dict.fromkeys(asked)), []


def _lengths(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise ConfigError(
            f"--lengths: expected numbers of tokens from 1, found {text!r}", help="--lengths 16,128"
        )
    return tuple(dict.fromkeys(found))


@contextlib.contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[OperatorProgress], None] | None]:
    """A bar on standard error with the time left; nothing where a program reads the output."""
    if quiet and not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, Progress, TextColumn

    from edgewise.units import format_duration

    columns = (BarColumn(20), TextColumn("{task.fields[said]}"), TextColumn("{task.description}"))
    with Progress(*columns, console=stderr_console()) as bar:
        task = bar.add_task("", total=1.0, said="loading")

        def on_progress(progress: OperatorProgress) -> None:
            left = progress.remaining_s
            said = f"{progress.done} of {progress.total}"
            if left is not None:
                minutes = f"{left / 60:.0f} min" if left >= 90 else format_duration(round(left))
                said += f", about {minutes} left"
            bar.update(
                task,
                completed=progress.done / progress.total,
                said=said,
                description=progress.what,
            )

        yield on_progress
