"""``edgewise stage``: where a model can be cut, and what each stage costs in work and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from edgewise.cli.output import emit_json, stderr_console, stdout_console
from edgewise.errors import ConfigError, nearest_names
from edgewise.frontends.checkpoint import load_model, shipped_names
from edgewise.frontends.zoo import backbone_names, build_backbone
from edgewise.model.staged import StagedModel
from edgewise.units import format_bytes

Exits = int | list[float] | list[str]


def stage(
    model: Annotated[
        str,
        typer.Argument(help="A backbone or shipped model by name, a checkpoint, or an .onnx file."),
    ],
    *,
    exits: Annotated[
        str | None,
        typer.Option(
            "--exits",
            help="A count, fractions of the FLOPs (0.25,0.5,1), or module names (a,b); 8 by"
            " default. A checkpoint has its own.",
        ),
    ] = None,
    cuts: Annotated[
        bool, typer.Option("--cuts", help="List every legal cut instead of the stages.")
    ] = False,
    size: Annotated[
        int | None,
        typer.Option("--size", help="Image size of a backbone by name; its usual one."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
) -> None:
    """Show where a model can be cut and what each stage costs.

    Costs are counted here, not measured: FLOPs (a multiply-add counts two) and bytes. `edgewise
    profile` measures time.
    """
    with stderr_console().status(f"reading {model}"):
        staged = find_model(model, exits=exits, size_pixels=size)
    if as_json:
        emit_json(describe(staged, with_cuts=cuts))
    elif cuts:
        _show_cuts(staged)
    else:
        _show_stages(staged)


def find_model(
    name: str, *, exits: str | None = None, size_pixels: int | None = None
) -> StagedModel:
    """A model by name or path: a backbone of the zoo, a shipped model, a checkpoint, an ONNX file.

    Args:
        name: What the user wrote.
        exits: As the option ``--exits``; ``None`` for the model's own, or 8.
        size_pixels: Image size of a backbone by name.

    Raises:
        ConfigError: No such model, or a checkpoint with ``exits``.
    """
    wanted = parse_exits(exits or "8")
    if name in backbone_names():
        return build_backbone(name, size_pixels=size_pixels).stage(wanted)
    path = Path(name)
    if path.suffix == ".onnx" and not path.is_dir():
        return StagedModel.from_onnx(path, exits=wanted)
    if not path.exists() and name not in shipped_names():
        raise ConfigError(
            f"unknown model {name!r}, and there is no file or directory of that name",
            help=nearest_names(name, [*backbone_names(), *shipped_names()]),
        )
    if exits is not None:
        raise ConfigError(
            f"{name} is a checkpoint: its exits are where its heads were fitted",
            help="leave --exits out, or prepare the backbone again with other exits",
        )
    return load_model(name)


def parse_exits(text: str) -> Exits:
    """Read the option ``--exits``.

    Example:
        >>> parse_exits("8"), parse_exits("0.5,1.0"), parse_exits("layer1, layer2")
        (8, [0.5, 1.0], ['layer1', 'layer2'])

    Raises:
        ConfigError: Nothing between two commas.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ConfigError(
            f"expected a count, fractions or names after --exits, found {text!r}",
            help="for example --exits 8, --exits 0.25,0.5,1.0 or --exits layer1,layer2",
        )
    if len(parts) == 1 and parts[0].lstrip("+-").isdigit():
        return int(parts[0])
    try:
        return [float(part) for part in parts]
    except ValueError:
        return parts


def describe(model: StagedModel, *, with_cuts: bool) -> dict[str, Any]:
    """What ``edgewise stage --json`` prints."""
    stages = [
        {
            "index": s.index,
            "name": s.name,
            "boundary": s.stop.name,
            "boundary_shape": s.stop.shape,
            "boundary_bytes": s.stop.nbytes,
            "flops": s.flops,
            "weight_bytes": s.weight_bytes,
            "operators": s.num_ops,
            "depth_ratio": e.depth_ratio,
            "head": None if e.head is None else e.head.spec.kind,
            "head_flops": None if e.head is None else e.head.spec.flops,
            "accuracy": e.accuracy,
        }
        for s, e in zip(model.stages, model.exits, strict=True)
    ]
    described: dict[str, Any] = {
        "model": model.name,
        "version": model.version(),
        "input_shape": model.input.shape,
        "num_classes": model.num_classes,
        "flops": model.flops,
        "weights": model.provenance.get("weights"),
        "stages": stages,
    }
    if with_cuts:
        described["cuts"] = [
            {
                "tensor": c.tensor.name,
                "scope": c.scope,
                "shape": c.tensor.shape,
                "size_bytes": c.tensor.nbytes,
                "depth_ratio": c.depth_ratio,
            }
            for c in model.legal_cuts()
        ]
    return described


def format_shape(shape: Sequence[int]) -> str:
    """A shape for people, without the batch axis.

    Example:
        >>> format_shape((1, 24, 56, 56))
        '24x56x56'
    """
    return "x".join(str(n) for n in shape[1:])


def _show_stages(model: StagedModel) -> None:
    from rich.table import Table

    console = stdout_console()
    table = Table(title=f"{model.name}: {len(model.stages)} stages", title_justify="left")
    table.add_column("exit", justify="right")
    table.add_column("ends at")
    for heading in ("depth", "MFLOP", "weights", "boundary", "crossing"):
        table.add_column(heading, justify="right")
    table.add_column("answer")
    if any(e.accuracy is not None for e in model.exits):
        table.add_column("accuracy", justify="right")
    for s, e in zip(model.stages, model.exits, strict=True):
        own = s.stop.shape[1:] == (model.num_classes,)
        answer = f"{e.head.spec.kind} head" if e.head else "own classifier" if own else "no head"
        row = [
            str(s.index),
            e.name,
            f"{e.depth_ratio:.1%}",
            f"{s.flops / 1e6:.1f}",
            format_bytes(s.weight_bytes),
            format_shape(s.stop.shape),
            format_bytes(s.stop.nbytes),
            answer,
        ]
        if e.accuracy is not None:
            row.append(f"{e.accuracy:.1%}")
        table.add_row(*row)
    console.print(table)
    weights = sum(s.weight_bytes for s in model.stages)
    console.print(
        f"{model.flops / 1e6:.1f} MFLOP, {format_bytes(weights)} of weights,"
        f" {len(model.legal_cuts())} legal cuts (--cuts lists them)"
    )
    if note := model.provenance.get("weights"):
        console.print(f"weights: {note}", soft_wrap=True)


def _show_cuts(model: StagedModel) -> None:
    from rich.table import Table

    table = Table(title=f"{model.name}: legal cuts", title_justify="left")
    table.add_column("tensor")
    table.add_column("written in")
    for heading in ("depth", "shape", "crossing"):
        table.add_column(heading, justify="right")
    for c in model.legal_cuts():
        table.add_row(
            c.tensor.name,
            c.scope,
            f"{c.depth_ratio:.1%}",
            format_shape(c.tensor.shape),
            format_bytes(c.tensor.nbytes),
        )
    stdout_console().print(table)
