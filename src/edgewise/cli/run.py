"""``edgewise run``: answer inputs within a budget."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgewise.cli.output import emit_json, stderr_console, stdout_console

if TYPE_CHECKING:
    from rich.table import Table

    from edgewise.runtime import Answer


def run(
    model: Annotated[str, typer.Argument(help="Shipped name, checkpoint directory or ONNX file.")],
    inputs: Annotated[list[str], typer.Argument(help="Images, folders, .npz or .npy files.")],
    *,
    budget: Annotated[str, typer.Option(help="Time each answer may take, for example '15 ms'.")],
    backend: Annotated[str, typer.Option(help="runtime or runtime:device.")] = "auto",
    policy: Annotated[str, typer.Option(help="Who decides how deep a request runs.")] = "edgewise",
    threads: Annotated[int, typer.Option(help="Threads of each call.")] = 1,
    on_infeasible: Annotated[
        str | None,
        typer.Option(
            help="When no exit fits: run_anyway (default) or reject; policy edgewise only.",
            show_default=False,
        ),
    ] = None,
    profile: Annotated[
        str, typer.Option(help="auto, stored, or an exported profile file.")
    ] = "auto",
    store: Annotated[Path | None, typer.Option(help="Profile store to use.")] = None,
    predictor: Annotated[
        Path | None,
        typer.Option(help="What edgewise fit wrote: costs follow the device's state."),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object on standard output.")
    ] = False,
) -> None:
    """Answer each input within its budget and say which exit answered and why."""
    from edgewise.api import load
    from edgewise.data import Preprocess, read_inputs
    from edgewise.exits import check_policy_name
    from edgewise.frontends.checkpoint import load_model
    from edgewise.units import parse_duration_s

    budget_s = parse_duration_s(budget)
    check_policy_name(policy)
    options: dict[str, Any] = {} if on_infeasible is None else {"on_infeasible": on_infeasible}
    staged = load_model(model)
    preprocess = Preprocess.from_json(staged.preprocess) if staged.preprocess else None
    # Unreadable paths are told before anything is loaded or measured.
    samples = read_inputs(inputs, preprocess=preprocess, expected_shape=staged.input.shape)
    with stderr_console().status(f"loading {staged.name}"):
        session = load(
            staged,
            backend=backend,
            policy=policy,
            threads=threads,
            profile=profile,
            store=store,
            predictor=predictor,
            **options,
        )
    with session:
        answers = [(name, session.run(x, budget_s=budget_s)) for name, x in samples]
    if session.alarm is not None:
        stderr_console().print(f"{session.alarm.reason}; {session.alarm.help}", soft_wrap=True)
    if json:
        emit_json(
            {
                "model": staged.name,
                "backend": session.program.backend,
                "policy": session.policy.name,
                "provenance": session.costs.provenance,
                "threads": threads,
                "answers": [{"input": n, **a.to_json()} for n, a in answers],
            }
        )
    else:
        stdout_console().print(_table(answers, num_exits=staged.num_exits))


def _table(answers: list[tuple[str, Answer]], *, num_exits: int) -> Table:
    from rich.table import Table

    from edgewise.units import format_duration

    first = answers[0][1]
    table = Table(
        title=f"{first.policy} on {first.backend}, budget {format_duration(first.budget_s)}",
        caption="times measured; predicted: from the profile and recent residuals",
        caption_justify="left",
    )
    table.add_column("input", overflow="fold")
    table.add_column("answer")
    for heading in ("sure", "exit", "predicted", "observed"):
        table.add_column(heading, justify="right")
    table.add_column("outcome")
    table.add_column("why")
    for name, a in answers:
        named = a.class_name or ("–" if a.label is None else str(a.label))
        table.add_row(
            name,
            named,
            "–" if a.probability is None else f"{100 * a.probability:.0f} %",
            "–" if a.exit_index is None else f"{a.exit_index} of 0…{num_exits - 1}",
            format_duration(a.predicted_s),
            format_duration(a.observed_s),
            a.outcome.replace("_", " "),
            a.reason,
        )
    return table
