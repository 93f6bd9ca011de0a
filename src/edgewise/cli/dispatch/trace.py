"""``edgewise dispatch trace``: a model's operators, their shapes, and who reads whose output."""

from __future__ import annotations

import csv as csv_format
import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgewise.cli.output import emit_json, stderr_console, stdout_console, to_plain
from edgewise.cli.place import plain_table, print_table
from edgewise.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from edgewise.dispatch.counting import Count
    from edgewise.dispatch.trace import Node, Trace
    from edgewise.model.transformer import Architecture

    Traced = tuple[Architecture, Trace]


def trace(
    model: Annotated[
        str,
        typer.Argument(
            help="A name that is known, a config.json or its folder, or all.", show_default=False
        ),
    ],
    *,
    lengths: Annotated[
        str, typer.Option(help="Prefill lengths in tokens, separated by commas.")
    ] = "16,32,64,128",
    decode: Annotated[
        bool | None,
        typer.Option(
            "--decode/--no-decode",
            help="Add one decode pass of one token. Default: for all, not for one model.",
            show_default=False,
        ),
    ] = None,
    past: Annotated[int, typer.Option(help="Tokens in the cache before the decode pass.")] = 0,
    rule: Annotated[
        str, typer.Option(help="How to count: clean, or paper, which counts every MLP once more.")
    ] = "clean",
    operators: Annotated[
        bool, typer.Option("--operators", help="List every operator of every pass.")
    ] = False,
    csv: Annotated[Path | None, typer.Option(help="Write one line for each operator here.")] = None,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object on standard output, with all edges.")
    ] = False,
) -> None:
    """Show what a transformer computes, in order, from its configuration alone.

    No weights are needed. Operators that stay on torch (attention, RoPE, additions) are listed
    with the others, since tensors travel to them and back.
    """
    from edgewise.cli.evaluate import write_text
    from edgewise.model.transformer import architecture_names, load_architecture

    every = model.lower() == "all"
    names: Sequence[str] = architecture_names() if every else (model,)
    with_decode = every if decode is None else decode
    traced: list[Traced] = []
    for name in names:
        architecture = load_architecture(name)
        traces = trace_passes(
            architecture,
            read_lengths(lengths),
            decode=with_decode and (architecture.causal or not every),
            past=past,
            rule=rule,
        )
        traced += [(architecture, each) for each in traces]
    if json:
        emit_json(_as_json(traced, rule))
    else:
        console = stdout_console()
        (_show_all if every else _show_model)(console, traced, rule)
        if operators:
            _show_operators(console, [each for _, each in traced])
    if csv is not None:
        write_text(csv, traces_csv([each for _, each in traced]))
        stderr_console().print(f"operators: {csv}", soft_wrap=True)


def read_lengths(text: str) -> tuple[int, ...]:
    """Read ``16,32``; empty for nothing.

    Raises:
        ConfigError: A part is no whole number above zero, or stands there twice.

    Example:
        >>> read_lengths("16, 32")
        (16, 32)
    """
    from edgewise.errors import ConfigError

    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts:
        if not part.isdecimal() or int(part) < 1 or parts.count(part) > 1:
            raise ConfigError(
                f"--lengths: expected distinct numbers of tokens above zero, found {part!r} in"
                f" {text!r}",
                help="--lengths 16,128",
            )
    return tuple(int(part) for part in parts)


def trace_passes(
    architecture: Architecture,
    lengths: Sequence[int],
    *,
    decode: bool,
    past: int = 0,
    rule: str = "clean",
) -> tuple[Trace, ...]:
    """Trace prefills of some lengths, and a decode pass after them.

    Args:
        architecture: The model.
        lengths: Of the prefills.
        decode: Whether there is a decode pass.
        past: Tokens in the cache before it.
        rule: How to count.

    Raises:
        ConfigError: There is nothing to trace, no such rule, or the model cannot decode.
    """
    from edgewise.dispatch.forward import RULES, trace_forward
    from edgewise.errors import ConfigError, nearest_names

    if rule not in RULES:
        raise ConfigError(f"there is no rule {rule!r}; {nearest_names(rule, RULES)}")
    if past and not decode:
        raise ConfigError("--past is the cache of the decode pass", help="add --decode")
    found = [trace_forward(architecture, length=n, rule=rule) for n in lengths]
    if decode:
        found.append(trace_forward(architecture, phase="decode", past=past, rule=rule))
    if not found:
        raise ConfigError("there is no pass to trace", help="--lengths 16, or --decode")
    return tuple(found)


def traces_csv(traces: Sequence[Trace]) -> str:
    """One line for each operator, in order; what it reads as numbers of operators of its pass."""
    text = io.StringIO()
    writer: csv_format.DictWriter[str] | None = None
    for each in traces:
        for row in _rows(each):
            if writer is None:
                writer = csv_format.DictWriter(text, list(row), lineterminator="\n")
                writer.writeheader()
            writer.writerow({**row, "reads": " ".join(map(str, row["reads"]))})
    return text.getvalue()


def _rows(trace: Trace) -> list[dict[str, Any]]:
    """Facts of every operator of a pass; ``"input"`` stands for the model's input."""
    makers: dict[int, int | str] = {node.output: i for i, node in enumerate(trace.nodes)}
    return [
        {
            "model": trace.model,
            "phase": trace.phase,
            "length": trace.length,
            "past": trace.past,
            "index": i,
            "name": node.name,
            "layer": node.layer,
            "kind": node.shape.kind,
            "supported": node.supported,
            "m": node.shape.m,
            "k": node.shape.k,
            "n": node.shape.n,
            "function": node.shape.function,
            "bias": node.shape.bias,
            "dtype": node.shape.dtype,
            "input_bytes": sum(trace.tensors[t].size_bytes for t in node.inputs),
            "output_bytes": trace.tensors[node.output].size_bytes,
            "weight_bytes": node.shape.weight_bytes,
            "flops": node.shape.flops,
            "key": node.shape.key,
            "reads": [makers.get(t, "input") for t in node.inputs],
        }
        for i, node in enumerate(trace.nodes)
    ]


def _as_json(traced: Sequence[Traced], rule: str) -> dict[str, Any]:
    from edgewise.dispatch.counting import candidates, count

    total = count(traced)
    return {
        "rule": rule,
        "total": to_plain(total),
        "candidates_on_3_backends": to_plain(candidates(total.groups)),
        "models": {a.name: to_plain(a) for a, _ in traced},
        "passes": [
            {
                "model": each.model,
                "phase": each.phase,
                "length": each.length,
                "past": each.past,
                "count": to_plain(count([(a, each)])),
                "operators": _rows(each),
                "edges": [[i, j] for j, row in enumerate(_rows(each)) for i in row["reads"]],
                "segments": [
                    {
                        "kind": c.kind,
                        "name": c.name,
                        "from": c.start,
                        "to": c.stop - 1,
                        "parts": [part.key for part in c.parts],
                    }
                    for c in each.candidates
                ],
            }
            for a, each in traced
        ],
    }


# --- what a person sees --------------------------------------------------------------------------

# Columns of the tables of counts, and the kinds in each.
_COLUMNS = {"linear": ("linear",), "norm": ("rmsnorm", "layernorm"), "act": ("activation",)}


def _show_model(out: Console, traced: Sequence[Traced], rule: str) -> None:
    from edgewise.dispatch.counting import count

    a = traced[0][0]
    heads = f"{a.num_attention_heads}/{a.num_key_value_heads} heads of {a.head_dim}"
    out.print(
        f"{a.name} ({a.model_type}): {a.num_hidden_layers} layers, {a.hidden_size} wide,"
        f" {a.intermediate_size} in the MLP, {heads}, {a.vocab_size} tokens",
        soft_wrap=True,
    )
    table = _count_table("operators in one pass", "pass")
    for pair in traced:
        table.add_row(pair[1].what, *_cells(count([pair])))
    total = count(traced)
    print_table(
        out,
        table,
        f"in all {total.instances:,} operators to choose for, {total.groups} groups"
        f" ({rule} rule), {total.shapes} distinct shapes",
        f"{total.fixed:,} stay on torch: {_fixed_kinds([each for _, each in traced])}",
        "FP32, batch 1; work: two per multiply-accumulate; weights: without embedding",
    )


def _show_all(out: Console, traced: Sequence[Traced], rule: str) -> None:
    from edgewise.dispatch.counting import candidates, count

    table = _count_table("operators in all passes", "model", "passes")
    for name in dict.fromkeys(a.name for a, _ in traced):
        each = count([pair for pair in traced if pair[0].name == name])
        table.add_row(name, str(each.forwards), *_cells(each))
    total = count(traced)
    rows = candidates(total.groups)
    print_table(
        out,
        table,
        f"in all {total.instances:,} operators in {total.forwards} passes, {total.groups} groups"
        f" ({rule} rule), {total.shapes} distinct shapes",
        f"on 3 backends {rows.shape_backend_rows:,} shape-backend rows, {rows.contexts:,} contexts",
        f"and {rows.candidate_rows:,} candidate rows: {rows.same_backend:,} same-backend,"
        f" {rows.directed_changes:,} directed",
    )


def _count_table(title: str, *first: str) -> Table:
    table = plain_table(title)
    table.add_column(first[0], no_wrap=True)
    for name in (*first[1:], *_COLUMNS, "all", "groups", "GFLOP", "weights"):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _cells(found: Count) -> list[str]:
    kinds = [sum(found.by_kind.get(kind, 0) for kind in kinds) for kinds in _COLUMNS.values()]
    return [
        *(f"{number:,}" for number in (*kinds, found.instances, found.groups)),
        f"{found.flops / 1e9:.3g}",
        format_bytes(found.weight_bytes),
    ]


def _fixed_kinds(traces: Sequence[Trace]) -> str:
    kinds = Counter(n.shape.kind for each in traces for n in each.nodes if not n.supported)
    return ", ".join(f"{number:,} {kind}" for kind, number in kinds.most_common())


def _show_operators(out: Console, traces: Sequence[Trace]) -> None:
    for each in traces:
        table = plain_table(f"{each.model}, {each.what}")
        table.add_column("#", justify="right", no_wrap=True)
        table.add_column("L", justify="right", no_wrap=True)
        table.add_column("operator", overflow="fold")
        table.add_column("M × K → N", no_wrap=True)
        table.add_column("weights", justify="right", no_wrap=True)
        table.add_column("reads", no_wrap=True)
        for node, row in zip(each.nodes, _rows(each), strict=True):
            name = node.name.removeprefix(f"model.layers.{node.layer}.")
            table.add_row(
                str(row["index"]),
                "" if node.layer is None else str(node.layer),
                name if node.supported else f"({name})",
                _sizes(node),
                format_bytes(row["weight_bytes"]) if row["weight_bytes"] else "–",
                " ".join(map(str, row["reads"])),
                style=None if node.supported else "dim",
            )
        print_table(out, table, "(in brackets): stays on torch; reads: whose output, by its number")


def _sizes(node: Node) -> str:
    s = node.shape
    width = f"{s.k} → {s.n}" if s.kind == "linear" else str(s.n)
    return f"{s.m} × {width}" + (" + bias" if s.bias else "")
