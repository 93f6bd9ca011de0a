"""``edgewise fit-exits``: fit a language model's exits on text and score them on other text."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from edgewise.cli.output import emit_json, stderr_console, stdout_console
from edgewise.errors import ConfigError
from edgewise.frontends.language import load_language_model
from edgewise.frontends.language.exits_file import exits_path, save_exits
from edgewise.training.language_exits import (
    FitExitsSettings,
    FittedExits,
    TextScore,
    check_affine_layers,
    default_exit_layers,
    fit_language_exits,
)
from edgewise.training.language_scores import Above, ExitScore
from edgewise.training.language_text import load_text
from edgewise.training.progress import OnProgress, Progress
from edgewise.training.work import WorkDirectory
from edgewise.units import format_bytes

_PHASES = {
    "fit": "read text, sum up states",
    "calibrate": "temperatures and gates",
    "evaluate": "score on held-out text",
}


def fit_exits(
    model: Annotated[
        str, typer.Argument(help="A name of `edgewise pull`, a Hugging Face folder, a GGUF file.")
    ],
    *,
    text: Annotated[
        list[Path], typer.Option("--text", help="UTF-8 text to fit on, plain or .gz; repeatable.")
    ],
    held_out: Annotated[
        list[Path] | None,
        typer.Option(
            "--held-out", help="Text to score on; the last tenth of each text by default."
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option("--layers", help="Exits after so many layers, as 12,24, or all."),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens to fit on.")] = 57_000,
    held_out_tokens: Annotated[
        int, typer.Option("--held-out-tokens", min=1, help="Tokens to score on.")
    ] = 8192,
    shortlist: Annotated[
        int, typer.Option("--shortlist", min=0, help="Tokens of the short list; 0 for none.")
    ] = 8192,
    window: Annotated[
        int, typer.Option("--window", min=2, help="Tokens of each pass through the model.")
    ] = 256,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="File to write; by default where `generate` looks for it."),
    ] = None,
    work: Annotated[
        Path | None,
        typer.Option("--work", help="Where finished work is kept; OUT.work by default."),
    ] = None,
    threads: Annotated[int, typer.Option("--threads", min=1, help="Threads to compute with.")] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
) -> None:
    """Fit a language model's exits on text, and score them on other text.

    Each exit gets an affine map to the last layer's state, in closed form from one pass over the
    text, a temperature, and a gate that tells from the state alone whether the exit would agree
    with full depth. Stop it at any moment, even with kill -9: the same command goes on where it
    was.
    """
    with stderr_console().status(f"reading {model}"):
        loaded = load_language_model(model)
        if loaded.tokenizer is None:
            raise ConfigError(f"{model} has no tokenizer", help="give a folder that has one")
        depth = loaded.architecture.num_hidden_layers
        settings = FitExitsSettings(
            layers=parse_layers(layers, depth=depth),
            tokens=tokens,
            held_out_tokens=held_out_tokens,
            window=window,
            shortlist=shortlist,
            threads=threads,
        )
        texts = [load_text(path, loaded.tokenizer) for path in text]
        others = [load_text(path, loaded.tokenizer) for path in held_out or ()]
    out = out or exits_path(loaded.digest)
    if out.is_dir():
        raise ConfigError(f"{out} is a folder, expected a file", help="name a file in it")
    work = work or out.with_name(f"{out.name}.work")
    try:
        with _bar() as on_progress:
            fitted = fit_language_exits(
                loaded,
                texts,
                settings=settings,
                work=WorkDirectory(work),
                held_out=others,
                on_progress=on_progress,
            )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"stopped; finished work is kept in {work}, and the same command goes on from there"
        ) from None
    save_exits(fitted.exits, out)
    shutil.rmtree(work, ignore_errors=True)
    if as_json:
        notes = {k: v for k, v in fitted.exits.notes.items() if k != "settings"}
        emit_json({"file": out, "model": loaded.name, "digest": loaded.digest, **notes})
        return
    _show(fitted)
    stdout_console().print(f"saved {out} ({format_bytes(out.stat().st_size)})", soft_wrap=True)


def parse_layers(text: str | None, *, depth: int) -> tuple[int, ...]:
    """Which exits a flag asks for.

    Raises:
        ConfigError: Not numbers, or not 1 to L - 1, each once.

    Example:
        >>> parse_layers("3,1", depth=4), parse_layers("all", depth=4)
        ((1, 3), (1, 2, 3))
    """
    if text is None:
        return default_exit_layers(depth)
    if text.strip().lower() == "all":
        return tuple(range(1, depth))
    try:
        chosen = tuple(sorted(int(part) for part in text.split(",")))
    except ValueError:
        raise ConfigError(
            f"expected layers as 12,24 or all, found {text!r}", help=f"1 to {depth - 1}"
        ) from None
    check_affine_layers(chosen, depth=depth)
    return chosen


@contextmanager
def _bar() -> Iterator[OnProgress]:
    """A progress bar per phase, with the time left, on standard error."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    bars = Bars(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("windows, left"),
        TimeRemainingColumn(),
        console=stderr_console(),
        speed_estimate_period=60.0,
    )
    tasks: dict[str, Any] = {}

    def show(progress: Progress) -> None:
        if progress.phase not in tasks:
            # What an earlier run finished would make the rest look quicker than it is.
            tasks[progress.phase] = bars.add_task(
                _PHASES[progress.phase], total=progress.total, completed=progress.done
            )
        bars.update(tasks[progress.phase], completed=progress.done)

    with bars:
        yield show


def _show(fitted: FittedExits) -> None:
    console = stdout_console()
    for score in fitted.scores:
        _show_text(score, fitted)
    gate, head = fitted.gate_flops, fitted.head_flops
    console.print(
        "Held-out text was used for nothing but these scores. agree: same top answer as full depth;"
        " T: divides the logits so that confidence is the chance to agree; ECE: expected"
        " calibration error at T = 1 and T; > 0.8: share of tokens that pass, and how many of them"
        " agree."
    )
    console.print(
        f"A gate costs {gate:.0f} FLOPs a token, an affine exit {head / 1e6:.1f} M"
        + (
            f", {fitted.shortlist_flops / 1e6:.1f} M with the short list. An answer that is not on"
            " the short list cannot be its: where answers must be exact, the whole head decides."
            if fitted.shortlist_flops is not None
            else "."
        )
    )
    used = fitted.fit_tokens + fitted.calibration_tokens
    short = (
        f"; {fitted.asked_tokens} were asked for, the text has no more"
        if used + max(256, used // 20) < fitted.asked_tokens
        else ""
    )
    console.print(f"fitted on {fitted.exits.fitted_on}{short}")


def _show_text(score: TextScore, fitted: FittedExits) -> None:
    from rich.table import Table

    text = "all held-out text" if score.text == "all" else score.text
    ppl = "" if score.perplexity is None else f", full depth's perplexity {score.perplexity:.1f}"
    covered = "" if score.coverage is None else f", short list holds {score.coverage:.1%}"
    table = Table(
        title=f"{fitted.exits.model} on {text}: {score.tokens} tokens{ppl}{covered}",
        title_justify="left",
    )
    for heading in (
        "after",
        "agree",
        "ppl",
        "T",
        "ECE",
        "> 0.5",
        "> 0.8",
        "short list",
        "gate AUC",
        "gate > 0.8",
    ):
        table.add_column(heading, justify="right")
    for e in score.exits:
        table.add_row(*_row(e))
    stdout_console().print(table)


def _row(e: ExitScore) -> list[str]:
    gate = e.gate
    return [
        str(e.layer),
        f"{e.agreement:.3f}",
        "" if e.perplexity is None else f"{e.perplexity:.1f}",
        f"{e.temperature:.2f}",
        f"{e.ece_before:.3f} → {e.ece:.3f}",
        *(_passed(e.confident, t) for t in (0.5, 0.8)),
        "" if e.shortlist_agreement is None else f"{e.shortlist_agreement:.3f}",
        "" if gate is None or gate.auc is None else f"{gate.auc:.3f}",
        "" if gate is None else _passed(gate.above, 0.8),
    ]


def _passed(above: Sequence[Above], threshold: float) -> str:
    found = next(a for a in above if a.threshold == threshold)
    return f"{found.share:.2f}" + ("" if found.agreement is None else f" / {found.agreement:.2f}")
