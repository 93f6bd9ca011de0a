"""``edgewise evaluate``: exit policies compared on one footing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgewise.cli.output import emit_json, stderr_console, stdout_console

if TYPE_CHECKING:
    from rich.console import Console

    from edgewise.report.evaluation import Evaluation

_INPUTS = 200
_QUICK_INPUTS = 40


def evaluate(
    model: Annotated[str, typer.Argument(help="Shipped name, checkpoint directory or ONNX file.")],
    *,
    data: Annotated[
        str | None, typer.Option(help="Data set, by name or path; the shipped sample by default.")
    ] = None,
    policies: Annotated[str, typer.Option(help="all, or names separated by commas.")] = "all",
    budgets: Annotated[
        str, typer.Option(help="In per cent of the whole network's median time.")
    ] = "25,50,75,100",
    limit: Annotated[int | None, typer.Option(help="How many inputs; 200 by default.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write all numbers here.")] = None,
    figure: Annotated[Path | None, typer.Option(help="Draw accuracy over latency here.")] = None,
    backend: Annotated[str, typer.Option(help="runtime or runtime:device.")] = "auto",
    threads: Annotated[int, typer.Option(help="Threads of each call.")] = 1,
    profile: Annotated[
        str, typer.Option(help="auto, stored, or an exported profile file.")
    ] = "auto",
    store: Annotated[Path | None, typer.Option(help="Profile store to use.")] = None,
    seed: Annotated[int, typer.Option(help="Of the choice of inputs and the intervals.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="40 inputs.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object on standard output.")
    ] = False,
) -> None:
    """Compare exit policies: same inputs, interleaved, at several budgets."""
    from edgewise.bench.energy import package_energy
    from edgewise.bench.evaluate import compared_policies, open_model
    from edgewise.bench.evaluate import evaluate as compare
    from edgewise.report.curves import accuracy_figure, check_figure_path

    # Mistakes are told before anything is loaded or measured.
    names, shares = compared_policies(policies), parse_budgets(budgets)
    if figure is not None:
        check_figure_path(figure)
    say = stderr_console()
    with progress_bar(say, f"measuring {model}") as told:
        program, costs, sample = open_model(
            model,
            data=data,
            limit=check_limit(limit, quick=quick),
            backend=backend,
            threads=threads,
            profile=profile,
            store=store,
            seed=seed,
            on_progress=told,
        )
    read_energy, energy_note = package_energy()
    with progress_bar(say, f"comparing {len(names)} policies") as told:
        found = compare(
            program,
            costs,
            sample,
            policies=names,
            budgets=shares,
            read_energy=read_energy,
            energy_note=energy_note,
            skip_unable=policies == "all",
            seed=seed,
            on_progress=told,
        )
    if csv is not None:
        from edgewise.report.evaluation import evaluation_csv

        write_text(csv, evaluation_csv(found))
        say.print(f"table: {csv}")
    if figure is not None:
        say.print(f"figure: {accuracy_figure(found, figure)}")
    if json:
        emit_json(found)
    else:
        show_evaluation(stdout_console(), found)


def parse_budgets(text: str) -> tuple[float, ...]:
    """Read budgets in per cent as shares.

    Raises:
        ConfigError: One is no number above zero, or stands there twice.

    Example:
        >>> parse_budgets("25, 50%")
        (0.25, 0.5)
    """
    from edgewise.errors import ConfigError

    shares = []
    for part in text.split(","):
        try:
            share = float(part.strip().removesuffix("%")) / 100
        except ValueError:
            share = 0.0
        if not 0.0 < share < float("inf") or share in shares:
            raise ConfigError(
                f"expected budgets in per cent, each above zero and once, found {text!r}",
                help="--budgets 25,50,75,100",
            )
        shares.append(share)
    return tuple(shares)


def check_limit(limit: int | None, *, quick: bool) -> int:
    """How many inputs to use.

    Raises:
        ConfigError: The limit is below one.
    """
    from edgewise.errors import ConfigError

    if limit is None:
        return _QUICK_INPUTS if quick else _INPUTS
    if limit < 1:
        raise ConfigError(f"expected at least one input, found a limit of {limit}")
    return limit


def show_evaluation(out: Console, found: Evaluation) -> None:
    """Print the table and what a reader must know."""
    from edgewise.report.evaluation import evaluation_table
    from edgewise.units import format_duration

    out.print(
        f"{found.model} on {found.backend}, {found.threads} thread; whole network"
        f" {format_duration(found.full_depth_s)} (median); {found.data}",
        soft_wrap=True,
    )
    out.print(evaluation_table(found))
    for policy, reason in found.skipped.items():
        out.print(f"left out: {policy}: {reason}", soft_wrap=True)
    out.print(f"energy: {found.energy_note}", soft_wrap=True)
    for note in found.notes:
        out.print(note, soft_wrap=True)


def write_text(path: Path, text: str) -> None:
    """Write beside the target and rename, so that an old file is never half replaced."""
    path = path.resolve()
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


@contextlib.contextmanager
def progress_bar(say: Console, what: str) -> Iterator[Callable[[float], None]]:
    """Show a bar while something runs; yields what to tell the share done to."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=say, transient=True) as bar:
        task = bar.add_task(what, total=1.0)
        yield lambda share: bar.update(task, completed=share)
