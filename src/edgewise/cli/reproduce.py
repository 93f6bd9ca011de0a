"""``edgewise reproduce``: what the papers claim, beside what this machine says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgewise.cli.output import emit_json, stderr_console, stdout_console, to_plain

if TYPE_CHECKING:
    from rich.table import Table

    from edgewise.reproduce import Figure, Reproduction


def reproduce(
    claim: Annotated[str | None, typer.Argument(help="Which; --list names them.")] = None,
    *,
    model: Annotated[
        list[str] | None,
        typer.Option(help="A model to use, once for each; shipped ones by default."),
    ] = None,
    data: Annotated[str | None, typer.Option(help="Data set, by name or path.")] = None,
    limit: Annotated[int | None, typer.Option(help="At most so many inputs.")] = None,
    seeds: Annotated[int | None, typer.Option(help="How many seeds, where it trains.")] = None,
    backend: Annotated[str, typer.Option(help="runtime or runtime:device.")] = "auto",
    threads: Annotated[int, typer.Option(help="Threads of each call.")] = 1,
    store: Annotated[Path | None, typer.Option(help="Profile store to use.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Keep results of long runs here, and resume from here.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of what is drawn, where it simulates.")] = 0,
    csv: Annotated[Path | None, typer.Option(help="Write the table here, too.")] = None,
    figure: Annotated[
        Path | None, typer.Option(help="Draw its figure here: .png, .svg or .pdf.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Name the claims and stop.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds, nets and samples.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object on standard output.")
    ] = False,
) -> int:
    """Run one claim of a paper and say whether it holds here.

    The exit code is 1 where a claim that can be judged does not hold.
    """
    from edgewise.errors import ConfigError
    from edgewise.report.curves import check_figure_path
    from edgewise.reproduce import Setup, claim_ids, claim_title, run_claim

    console = stdout_console()
    if list_:
        titles = {each: claim_title(each) for each in claim_ids()}
        if json:
            emit_json({"claims": titles})
        else:
            for each, title in titles.items():
                console.print(f"{each}: {title}", soft_wrap=True)
        return 0
    if claim is None:
        raise ConfigError("which claim?", help="edgewise reproduce --list")
    if figure is not None:
        check_figure_path(figure)  # before a run that may take long
    _check_counts(limit=limit, seeds=seeds, threads=threads)
    with stderr_console().status(f"reproduce {claim}") as status:
        found = run_claim(
            claim,
            Setup(
                models=tuple(model or ()),
                data=data,
                backend=backend,
                threads=threads,
                limit=limit,
                seeds=seeds,
                store=store,
                out=out,
                seed=seed,
                quick=quick,
                say=lambda text: status.update(f"reproduce {claim}: {text}"),
            ),
        )
    _write_files(found, csv=csv, figure=figure)
    if json:
        plain = to_plain(found)
        assert isinstance(plain, dict)  # noqa: S101 - a record
        emit_json({"claim": claim, "holds": found.holds, "quick": quick, **plain})
    else:
        _show(found)
    return 1 if found.holds is False else 0


def _check_counts(**counts: int | None) -> None:
    from edgewise.errors import ConfigError

    for option, count in counts.items():
        if count is not None and count < 1:
            raise ConfigError(f"expected --{option} of at least 1, found {count}")


def _write_files(found: Reproduction, *, csv: Path | None, figure: Path | None) -> None:
    from edgewise.cli.evaluate import write_text
    from edgewise.report.chart import draw_charts

    say = stderr_console()
    if csv is not None:
        write_text(csv, reproduction_csv(found))
        say.print(f"table: {csv}")
    if figure is not None and found.charts:
        say.print(f"figure: {draw_charts(found.charts, figure, title=found.title)}")
    elif figure is not None:
        say.print("this claim has a table only: no figure was drawn")


def _show(found: Reproduction) -> None:
    out = stdout_console()
    out.print(f"{found.title} ({found.source})", soft_wrap=True)
    for who, what in found.setting.items():
        out.print(f"{who}: {what}", soft_wrap=True)
    out.print(reproduction_table(found))
    words = {True: "holds", False: "does not hold", None: "cannot be said"}
    for verdict in found.verdicts:
        out.print(f"{words[verdict.holds]}: {verdict.claim}: {verdict.detail}", soft_wrap=True)
    for note in found.notes:
        out.print(note, soft_wrap=True)


def reproduction_table(found: Reproduction) -> Table:
    """Paper and ours side by side: a column for each way in which ours came about."""
    from rich.table import Table
    from rich.text import Text

    kinds = list(dict.fromkeys(f.provenance for f in found.figures)) or ["measured"]
    table = Table(caption="in brackets 95 % intervals; – is not known", caption_justify="left")
    table.add_column("figure")
    table.add_column("paper", justify="right")
    for kind in kinds:
        table.add_column(f"ours, {kind}", justify="right")
    table.add_column("note")
    for figure in found.figures:
        table.add_row(
            *(
                Text(cell)
                for cell in (
                    figure.name,
                    _write(figure, figure.paper),
                    *(_ours(figure) if figure.provenance == kind else "" for kind in kinds),
                    figure.note,
                )
            )
        )
    return table


def reproduction_csv(found: Reproduction) -> str:
    """The table with all its numbers, one figure a line."""
    import csv
    import io

    text = io.StringIO()
    columns = ("name", "unit", "paper", "ours", "low", "high", "provenance", "note")
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(columns)
    rows.writerows([getattr(figure, column) for column in columns] for figure in found.figures)
    return text.getvalue()


def _ours(figure: Figure) -> str:
    text = _write(figure, figure.ours)
    if figure.low is None or figure.high is None:
        return text
    return f"{text} [{_write(figure, figure.low)}–{_write(figure, figure.high)}]"


def _write(figure: Figure, value: float | None) -> str:
    from edgewise.units import format_duration

    if value is None:
        return "–"
    if figure.unit == "s":
        return format_duration(value)
    if figure.unit.startswith("%"):
        return f"{value:.1f} %"
    return f"{value:.3g}"
