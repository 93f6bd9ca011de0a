"""``edgewise fit``: predictors of cost by device state, compared, chosen and kept in a file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
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
from edgewise.errors import ConfigError, nearest_names
from edgewise.predict.active import StateChoice, choose_states, saved_s
from edgewise.predict.fitted import FittedPredictor
from edgewise.predict.fitting import (
    Choice,
    Comparison,
    Errors,
    choose,
    cross_validate,
    evaluate,
    fit_kind,
)
from edgewise.predict.predictor import predictor_kinds
from edgewise.predict.samples_file import load_samples, save_samples
from edgewise.predict.state_samples import StateSamples
from edgewise.units import format_bytes, format_duration

if TYPE_CHECKING:
    from edgewise.backends import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """What is fitted to.

    Attributes:
        samples: All states chosen.
        choice: Which of them are for calibration; ``None`` to draw them from the samples.
        rest: States that were not chosen, to see how well they are predicted; ``None`` where
            nobody knows them.
        num_all: States there were to choose from.
        saved_s: Time that profiling the others would have taken, seconds; ``None`` if unknown.
    """

    samples: StateSamples
    choice: StateChoice | None
    rest: StateSamples | None
    num_all: int
    saved_s: float | None


def fit(
    model: Annotated[
        str | None,
        typer.Argument(
            help="What to measure: shipped name, checkpoint directory or ONNX file; a language"
            " model's name, folder or GGUF file; with --samples or --device a name that is kept"
            " with the result.",
            show_default=False,
        ),
    ] = None,
    *,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Measure MODEL here, in every state that may be brought about."
        ),
    ] = False,
    backend: Annotated[
        str, typer.Option("--backend", help="With --measure: runtime or runtime:device.")
    ] = "auto",
    threads: Annotated[int, typer.Option("--threads", help="With --measure: of each call.")] = 1,
    precision: PrecisionOption = None,
    head: HeadOption = None,
    exits: Exits = None,
    exits_file: ExitsFile = None,
    keep_samples: Annotated[
        Path | None, typer.Option("--keep-samples", help="Write what was measured here (.npz).")
    ] = None,
    samples: Annotated[
        Path | None, typer.Option("--samples", help="File of costs in many states (.npz).")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", help="A simulated device: jetson-orin-nano or jetson-xavier-nx."),
    ] = None,
    work: Annotated[
        str | None,
        typer.Option("--work", help="What runs on the simulated device. Default: MODEL."),
    ] = None,
    states: Annotated[
        str,
        typer.Option("--states", help="How many states to use: a count or a share such as 10%."),
    ] = "100%",
    kind: Annotated[
        str, typer.Option("--kind", help="Kind of predictor; auto compares all and chooses.")
    ] = "auto",
    level: Annotated[
        float, typer.Option("--level", help="Share of costs the upper bound is to cover.")
    ] = 0.95,
    folds: Annotated[int, typer.Option("--folds", help="Folds of the cross-validation.")] = 5,
    seed: Annotated[int, typer.Option("--seed", help="Of all that is drawn.")] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write the predictor to this file (.npz).")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
) -> None:
    """Fit predictors of cost by device state, compare them and keep the best.

    Kinds are compared by cross-validation in which no state is both fitted to and tested on; the
    smallest pinball loss of the upper bound wins. States are chosen so that they say most.
    """
    kinds = _kinds(kind)
    if [samples is not None, device is not None, measure].count(True) != 1:
        raise ConfigError(
            "expected one of --measure, --samples FILE and --device NAME",
            help="edgewise fit fashion-lite0 --measure --out fashion-lite0.predictor.npz",
        )
    facts: dict[str, object] = {}
    only_language = {
        "--precision": precision,
        "--head": head,
        "--exits": exits,
        "--exits-file": exits_file,
    }
    if not measure or (model is not None and not is_language(model)):
        refuse_without_language(only_language)
    if measure:
        options = LanguageOptions.read(
            precision=precision, head=head, exits=exits, exits_file=exits_file
        )
        program = _program(model, options, backend=backend, threads=threads)
        measured, facts = _measured(program, seed=seed)
        if keep_samples is not None:
            save_samples(measured, keep_samples)
        profiled = _some_of(measured, states=states, seed=seed)
    else:
        with stderr_console().status("reading samples"):
            profiled = _profiled(samples, device, work or model, states=states, seed=seed)
    with stderr_console().status(f"fitting {', '.join(kinds)}"):
        comparison = cross_validate(
            profiled.samples, kinds=kinds, folds=folds, level=level, seed=seed
        )
        choice = choose(comparison) if kind == "auto" else _asked_for(kind)
        fitted = _fit(
            choice.kind, profiled, comparison, facts={"model": model or work, **facts}, seed=seed
        )
    if out is not None:
        fitted.save(out)
    found = summary(profiled, comparison, choice, fitted, out=out)
    if as_json:
        emit_json(found)
    else:
        show(found)


def summary(
    profiled: Profiled,
    comparison: Comparison,
    choice: Choice,
    fitted: FittedPredictor,
    *,
    out: Path | None,
) -> dict[str, Any]:
    """Summarise: what ``edgewise fit --json`` prints."""
    rest = None if profiled.rest is None else evaluate(fitted, profiled.rest)
    return {
        "provenance": profiled.samples.provenance,
        "states": profiled.samples.num_states,
        "states_to_choose_from": profiled.num_all,
        "profiling_s": profiled.samples.elapsed_s,
        "profiling_saved_s": profiled.saved_s,
        "features": comparison.features,
        "left_out": comparison.left_out,
        "level": comparison.level,
        "folds": comparison.num_folds,
        "kinds": [
            {
                "kind": score.kind,
                **score.groups,
                "pinball_s": score.mean_pinball_s,
                "coverage_ratio": score.coverage_ratio,
                "num_bytes": score.num_bytes,
                "fit_s": score.fit_s,
            }
            for score in comparison.scores
        ],
        "skipped": comparison.skipped,
        "chosen": choice.kind,
        "reason": choice.reason,
        "predictor_bytes": fitted.num_bytes,
        "energy": fitted.energy is not None,
        "states_not_used": None
        if profiled.rest is None
        else {"states": profiled.rest.num_states, **(rest or {})},
        "out": out,
    }


def show(found: Mapping[str, Any]) -> None:
    """Print a summary for people."""
    from rich.table import Table

    console = stdout_console()
    console.print(
        f"{found['states']} of {found['states_to_choose_from']} states, {found['provenance']};"
        f" {found['folds']} folds, no state in two; upper bound at {found['level']:.0%}"
    )
    table = Table()
    table.add_column("kind")
    for name in (
        "MAPE stage",
        "head",
        "P95 APE stage",
        "head",
        "pinball",
        "covered",
        "size",
        "fit",
    ):
        table.add_column(name, justify="right")
    for score in found["kinds"]:
        table.add_row(
            score["kind"],
            *(_percent(score, group, "mape_ratio") for group in ("stage", "head")),
            *(_percent(score, group, "p95_ape_ratio") for group in ("stage", "head")),
            format_duration(score["pinball_s"]),
            f"{score['coverage_ratio']:.1%}",
            format_bytes(score["num_bytes"]),
            format_duration(score["fit_s"]),
        )
    console.print(table)
    for name, reason in found["skipped"].items():
        console.print(f"{name} was skipped: {reason}", soft_wrap=True)
    console.print(f"chosen: {found['chosen']}; {found['reason']}", soft_wrap=True)
    console.print(f"reads {', '.join(found['features']) or 'nothing of the state'}", soft_wrap=True)
    for name, reason in found["left_out"].items():
        console.print(f"does not read {name}: {reason}", soft_wrap=True)
    if found["states_not_used"] is not None:
        unused = found["states_not_used"]
        console.print(
            f"in the {unused['states']} states not used: MAPE"
            f" {_percent(unused, 'stage', 'mape_ratio')} stage,"
            f" {_percent(unused, 'head', 'mape_ratio')} head",
            soft_wrap=True,
        )
    if found["profiling_saved_s"]:
        console.print(
            f"profiling took {found['profiling_s'] / 3600:.2f} h and saved"
            f" {found['profiling_saved_s'] / 3600:.2f} h ({found['provenance']})"
        )
    if found["out"] is not None:
        size = format_bytes(found["predictor_bytes"])
        console.print(f"written to {found['out']} ({size} of parameters)", soft_wrap=True)


def parse_states(text: str, num_all: int) -> int:
    """Read how many states are asked for.

    Example:
        >>> parse_states("10%", 500), parse_states("20", 500)
        (50, 20)

    Raises:
        ConfigError: Neither a count nor a share, or out of range.
    """
    try:
        share = text.endswith("%")
        wanted = float(text[:-1]) / 100 * num_all if share else int(text)
    except ValueError:
        wanted = math.nan
    if not 1 <= wanted <= num_all:
        raise ConfigError(
            f"expected a count of states from 1 to {num_all}, or a share such as 10%, found"
            f" {text!r}",
            help="--states 10%",
        )
    return max(2, math.ceil(wanted - 1e-9)) if num_all > 1 else 1


def _kinds(kind: str) -> tuple[str, ...]:
    known = predictor_kinds()
    if kind != "auto" and kind not in known:
        raise ConfigError(
            f"unknown kind of predictor {kind!r}", help=nearest_names(kind, ["auto", *known])
        )
    return known if kind == "auto" else (kind,)


def _asked_for(kind: str) -> Choice:
    return Choice(kind=kind, reason="asked for with --kind")


def _profiled(
    path: Path | None, device: str | None, work: str | None, *, states: str, seed: int
) -> Profiled:
    if path is not None:
        return _some_of(load_samples(path), states=states, seed=seed)
    if work is None:
        raise ConfigError(
            "a simulated device needs to know what runs on it",
            help=f"edgewise fit --device {device} --work resnet50",
        )
    return _simulated(str(device), work, states=states, seed=seed)


def _program(model: str | None, options: LanguageOptions, *, backend: str, threads: int) -> Program:
    """What is measured: a model, or a token of a language model."""
    if model is None:
        raise ConfigError("what is to be measured?", help="edgewise fit fashion-lite0 --measure")
    if is_language(model):
        from edgewise.runtime.generation.costs import probe_programs

        with stderr_console().status(f"loading {model}"):
            decoder = options.open(
                model, backend=None if backend == "auto" else backend, threads=threads
            )
        # The first is a token after a short text, its early exits filling the deeper layers.
        return next(iter(probe_programs(decoder, head=decoder.exit_head(options.head)).values()))
    from edgewise.api import best_backend
    from edgewise.backends import load_program
    from edgewise.backends.registry import full_name
    from edgewise.frontends.checkpoint import load_model

    check_known(model)
    name = best_backend() if backend == "auto" else full_name(backend)
    return load_program(load_model(model), name, threads=threads)


def _measured(program: Program, *, seed: int) -> tuple[StateSamples, dict[str, object]]:
    from edgewise.api import predictor_facts
    from edgewise.bench.state_campaign import measure_this_machine

    name = program.model.name
    console = stderr_console()
    with console.status(f"measuring {name}") as status:

        def say(text: str) -> None:
            status.update(f"measuring {name}: {text}")
            if not text.startswith("state "):
                console.print(text, soft_wrap=True)

        samples = measure_this_machine(program, seed=seed, say=say)
    return samples, predictor_facts(program)


def _some_of(samples: StateSamples, *, states: str, seed: int) -> Profiled:
    count = parse_states(states, samples.num_states)
    if count == samples.num_states:
        return Profiled(samples=samples, choice=None, rest=None, num_all=count, saved_s=0.0)
    choice = _chosen(samples.features, samples.states, count, seed=seed)
    whole_s = samples.elapsed_s
    some = replace(
        samples.take(choice.rows),
        elapsed_s=None if whole_s is None else whole_s * count / samples.num_states,
    )
    return Profiled(
        samples=some,
        choice=choice,
        rest=samples.take(np.setdiff1d(np.arange(samples.num_states), choice.rows)),
        num_all=samples.num_states,
        saved_s=saved_s(some, samples.num_states),
    )


def _chosen(
    features: tuple[str, ...], states: npt.NDArray[np.float64], count: int, *, seed: int
) -> StateChoice:
    """Choose by the columns that are known everywhere."""
    known = [k for k, column in enumerate(states.T) if np.isfinite(column).all()]
    return choose_states(
        states[:, known], features=tuple(features[k] for k in known), count=count, seed=seed
    )


def _simulated(device: str, work: str, *, states: str, seed: int) -> Profiled:
    from edgewise.device.simulated import load_device, load_work, run_campaign

    model, units = load_device(device), load_work(work)
    everything = run_campaign(model, units, seed=seed)
    found = _some_of(StateSamples.simulated(everything), states=states, seed=seed)
    if found.choice is None:
        return found
    # The states chosen are not the quickest ones: their own time, not their share of all.
    own_s = run_campaign(
        model, units, seed=seed, states=everything.states[found.choice.rows]
    ).elapsed_s
    return replace(
        found,
        samples=replace(found.samples, elapsed_s=own_s),
        saved_s=everything.elapsed_s - own_s,
    )


def _fit(
    kind: str,
    profiled: Profiled,
    comparison: Comparison,
    *,
    facts: Mapping[str, object],
    seed: int,
) -> FittedPredictor:
    samples, calibration = profiled.samples, None
    if profiled.choice is not None:
        first = len(profiled.choice.fit)
        calibration = samples.take(np.arange(first, samples.num_states))
        samples = samples.take(np.arange(first))
    score = next(score for score in comparison.scores if score.kind == kind)
    return fit_kind(
        kind,
        samples,
        calibration=calibration,
        level=comparison.level,
        seed=seed,
        coverage=score.coverage_ratio,
        facts={
            **facts,
            "cross_validation": {name: _plain(errors) for name, errors in score.groups.items()},
            "num_states_to_choose_from": profiled.num_all,
            "profiling_s": profiled.samples.elapsed_s,
        },
    )


def _plain(errors: Errors) -> dict[str, float]:
    return dataclasses.asdict(errors)


def _percent(score: Mapping[str, Any], group: str, name: str) -> str:
    errors = score.get(group)
    return "–" if errors is None else f"{getattr(errors, name):.2%}"
