"""``edgewise profile``: measure what each stage of a model costs on this machine."""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgewise.cli.language import (
    Exits,
    ExitsFile,
    HeadOption,
    LanguageOptions,
    PrecisionOption,
    check_known,
    is_language,
    refuse_without_language,
)
from edgewise.cli.output import emit_json, stderr_console, stdout_console
from edgewise.errors import BackendError, BackendUnavailable, ConfigError
from edgewise.profiles import (
    Cost,
    Profile,
    ProfileStore,
    Steadiness,
    default_store_path,
    write_profile,
)
from edgewise.profiles import statistics as stats
from edgewise.units import format_duration

if TYPE_CHECKING:
    from edgewise.backends import Program
    from edgewise.model.staged import StagedModel
    from edgewise.profiling import Effort, Progress

_KINDS = ("segment", "head", "controller")


def profile(
    model: Annotated[
        str,
        typer.Argument(
            help="A prepared model, a name of the model zoo, or an ONNX file; a language model's"
            " name, folder or GGUF file; with --segments an ONNX or TFLite file, or a name.",
            show_default=False,
        ),
    ],
    *,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            "--backend",
            help="Where to measure; may be given again; `all` for every runtime installed here."
            " Default: the best one installed.",
            show_default=False,
        ),
    ] = None,
    threads: Annotated[int, typer.Option("--threads", help="Threads of each call.")] = 1,
    batch: Annotated[
        list[int] | None,
        typer.Option("--batch", help="Samples of each call; may be given again. Default: 1."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few seconds for each backend, wider intervals.")
    ] = False,
    rounds: Annotated[
        int | None,
        typer.Option(
            "--rounds",
            help="Samples of each unit at the most. Default: 300, or 60 with --quick.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
    export: Annotated[
        Path | None,
        typer.Option("--export", help="Write the profile, every sample in it, to this file too."),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option("--store", help="Database to keep samples in. Default: see doctor."),
    ] = None,
    precision: PrecisionOption = None,
    head: HeadOption = None,
    exits: Exits = None,
    exits_file: ExitsFile = None,
    segments: Annotated[
        bool,
        typer.Option(
            "--segments",
            help="For placement: what an ONNX or TFLite file, or a prepared model with exits, costs"
            " at each place to cut it between an accelerator and the CPU.",
        ),
    ] = False,
    places: Annotated[
        int | None,
        typer.Option(
            "--places",
            help="With --segments: places inside the model, at most. Default: 10.",
            show_default=False,
        ),
    ] = None,
    threads_up_to: Annotated[
        int | None,
        typer.Option(
            "--threads-up-to",
            help="With --segments: measure with 1 to so many threads. Default: all usable cores.",
            show_default=False,
        ),
    ] = None,
    accelerator: Annotated[
        str | None,
        typer.Option(
            "--accelerator",
            help="With --segments: a shipped description or a TOML file. Default: coral-usb.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Measure what each stage of a model costs on this machine.

    Of a language model, what a token costs: each group of layers between exits and each exit's
    head, after a short and a long text, and without what an early token leaves in deeper layers.

    Every sample is kept as soon as it is taken: stopped at any moment, the same command goes on
    from there. With --segments, nothing is kept but what --export writes.
    """
    only_cut = {
        "--places": places,
        "--threads-up-to": threads_up_to,
        "--accelerator": accelerator,
    }
    only_language = {
        "--precision": precision,
        "--head": head,
        "--exits": exits,
        "--exits-file": exits_file,
    }
    only_staged = {
        **only_language,
        "--backend": backend,
        "--batch": batch,
        "--store": store,
        "--threads": None if threads == 1 else threads,
    }
    _refuse(only_staged if segments else only_cut, segments=segments)
    if segments:
        from edgewise.cli.segments import ACCELERATOR, PLACES, profile_segments

        profile_segments(
            model,
            places=PLACES if places is None else places,
            threads_up_to=threads_up_to,
            accelerator=accelerator or ACCELERATOR,
            quick=quick,
            rounds=rounds,
            as_json=as_json,
            export=export,
        )
        return
    from edgewise.profiling import QUICK, THOROUGH, measure

    keep = ProfileStore(store or default_store_path())
    keep.list()  # a damaged store is refused before anything is compiled
    programs: Mapping[str, Program]
    if is_language(model):
        if any(size != 1 for size in batch or ()):
            raise ConfigError("--batch has no meaning for a language model: a token is one")
        options = LanguageOptions.read(
            precision=precision, head=head, exits=exits, exits_file=exits_file
        )
        programs, notes = load_token_programs(model, backend or (), options, threads=threads)
        staged = next(iter(programs.values())).model
    else:
        refuse_without_language(only_language)
        with _status(f"loading {model}"):
            staged, notes = load_for_timing(model)
        programs, left_out = load_programs(staged, backend or (), threads=threads)
        notes += left_out
    with _progress(staged.name, programs, quiet=as_json) as on_progress:
        measured = measure(
            programs,
            keep,
            rounds=rounds,
            quick=quick,
            batches=tuple(batch or (1,)),
            on_progress=on_progress,
        )
    if export is not None:
        write_profile(measured, export)
    found = summary(
        measured, staged, effort=QUICK if quick else THOROUGH, store=keep.path, notes=notes
    )
    if as_json:
        emit_json(found)
    else:
        show(found)
        if export is not None:
            stdout_console().print(f"written to {export}")


def _refuse(options: Mapping[str, object], *, segments: bool) -> None:
    """Refuse options that belong to the other way of profiling."""
    for name, given in options.items():
        if given is not None and given != []:
            raise ConfigError(
                f"{name} has no meaning {'with' if segments else 'without'} --segments",
                help="edgewise profile --help",
            )


def load_for_timing(name_or_path: str) -> tuple[StagedModel, list[str]]:
    """Load a model and give it a head at every exit, for a cost that is real.

    Args:
        name_or_path: A prepared model, a name of the zoo, or an ONNX file.

    Returns:
        The model, and what must be said about it.
    """
    checkpoints = importlib.import_module("edgewise.frontends.checkpoint")
    zoo = importlib.import_module("edgewise.frontends.zoo")
    notes: list[str] = []
    found = name_or_path in checkpoints.shipped_names() or Path(name_or_path).exists()
    check_known(name_or_path, others=zoo.backbone_names())
    if not found and _is_one_of(zoo.backbone_names(), name_or_path):
        backbone = zoo.build_backbone(name_or_path)
        model = backbone.stage()
        if backbone.weights == "random":
            notes.append("this backbone has random weights: its cost is real, its answers are not")
    else:
        model = checkpoints.load_model(name_or_path)
    if not model.has_all_heads:
        model = model.with_random_heads()
        notes.append(
            "exits without a head were given an untrained one: its cost is real, its answers are"
            " not"
        )
    return model, notes


def _is_one_of(names: Sequence[str], name: str) -> bool:
    return name.lower().replace("-", "_") in {each.replace("-", "_") for each in names}


def load_programs(
    model: StagedModel, asked: Sequence[str], *, threads: int
) -> tuple[dict[str, Program], list[str]]:
    """Compile a model for the backends that were asked for.

    Args:
        model: With a head at every exit.
        asked: Names; ``all`` stands for every runtime installed here; empty for the best one.
        threads: Threads of each call.

    Returns:
        Programs by full name, and why a runtime that ``all`` covers was left out.

    Raises:
        BackendUnavailable: A name is unknown, or nothing is installed.
        BackendError: A runtime that was named refuses the model, or all of them do.
    """
    from edgewise.backends import available_backends, load_program
    from edgewise.backends.registry import full_name

    # The numpy reference is there to compare with; it takes seconds for one image.
    installed = [name for name in available_backends() if not name.startswith("numpy")]
    if not installed and (not asked or "all" in asked):
        raise BackendUnavailable(
            "no runtime that runs stages is installed", help="pip install 'edgewise[onnx]'"
        )
    named = [full_name(each) for each in asked if each != "all"]
    wanted = dict.fromkeys([*named, *(installed if "all" in asked else ())] or installed[:1])
    programs: dict[str, Program] = {}
    notes: list[str] = []
    for name in wanted:
        try:
            with _status(f"compiling {model.name} for {name}"):
                programs[name] = load_program(model, name, threads=threads)
        except BackendError as error:
            if name in named:
                raise
            notes.append(f"{name} was left out: {error.message}")
    if not programs:
        raise BackendError(
            f"no runtime here runs model {model.name!r}: {'; '.join(notes)}",
            help="edgewise doctor --backends",
        )
    return programs, notes


def load_token_programs(
    model: str, asked: Sequence[str], options: LanguageOptions, *, threads: int
) -> tuple[dict[str, Program], list[str]]:
    """Load a language model on the backends that were asked for, for timing its tokens.

    Args:
        model: As for `load_language`.
        asked: Names; ``all`` stands for every runtime installed here; empty for the usual one.
        options: What to open it with.
        threads: Of each call.

    Returns:
        What `probe_programs` makes for each backend, and what must be said.

    Raises:
        EdgeError: As `load_language`.
    """
    from edgewise.api import LANGUAGE_BACKEND
    from edgewise.backends.decoder import decoder_names
    from edgewise.frontends.language import load_language_model
    from edgewise.runtime.generation.costs import probe_programs

    named = [each for each in asked if each != "all"]
    others = [name for name, width in decoder_names() if width == options.precision]
    others = others if "all" in asked else []
    programs: dict[str, Program] = {}
    notes: list[str] = []
    with _status(f"loading {model}"):
        loaded = load_language_model(model)
    for name in dict.fromkeys([*named, *others] or [LANGUAGE_BACKEND]):
        try:
            with _status(f"loading {model} on {name}"):
                decoder = options.open(loaded, backend=name, threads=threads)
        except BackendError as error:
            if name in named or not others:
                raise
            notes.append(f"{name} was left out: {error.message}")
            continue
        programs |= probe_programs(decoder, head=decoder.exit_head(options.head))
    if not programs:
        raise BackendError(
            f"no runtime here runs {model!r} so: {'; '.join(notes)}", help="edgewise doctor"
        )
    if next(iter(programs.values())).model.num_exits == 1:
        notes.append(
            "no exits are fitted: full depth alone was measured; edgewise fit-exits"
            f" {model} --text FILE"
        )
    return programs, notes


def summary(
    measured: Profile,
    model: StagedModel,
    *,
    effort: Effort,
    store: Path,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Summarise a profile: what ``edgewise profile --json`` prints.

    Args:
        measured: The profile.
        model: What was measured; gives the depth of each unit.
        effort: Says when a unit counts as steady.
        store: Where the samples are.
        notes: What else must be said.
    """
    from edgewise.profiling import campaign_notes

    turns = sorted({(key.backend, key.batch) for key in measured.units})
    return {
        "model": measured.model_id,
        "model_version": measured.model_version,
        "provenance": measured.provenance,
        "created_unix_s": measured.created_unix_s,
        "device_id": measured.device_id,
        "device": measured.device,
        "thread_policy": measured.thread_policy,
        "method": measured.method,
        "state": measured.state,
        "rounds": measured.num_rounds,
        "store": store,
        "backends": [_turn(measured, model, effort, *turn) for turn in turns],
        "notes": [*notes, *campaign_notes(measured)],
    }


def show(found: Mapping[str, Any]) -> None:
    """Print a summary for people."""
    from rich.table import Table

    console = stdout_console()
    console.print(
        f"{found['model']} on {found['device'].get('cpu_model') or 'an unknown CPU'}:"
        f" {found['provenance']}, {found['rounds']} rounds, {found['thread_policy'].key}"
    )
    for turn in found["backends"]:
        console.print(f"\n{turn['backend']}, batch {turn['batch']}")
        table = Table()
        for name in ("unit", "depth", "median", "p95", "p99", "samples", "steady"):
            right = name not in {"unit", "steady"}
            table.add_column(name, justify="right" if right else "left")
        for unit in turn["units"]:
            table.add_row(
                unit["unit"],
                "–" if unit["depth_ratio"] is None else f"{unit['depth_ratio']:.0%}",
                *(format_duration(unit[key]) for key in ("median_s", "p95_s", "p99_s")),
                str(unit["samples"]),
                _steady_text(unit),
            )
        console.print(table)
        console.print(
            f"single stages {format_duration(turn['stages_s'])},"
            f" whole {format_duration(turn['whole_s'])}{_times(turn['stages_to_whole_ratio'])};"
            f" the head that answers {format_duration(turn['heads_least_s'])} to"
            f" {format_duration(turn['heads_most_s'])}, all heads"
            f" {format_duration(turn['heads_s'])}"
        )
    console.print(f"\nkept in {found['store']}", soft_wrap=True)
    for note in found["notes"]:
        console.print(f"note: {note}", soft_wrap=True)


def _turn(
    measured: Profile, model: StagedModel, effort: Effort, backend: str, batch: int
) -> dict[str, Any]:
    from edgewise.profiling import steadiness

    num_stages = len(model.stages)
    costs = [c for k, c in measured.units.items() if (k.backend, k.batch) == (backend, batch)]
    costs.sort(key=_natural)
    settled = steadiness(measured, effort)
    names = {cost.unit.name for cost in costs}
    singles = [f"segment:{k}-{k + 1}" for k in range(num_stages)]
    heads = [cost for cost in costs if cost.unit.kind == "head"]
    whole = f"segment:0-{num_stages}"
    stages_s = _median(measured.sums_s(singles, backend, batch=batch))
    whole_s = measured.cost(whole, backend, batch).median_s if whole in names else None
    head_names = [cost.unit.name for cost in heads]
    return {
        "backend": backend,
        "batch": batch,
        "stages_s": stages_s,
        "whole_s": whole_s,
        "stages_to_whole_ratio": stages_s / whole_s if stages_s and whole_s else None,
        "heads_s": _median(measured.sums_s(head_names, backend, batch=batch)),
        "heads_least_s": min((cost.median_s for cost in heads), default=None),
        "heads_most_s": max((cost.median_s for cost in heads), default=None),
        "units": [_unit(cost, model, settled[cost.unit]) for cost in costs],
    }


def _unit(cost: Cost, model: StagedModel, found: Steadiness) -> dict[str, Any]:
    return {
        "unit": cost.unit.name,
        "kind": cost.unit.kind,
        "depth_ratio": _depth_ratio(cost.unit.name, model),
        "median_s": cost.median_s,
        "median_low_s": found.interval.low,
        "median_high_s": found.interval.high,
        "p95_s": cost.quantile_s(0.95),
        "p99_s": cost.quantile_s(0.99),
        "samples": cost.count,
        "half_width_ratio": found.half_width_ratio,
        "shift_ratio": found.shift_ratio,
        "steady": found.steady,
        "steady_reason": found.reason,
        "energy_j": cost.energy_j,
        "energy_note": cost.energy_note,
    }


def _steady_text(unit: Mapping[str, Any]) -> str:
    if unit["steady"]:
        return "yes"
    if not math.isfinite(unit["half_width_ratio"]):
        return "no: too few"
    return f"no: ±{unit['half_width_ratio']:.1%}, drift {unit['shift_ratio']:+.1%}"


def _depth_ratio(unit: str, model: StagedModel) -> float | None:
    kind, _, where = unit.partition(":")
    if kind == "segment":
        return model.exits[int(where.partition("-")[2]) - 1].depth_ratio
    return model.exits[int(where)].depth_ratio if kind == "head" else None


def _natural(cost: Cost) -> tuple[int, int, int]:
    """Single stages, fused segments from short to long, heads, controller."""
    kind, _, where = cost.unit.name.partition(":")
    first, _, last = where.partition("-")
    start = int(first) if first else 0
    return (_KINDS.index(kind), int(last) - start if last else 0, start)


def _median(values_s: Sequence[float] | Any) -> float | None:
    return stats.median(values_s) if len(values_s) else None


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f" ({ratio:.2f} times)"


@contextlib.contextmanager
def _status(text: str) -> Iterator[None]:
    if sys.stderr.isatty():
        with stderr_console().status(text):
            yield
    else:
        yield


@contextlib.contextmanager
def _progress(
    model_name: str, programs: Mapping[str, Program], *, quiet: bool
) -> Iterator[Callable[[Progress], None] | None]:
    """A bar on standard error with the time left; nothing where a program reads the output."""
    if quiet and not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    with Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TextColumn("{task.fields[said]}"),
        console=stderr_console(),
    ) as bar:
        task = bar.add_task(f"{model_name} on {', '.join(programs)}", total=1.0, said="warming up")

        def on_progress(progress: Progress) -> None:
            bar.update(task, completed=progress.done_ratio, said=progress_text(progress))

        yield on_progress
        bar.update(task, completed=1.0, said="done")


def progress_text(progress: Progress) -> str:
    """What stands beside the bar.

    Args:
        progress: As the campaign reports it.
    """
    words = ["warming up"] if progress.remaining_s is None else []
    if progress.remaining_s is not None:
        words += [f"round {progress.rounds}", f"at most {progress.remaining_s:.0f} s left"]
    if progress.unsteady is not None:
        words.append(f"{progress.units - progress.unsteady} of {progress.units} steady")
    if progress.resumed_rounds:
        words.append(f"resumed at round {progress.resumed_rounds}")
    return ", ".join(words)
