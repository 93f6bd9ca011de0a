"""``edgewise generate``: continue a text within a time per token."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgewise.cli.language import (
    Exits,
    ExitsFile,
    HeadOption,
    LanguageOptions,
    PrecisionOption,
    one_of,
)
from edgewise.cli.output import emit_json, stderr_console
from edgewise.errors import ConfigError, DataError, Infeasible
from edgewise.units import format_duration, parse_duration_s

if TYPE_CHECKING:
    from rich.console import Console

    from edgewise.profiling import Progress
    from edgewise.runtime.generation import Generation, LanguageSession, Summary, Token
    from edgewise.runtime.generation.stepping import MakeStepper

_LINE_EVERY = 4  # tokens; a line for each would be read by nobody
_RECENT = 32


def generate(
    model: Annotated[
        str, typer.Argument(help="A name of `edgewise pull`, a Hugging Face folder, a GGUF file.")
    ],
    *,
    prompt: Annotated[
        str | None, typer.Option("--prompt", help="Text to continue, or the question of --chat.")
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", help="A UTF-8 file instead of --prompt.")
    ] = None,
    tpot: Annotated[
        str | None,
        typer.Option("--tpot", help="Time per output token, as '50 ms'; none by default."),
    ] = None,
    ttft: Annotated[
        str | None, typer.Option("--ttft", help="Time to the first token, prompt included.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use the model's chat template.")] = False,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens at most.")] = 256,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="Text that ends the answer; repeatable.")
    ] = None,
    exits: Exits = None,
    exits_file: ExitsFile = None,
    head: HeadOption = None,
    backend: Annotated[str, typer.Option(help="runtime or runtime:device.")] = "torch:cpu",
    precision: PrecisionOption = None,
    threads: Annotated[int, typer.Option(help="Threads of each call.")] = 1,
    policy: Annotated[str, typer.Option(help="Who decides how deep a token runs.")] = "edgewise",
    kv: Annotated[
        str,
        typer.Option(help="What an early token leaves behind: propagate, mask, defer, verify."),
    ] = "propagate",
    exact: Annotated[
        bool, typer.Option("--exact", help="What full depth would say; exits only draft.")
    ] = False,
    gate: Annotated[
        float | None,
        typer.Option(
            "--gate",
            help="Leave sooner than the budget asks where an exit's gate is as sure as this, 0 to"
            " 1, that it says what full depth would; none by default.",
            show_default=False,
        ),
    ] = None,
    window: Annotated[
        str, typer.Option(help="Tokens over which saved time is carried on, or strict.")
    ] = "strict",
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.")] = 0.0,
    top_p: Annotated[
        float, typer.Option("--top-p", help="Draw from the most likely that reach this chance.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Of chance.", min=0)] = 0,
    on_infeasible: Annotated[
        str, typer.Option(help="Budgets below the floor: run_anyway or raise.")
    ] = "run_anyway",
    profile: Annotated[
        str, typer.Option(help="auto, stored, or an exported profile file.")
    ] = "auto",
    store: Annotated[Path | None, typer.Option(help="Profile store to use.")] = None,
    predictor: Annotated[
        Path | None,
        typer.Option(help="What edgewise fit wrote: costs follow the device's state."),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object on standard output, at the end.")
    ] = False,
) -> None:
    """Continue a text within a time per token, and say how deep each token went and why.

    The text streams to standard output; tokens per second, deadlines kept and depth go to a line
    on standard error. Ctrl-C ends it with what there is.
    """
    from edgewise.api import load_language

    said = _prompt(prompt, prompt_file)
    options: dict[str, Any] = {
        "tpot_budget_s": None if tpot is None else parse_duration_s(tpot),
        "ttft_budget_s": None if ttft is None else parse_duration_s(ttft),
        "window": parse_window(window),
        "on_infeasible": one_of("--on-infeasible", on_infeasible, ("run_anyway", "raise")),
        "stepper": _stepper(gate, exact=exact or kv == "verify"),
    }
    opened = LanguageOptions.read(
        precision=precision, head=head, exits=exits, exits_file=exits_file
    )
    with _progress(model) as on_progress:
        session = load_language(
            model,
            backend=backend,
            precision=opened.precision,
            threads=threads,
            exit_layers=opened.layers,
            exits=exits_file or "auto",
            head=opened.head,
            policy=policy,
            profile=profile,
            store=store,
            predictor=predictor,
            on_progress=on_progress,
        )
    if session.model.num_exits == 1 and tpot is not None:
        stderr_console().print(
            "no exits are fitted: every token runs through all layers; edgewise fit-exits"
            f" {model} --text FILE",
            soft_wrap=True,
        )
    with session:
        try:
            generation = session.generate(
                said,
                chat=chat,
                max_tokens=max_tokens,
                stop=stop or (),
                kv=kv,  # type: ignore[arg-type]  # checked there
                exact=exact,
                temperature=temperature,
                top_p=top_p,
                seed=seed,
                **options,
            )
        except Infeasible as error:
            if json:
                emit_json(_opened(session) | {"outcome": "infeasible", "floor_s": error.closest})
            raise
        tokens = _stream(generation, session, quiet=json)
    if json:
        emit_json(_record(session, generation.summary, tokens))


def parse_window(text: str) -> Any:
    """A number of tokens, or strict.

    Raises:
        ConfigError: Neither.

    Example:
        >>> parse_window("8"), parse_window("strict")
        (8, 'strict')
    """
    if text == "strict":
        return text
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"expected a number of tokens or 'strict' as window, found {text!r}"
        ) from None


def _stepper(gate: float | None, *, exact: bool) -> MakeStepper | None:
    if gate is None:
        return None
    if exact:
        raise ConfigError(
            "--gate leaves before full depth has spoken, which exact modes do not allow",
            help="leave out one of them",
        )
    from edgewise.runtime.generation.baselines import make_baseline

    return make_baseline("edgewise+gate", threshold=gate)


def _prompt(prompt: str | None, path: Path | None) -> str:
    if (prompt is None) == (path is None):
        raise ConfigError("expected either --prompt or --prompt-file", help="--prompt 'Once upon'")
    if prompt == "":
        raise ConfigError("the prompt is empty", help="give at least one word")
    if path is None:
        return prompt or ""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: expected UTF-8 text, found byte {error.object[error.start]:#04x} at"
            f" {error.start}",
            help=f"iconv -t utf-8 {path}",
        ) from error


@contextlib.contextmanager
def _progress(model: str) -> Iterator[Any]:
    """Say what a start waits for."""
    with stderr_console().status(f"loading {model}") as status:

        def on_progress(progress: Progress) -> None:
            done = f"{100 * progress.done_ratio:.0f} %"
            status.update(f"measuring what a token costs here, kept for later: {done}")

        yield on_progress


def _stream(generation: Generation, session: LanguageSession, *, quiet: bool) -> list[Token]:
    """Write text as it comes, and the line; return all tokens."""
    console, tokens = stderr_console(), []
    try:
        with _line(console, shown=console.is_terminal and not quiet) as show, generation:
            for token in generation:
                tokens.append(token)
                if not quiet:
                    sys.stdout.write(token.text)
                    sys.stdout.flush()
                if token.index % _LINE_EVERY == 0:
                    show(state_line(tokens[-_RECENT:], generation.summary.dsr))
    except KeyboardInterrupt:
        generation.close()
    if not quiet:
        sys.stdout.write("\n")
        sys.stdout.flush()
        console.print(summary_line(generation.summary, session), soft_wrap=True)
    return tokens


@contextlib.contextmanager
def _line(console: Console, *, shown: bool) -> Iterator[Callable[[str], None]]:
    """A line at the foot of the terminal, below text that scrolls above it; gone at the end."""
    if not shown:
        yield lambda _: None
        return
    size = shutil.get_terminal_size()
    foot, write = size.lines, console.file.write

    def show(text: str) -> None:
        write(f"\x1b7\x1b[{foot};1H\x1b[2K\x1b[2m{text[: size.columns - 1]}\x1b[0m\x1b8")
        console.file.flush()

    # Save the place, let all lines but the last scroll, come back; one line up where it was last.
    write(f"\n\x1b7\x1b[1;{foot - 1}r\x1b8\x1b[1A")
    try:
        yield show
    finally:
        write(f"\x1b7\x1b[r\x1b[{foot};1H\x1b[2K\x1b8")
        console.file.flush()


def state_line(recent: list[Token], dsr: float | None) -> str:
    """Speed and depth of the last tokens, and deadlines kept so far."""
    spent_s = sum(t.observed_s for t in recent if t.index)
    count = sum(1 for t in recent if t.index)
    speed = f"{count / spent_s:.1f} tokens/s" if spent_s > 0 else "first token"
    kept = "" if dsr is None else f" · {100 * dsr:.0f} % in time"
    depth = sum(t.exit_layer for t in recent) / len(recent)
    return f"{speed}{kept} · {depth:.1f} layers"


def summary_line(summary: Summary, session: LanguageSession) -> str:
    """All that became of a text, in one line."""
    parts = [f"{summary.tokens} tokens ({(summary.finish or 'going on').replace('_', ' ')})"]
    if summary.ttft_s is not None:
        late = " (late)" if summary.ttft_met is False else ""
        parts.append(f"first after {format_duration(summary.ttft_s)}{late}")
    if summary.tpot_s:
        parts.append(f"then {format_duration(summary.tpot_s)} each, {1 / summary.tpot_s:.1f}/s")
    if summary.dsr is not None:
        budget = format_duration(summary.tpot_budget_s)
        parts.append(f"{100 * summary.dsr:.1f} % within {budget}")
    if summary.tpot_budget_s is not None:
        parts.append(f"floor {format_duration(summary.floor_s)}")
    depths = ", ".join(f"{k}: {n}" for k, n in summary.depth_histogram.items())
    parts.append(f"layers {depths or '–'}")
    if summary.late:
        worst = max(summary.late, key=lambda late: late.late_s)
        parts.append(f"latest by {format_duration(worst.late_s)}: {worst.cause}")
    return " · ".join([*parts, f"{session.decoder.backend}, {session.decoder.precision}"])


def _opened(session: LanguageSession) -> dict[str, Any]:
    decoder = session.decoder
    return {
        "model": session.model.name,
        "backend": decoder.backend,
        "precision": decoder.precision,
        "threads": decoder.threads,
        "exit_layers": decoder.exit_layers,
        "head": session.head,
    }


def _record(session: LanguageSession, summary: Summary, tokens: list[Token]) -> dict[str, Any]:
    return _opened(session) | {
        "policy": session.policy(summary.kv).name,
        "full_depth_s": session.full_depth_s(after=summary.prompt_tokens),
        "summary": summary,
        "tokens": tokens,
    }
