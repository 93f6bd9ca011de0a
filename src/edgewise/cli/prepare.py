"""``edgewise prepare``: fit exit heads on a backbone and save the result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from edgewise.backends import load_program
from edgewise.cli.joint import JointOptions, prepare_jointly
from edgewise.cli.output import emit_json, stderr_console, stdout_console
from edgewise.cli.stage import format_shape, parse_exits
from edgewise.data import Preprocess, load_dataset
from edgewise.data.image_folder import Damaged
from edgewise.errors import ConfigError, nearest_names
from edgewise.frontends.checkpoint import check_target, load_checkpoint, save_checkpoint
from edgewise.frontends.zoo import backbone_names, build_backbone
from edgewise.model.staged import StagedModel
from edgewise.report.curves import check_figure_path
from edgewise.report.training import training_figure
from edgewise.training import (
    PreparedModel,
    PrepareSettings,
    Progress,
    evaluate_exits,
    stage_backbone,
)
from edgewise.training import prepare as fit_heads
from edgewise.training.fit import FitSettings
from edgewise.training.progress import OnProgress
from edgewise.units import format_bytes

_PHASES = {
    "backbone": "export and check the backbone",
    "features": "compute features",
    "fit": "fit heads",
    "train": "train backbone and heads",
    "validate": "calibrate on held-out images",
}


def prepare(
    backbone: Annotated[
        str, typer.Argument(help="A backbone by name, or an .onnx file; `edgewise stage` shows it.")
    ],
    *,
    data: Annotated[
        str, typer.Option("--data", help="A data set by name, a folder, or a .npz file.")
    ],
    out: Annotated[
        Path, typer.Option("--out", help="Checkpoint directory to make; names the model.")
    ],
    work: Annotated[
        Path | None,
        typer.Option("--work", help="Where finished work is kept; OUT.work by default."),
    ] = None,
    exits: Annotated[
        str,
        typer.Option("--exits", help="A count, fractions of the FLOPs, or module names."),
    ] = "8",
    until: Annotated[
        str | None,
        typer.Option(
            "--until", help="Module that ends the backbone; its last feature map by default."
        ),
    ] = None,
    head: Annotated[
        str,
        typer.Option(
            "--head", help="auto, pool or conv; auto takes conv where it is worth its cost."
        ),
    ] = "auto",
    width: Annotated[int, typer.Option("--width", min=1, help="Hidden width of the heads.")] = 128,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Use at most so many training images.")
    ] = None,
    test: Annotated[
        int,
        typer.Option("--test", min=0, help="Evaluate the saved checkpoint on so many test images."),
    ] = 0,
    size: Annotated[
        int | None,
        typer.Option("--size", min=1, help="Image size of a backbone by name; its usual one."),
    ] = None,
    mean: Annotated[
        float,
        typer.Option("--mean", help="For an .onnx file: subtracted from pixels 0..255."),
    ] = 127.5,
    std: Annotated[
        float, typer.Option("--std", help="For an .onnx file: what pixels are then divided by.")
    ] = 127.5,
    epochs: Annotated[
        int | None,
        typer.Option(
            "--epochs",
            min=1,
            help="At most so many passes: 20 per head, 200 with --joint by default.",
        ),
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option("--learning-rate", help="At the start: 3e-3, 0.1 with --joint by default."),
    ] = None,
    joint: Annotated[
        bool, typer.Option("--joint", help="Train the backbone together with its heads.")
    ] = False,
    loss: Annotated[
        str,
        typer.Option(
            "--loss", help="Joint: equal, wel, branchynet or eenet; +mean, +mono, +distil."
        ),
    ] = "wel+mono",
    schedule: Annotated[
        str, typer.Option("--schedule", help="Joint: milestones, every, cosine or one-cycle.")
    ] = "milestones",
    batch: Annotated[int, typer.Option("--batch", min=2, help="Joint: images per step.")] = 64,
    backbone_rate: Annotated[
        float,
        typer.Option(
            "--backbone-rate",
            help="Joint: the backbone's learning rate as a share of the heads', for a trained one.",
        ),
    ] = 1.0,
    patience: Annotated[
        int | None,
        typer.Option("--patience", min=1, help="Joint: stop after so many epochs without gain."),
    ] = None,
    finish: Annotated[
        bool,
        typer.Option("--finish", help="Joint: make a model of what is kept, train no further."),
    ] = False,
    curves: Annotated[
        Path | None,
        typer.Option("--curves", help="Joint: draw losses and accuracies into this picture."),
    ] = None,
    damaged: Annotated[
        str, typer.Option("--damaged", help="Image files that cannot be read: stop or skip.")
    ] = "stop",
    threads: Annotated[int, typer.Option("--threads", min=1, help="Threads to compute with.")] = 1,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of everything that is drawn.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
) -> None:
    """Fit exit heads on a model and save the result.

    With --joint the backbone is trained together with its heads. Without, it stays as it is: its
    features are computed once and kept on disk, the heads are
    fitted on them and calibrated on held-out images. Stop it at any moment, even with kill -9: the
    same command goes on where it was.
    """
    work = work or out.with_name(f"{out.name}.work")
    check_target(out)
    if curves is not None:
        if not joint:
            raise ConfigError(
                "only joint training has curves", help="add --joint, or leave --curves"
            )
        check_figure_path(curves)
    dataset = load_dataset(
        data, split="train", limit=limit, seed=seed, damaged=cast("Damaged", damaged)
    )
    epochs = epochs or (200 if joint else 20)
    learning_rate = learning_rate or (0.1 if joint else 3e-3)
    joint_options = JointOptions(
        loss=loss,
        schedule=schedule,
        batch=batch,
        backbone_rate=backbone_rate,
        patience=patience,
        finish=finish,
    )
    settings = PrepareSettings(
        head=head,
        width=width,
        seed=seed,
        threads=threads,
        fit=FitSettings(epochs=epochs, learning_rate=learning_rate, seed=seed),
    )
    console = stderr_console()
    try:
        command = f"edgewise prepare {backbone} --data {data} --exits {exits} --head {head}"
        command += f" --width {width} --epochs {epochs} --learning-rate {learning_rate:g}"
        command += f" --seed {seed}" + (f" --limit {limit}" if limit else "")
        command += f" --until {until}" if until else ""
        command += f" {joint_options.as_flags()}" if joint else ""
        facts = {
            "command": command,
            "data": dataset.source,
            "data_licence": dataset.licence,
            "fitted_on": f"{len(dataset)} images, of which two tenths, at most"
            f" {2 * settings.max_validation}, were held out",
        }
        if not joint:
            with console.status(f"reading {backbone}"):
                whole, preprocess = find_backbone(
                    backbone, size_pixels=size, mean=mean, std=std, seed=seed
                )
                staged = stage_backbone(whole, exits=parse_exits(exits), until=until)
        with _bar() as on_progress:
            if joint:
                prepared = prepare_jointly(
                    backbone,
                    dataset,
                    options=joint_options,
                    work=work,
                    exits=parse_exits(exits),
                    until=until,
                    head=head,
                    width=width,
                    size=size,
                    epochs=epochs,
                    learning_rate=learning_rate,
                    threads=threads,
                    seed=seed,
                    name=out.name,
                    provenance=facts,
                    on_progress=on_progress,
                )
            else:
                prepared = fit_heads(
                    staged,
                    dataset,
                    preprocess=preprocess,
                    work=work,
                    settings=settings,
                    name=out.name,
                    provenance=facts,
                    on_progress=on_progress,
                )
            save_checkpoint(prepared.model, out)
            on_test = (
                _test(out, data, test, seed=seed, threads=threads, on_progress=on_progress)
                if test
                else None
            )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"stopped; finished work is kept in {work}, and the same command goes on from there"
        ) from None
    if curves is not None:
        training_figure(
            prepared.model.provenance.get("training_curve", {}), curves, title=prepared.model.name
        )
    size_bytes = sum(p.stat().st_size for p in out.iterdir())
    if as_json:
        emit_json(
            {
                "checkpoint": out,
                "version": prepared.model.version(),
                "size_bytes": size_bytes,
                "exits": prepared.exits,
                "test_images": test or None,
                "test_accuracy": on_test,
            }
        )
        return
    _show(prepared, on_test)
    kept = sum(p.stat().st_size for p in work.rglob("*") if p.is_file())
    stdout_console().print(
        f"saved {out} ({format_bytes(size_bytes)}); the work in {work} ({format_bytes(kept)}) is no"
        " longer needed",
        soft_wrap=True,
    )


def find_backbone(
    name: str, *, size_pixels: int | None, mean: float, std: float, seed: int
) -> tuple[StagedModel, Preprocess]:
    """A backbone by name or from an ONNX file, and how images become its input.

    Raises:
        ConfigError: No such name or file, or the file takes no images.
    """
    if name in backbone_names():
        found = build_backbone(name, size_pixels=size_pixels, seed=seed)
        return found.stage(), found.preprocess
    path = Path(name)
    if path.suffix != ".onnx":
        raise ConfigError(
            f"unknown backbone {name!r}", help=nearest_names(name, [*backbone_names(), "FILE.onnx"])
        )
    model = StagedModel.from_onnx(path)
    shape = model.input.shape
    if len(shape) != 4 or shape[1] not in (1, 3):
        raise ConfigError(
            f"expected a backbone that takes images [1, 1 or 3, H, W], {name} takes {list(shape)}"
        )
    channels = shape[1]
    preprocess = Preprocess(
        size=(shape[2], shape[3]),
        mean=(mean,) * channels,
        std=(std,) * channels,
        channels=1 if channels == 1 else 3,
    )
    return model, preprocess


def _test(
    out: Path, data: str, count: int, *, seed: int, threads: int, on_progress: OnProgress
) -> list[float]:
    """Accuracy of each exit of the saved checkpoint on the test split; noted in it as well."""
    model = load_checkpoint(out)
    dataset = load_dataset(data, split="test", limit=count, seed=seed)
    if dataset.labels is None or model.preprocess is None:
        raise ConfigError(f"{data} has no labelled test images", help="leave --test out")
    program = load_program(model, threads=threads)
    logits = evaluate_exits(
        program,
        dataset.images,
        Preprocess.from_json(model.preprocess),
        on_progress=lambda p: on_progress(replace(p, phase="test")),
    )
    accuracy = [float(a) for a in (logits.argmax(axis=2) == dataset.labels).mean(axis=1)]
    facts = {**model.provenance, "test_images": len(dataset), "test_accuracy": accuracy}
    save_checkpoint(replace(model, provenance=facts), out)
    return accuracy


@contextmanager
def _bar() -> Iterator[OnProgress]:
    """A progress bar per phase, with the time left, on standard error."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bars

    bars = Bars(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[detail]}"),
        console=stderr_console(),
        speed_estimate_period=60.0,
    )
    tasks: dict[str, Any] = {}

    def show(progress: Progress) -> None:
        if progress.phase not in tasks:
            name = _PHASES.get(progress.phase, progress.phase)
            # What an earlier run finished would make the rest look quicker than it is.
            tasks[progress.phase] = bars.add_task(
                name, total=progress.total, completed=progress.done, detail=""
            )
        bars.update(
            tasks[progress.phase],
            completed=progress.done,
            total=progress.total,
            detail=progress.detail,
        )

    with bars:
        yield show


def _show(prepared: PreparedModel, on_test: list[float] | None) -> None:
    from rich.table import Table

    table = Table(title=prepared.model.name, title_justify="left")
    table.add_column("exit", justify="right")
    table.add_column("ends at")
    for heading in ("depth", "boundary"):
        table.add_column(heading, justify="right")
    table.add_column("head")
    for heading in ("MFLOP", "accuracy", "temperature", "ECE"):
        table.add_column(heading, justify="right")
    if on_test is not None:
        table.add_column("on test", justify="right")
    for e in prepared.exits:
        row = [
            str(e.index),
            e.name,
            f"{e.depth_ratio:.1%}",
            format_shape(e.boundary_shape),
            e.head,
            f"{e.head_flops / 1e6:.2f}",
            f"{e.accuracy:.1%}",
            f"{e.temperature:.2f}",
            f"{e.ece_before:.3f} → {e.ece:.3f}",
        ]
        if on_test is not None:
            row.append(f"{on_test[e.index]:.1%}")
        table.add_row(*row)
    stdout_console().print(table)
