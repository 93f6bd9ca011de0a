"""``edgewise pull``: make a language model from an installed package of data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from edgewise.cli.output import emit_json, stderr_console, stdout_console
from edgewise.errors import ConfigError
from edgewise.frontends.language.pull import OnProgress, Pullable, pull_model, pullable
from edgewise.units import format_bytes


def pull(
    model: Annotated[
        str | None, typer.Argument(help="A model by name; without one, all of them are listed.")
    ] = None,
    *,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compute the checksum of every file of it.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
) -> None:
    """Make a language model from an installed package of data, once; or list those there are.

    The package's file is converted to float32 weights in the user's cache, on which nothing is
    lost. A conversion that was stopped, or that is damaged, is made anew and never used.
    """
    if model is None:
        if verify:
            raise ConfigError("--verify needs a model", help="edgewise pull MODEL --verify")
        _list(pullable(), as_json=as_json)
        return
    with _bar(model) as on_progress:
        pulled = pull_model(model, verify=verify, on_progress=on_progress)
    if as_json:
        emit_json(pulled)
        return
    console = stdout_console()
    done = f"converted, since {pulled.why}" if pulled.converted else "is ready"
    if verify:
        done += "; every checksum is right"
    console.print(f"{pulled.name} {done}")
    console.print(f"{pulled.folder}  {format_bytes(pulled.size_bytes)}")


def _list(models: list[Pullable], *, as_json: bool) -> None:
    if as_json:
        emit_json({"models": models})
        return
    from rich.table import Table

    table = Table(box=None, padding=(0, 2), header_style="bold")
    for column in ("model", "what it is", "licence", "on disk", "state"):
        table.add_column(column)
    for each in models:
        table.add_row(
            each.name, each.about, each.licence, format_bytes(each.size_bytes), each.state
        )
    console = stdout_console()
    console.print(table)
    for each in models:
        if each.help is not None:
            console.print(f"{each.name}: {each.help}", soft_wrap=True)


@contextmanager
def _bar(name: str) -> Iterator[OnProgress]:
    """A progress bar with the time left on standard error, once there is something to do."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=stderr_console(),
    )

    def show(done: int, total: int) -> None:
        if not bars.tasks:
            bars.add_task(f"converting {name}", total=total)
            bars.start()
        bars.update(bars.tasks[0].id, completed=done)

    try:
        yield show
    finally:
        if bars.tasks:
            bars.stop()
