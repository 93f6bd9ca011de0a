"""``edgewise dispatch run``: a mixed plan run for real, beside what it competes with."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from edgewise.cli.dispatch.trace import read_lengths
from edgewise.cli.output import emit_json, stderr_console, stdout_console
from edgewise.errors import ConfigError, ProfileError

if TYPE_CHECKING:
    from rich.console import Console

    from edgewise.bench.dispatch_runs import Integrated, PassResult
    from edgewise.dispatch.plan import DispatchPlan
    from edgewise.dispatch.problem import Objective
    from edgewise.dispatch.trace import Trace
    from edgewise.model.transformer import Architecture
    from edgewise.profiles.operators import OperatorTable
    from edgewise.profiles.records import ThreadPolicy


def run(
    model: Annotated[
        str,
        typer.Argument(
            help="A name that is known: its architecture with random weights. Or a local folder of"
            " transformers, with its own weights."
        ),
    ] = "smollm2-135m",
    *,
    plan: Annotated[
        Path | None,
        typer.Option(help="A plan that dispatch plan wrote; else one is made.", show_default=False),
    ] = None,
    table: Annotated[
        str | None,
        typer.Option(
            help="Costs to plan with: a file, or a name that ships. Default: measured here, else"
            " shipped.",
            show_default=False,
        ),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Measure this model's operators first: minutes, but of today."
        ),
    ] = False,
    lengths: Annotated[
        str, typer.Option(help="Prefill lengths in tokens, separated by commas.")
    ] = "16,64,128",
    decode: Annotated[bool, typer.Option(help="Run a decode pass of one token too.")] = True,
    past: Annotated[int, typer.Option(help="Tokens in the cache before the decode pass.")] = 64,
    objective: Annotated[
        str, typer.Option(help="What to make small: latency, energy or edp.")
    ] = "latency",
    segments: Annotated[
        bool, typer.Option(help="Consider several operators compiled as one piece.")
    ] = True,
    rounds: Annotated[int, typer.Option(help="Turns of each contender, at least 2.")] = 5,
    threads: Annotated[int, typer.Option(help="Threads of each call.")] = 1,
    switches: Annotated[bool, typer.Option("--switches", help="List every switch.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object on standard output.")
    ] = False,
) -> None:
    """Run torch, every backend alone, and the plan in turns: predicted against measured."""
    from edgewise.backends.threads import govern
    from edgewise.bench.dispatch_runs import open_contenders, run_integrated
    from edgewise.device import load_between, read_cpu_counters
    from edgewise.dispatch.plan_file import read_plan
    from edgewise.model.transformer import load_architecture

    if rounds < 2:
        raise ConfigError(f"--rounds: expected at least 2, found {rounds}")
    if plan is not None and (table is not None or measure):
        raise ConfigError("--plan has its costs in it", help="leave --table and --measure out")
    policy = govern(threads)
    architecture = load_architecture(model)
    given = None if plan is None else read_plan(plan)
    traces = traces_to_run(architecture, given, read_lengths(lengths), past if decode else None)
    say = stderr_console()
    with say.status("dispatch run") as status:

        def tell(text: str) -> None:
            status.update(f"dispatch run: {text}")

        costs: OperatorTable | None = None
        notes: list[str]
        if given is None:
            costs, notes = find_costs(
                table, traces, policy, measure=measure, segments=segments, say=tell
            )
            given = decide_plan(traces, costs, objective=objective, segments=segments)
        else:
            notes = differences(given, policy)
        tell("building the model")
        built = open_model(model, architecture)
        found = open_contenders(built, architecture, given, table=costs, threads=threads, say=tell)
        before, began_s = read_cpu_counters(), time.perf_counter()
        results = run_integrated(
            found, num_layers=architecture.num_hidden_layers, rounds=rounds, say=tell
        )
    load = load_between(before, read_cpu_counters(), window_s=time.perf_counter() - began_s)
    if load.other_ratio is not None:
        notes.append(f"other processes used {load.other_ratio:.0%} of the machine meanwhile")
    notes += found.notes + notes_on(found)
    if json:
        emit_json(as_json(given, policy, results, notes, found))
    else:
        show(stdout_console(), given, policy, results, notes, list_switches=switches)


def traces_to_run(
    architecture: Architecture,
    plan: DispatchPlan | None,
    lengths: Sequence[int],
    past: int | None,
) -> list[Trace]:
    """The passes of a plan, else those that are asked for.

    Raises:
        ConfigError: There is none.
    """
    from edgewise.bench.dispatch_runs import Pass, passes_of, traces_of

    passes = passes_of(architecture, lengths, past=past)
    if plan is not None:
        passes = [Pass(phase=p.phase, length=p.length, past=p.past) for p in plan.phases]
    if not passes:
        raise ConfigError("nothing to run", help="--lengths 16,128")
    return traces_of(architecture, passes)


def find_costs(
    table: str | None,
    traces: Sequence[Trace],
    policy: ThreadPolicy,
    *,
    measure: bool,
    segments: bool,
    say: Callable[[str], None],
) -> tuple[OperatorTable, list[str]]:
    """A table with every operator of some passes, and what about it does not fit this machine.

    Raises:
        ProfileError: It cannot be read, or is of other threads.
    """
    from edgewise.bench.dispatch_runs import measure_passes
    from edgewise.cli.dispatch.plan import open_table
    from edgewise.device import device_fingerprint
    from edgewise.profiles.operator_file import check_table

    if measure:
        found = measure_passes(traces, threads=policy.threads, segments=segments, say=say)
        return found, []
    found = open_table(table)
    if found.thread_policy.threads != policy.threads:
        raise ProfileError(
            f"table {found.name!r} is for {found.thread_policy.key}, found --threads"
            f" {policy.threads}",
            help=f"--threads {found.thread_policy.threads}, or --measure",
        )
    return found, list(check_table(found, device_id=device_fingerprint().id, thread_policy=policy))


def decide_plan(
    traces: Sequence[Trace], table: OperatorTable, *, objective: str, segments: bool
) -> DispatchPlan:
    """The best plan over the backends that are both in the table and here.

    Raises:
        ConfigError: No such objective.
        ProfileError: The table lacks an operator on all of them.
    """
    from edgewise.backends.operators import operator_backends
    from edgewise.bench.dispatch_runs import plan_for

    here = operator_backends()
    backends = [name for name in table.backends() if name in here]
    return plan_for(
        traces,
        table,
        objective=cast("Objective", objective),  # `decide` refuses others
        segments=segments,
        backends=backends,
    )


def differences(plan: DispatchPlan, policy: ThreadPolicy) -> list[str]:
    """How the situation of a plan differs from this one."""
    from edgewise.device import device_fingerprint

    found = []
    if plan.device_id != device_fingerprint().id:
        found.append(f"the plan's costs are of device {plan.device_id}, not of this one")
    if plan.thread_policy != policy:
        found.append(f"the plan is for {plan.thread_policy.key}, here is {policy.key}")
    return found


def open_model(model: str, architecture: Architecture) -> Any:
    """A local folder with its weights, or an architecture with random ones."""
    from edgewise.runtime.dispatching.build import build_model, open_folder

    folder = Path(model)
    if folder.is_dir() and any(folder.glob("*.safetensors")):
        return open_folder(folder)
    return build_model(architecture)


def notes_on(found: Integrated) -> list[str]:
    """What a reader must know about how the plan ran."""
    fallbacks = found.dispatched["plan"].fallbacks
    return [f"{count} calls ran without a plan: {why}" for why, count in fallbacks.items()]


def as_json(
    plan: DispatchPlan,
    policy: ThreadPolicy,
    results: Sequence[PassResult],
    notes: Sequence[str],
    found: Integrated,
) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {
        "model": plan.model,
        "objective": plan.objective,
        "method": plan.method,
        "table": plan.table,
        "provenance": {"predicted": _label(plan), "measured": "measured"},
        "thread_policy": policy,
        "weight_copies_bytes": {name: d.weight_bytes for name, d in found.dispatched.items()},
        "passes": [
            {
                "pass": r.what.what,
                "times": r.times,
                "predicted_s": r.predicted_s,
                "predicted_over_measured": {
                    name: s / r.times[name].median_s for name, s in r.predicted_s.items()
                },
                "plan_over_torch_eager": r.ratio("torch eager"),
                "best_static": r.best_static,
                "plan_over_best_static": r.ratio(r.best_static),
                "rest": r.rest,
                "classes": r.classes,
                "switches": r.switches,
                "largest_deviation": _deviation(r),
            }
            for r in results
        ],
        "notes": list(notes),
    }


def _label(plan: DispatchPlan) -> str:
    """Predicted numbers are computed; from what, the table says."""
    return f"estimated from a table that is {plan.provenance}"


def _deviation(result: PassResult) -> float | None:
    return result.times["plan"].deviation


# --- what a person sees ----------------------------------------------------------------------


def show(
    out: Console,
    plan: DispatchPlan,
    policy: ThreadPolicy,
    results: Sequence[PassResult],
    notes: Sequence[str],
    *,
    list_switches: bool,
) -> None:
    """Print an integrated run."""
    from edgewise.units import format_duration

    out.print(
        f"{plan.model}: plan {plan.method} for {plan.objective}, table {plan.table}"
        f" ({plan.provenance}); {policy.key}; batch 1",
        soft_wrap=True,
    )
    for result in results:
        _show_times(out, result)
        _show_classes(out, result)
        many = len(result.switches)
        out.print(f"{many} switches" + (":" if list_switches and many else ""), soft_wrap=True)
        if list_switches:
            for line in result.switches:
                out.print(f"  {line}", soft_wrap=True)
        deviation = _deviation(result)
        if deviation is not None:
            out.print(f"largest deviation from torch: {deviation:.1e} of its largest logit")
        rest = result.rest
        out.print(
            "rest (attention, RoPE, adds and Python of transformers, measured on torch):"
            f" {format_duration(rest.layers_s)} in layers, {format_duration(rest.mlps_s)} in MLPs,"
            f" {format_duration(rest.outside_s)} outside",
            soft_wrap=True,
        )
    for note in notes:
        out.print(f"note: {note}", soft_wrap=True)


def _show_times(out: Console, result: PassResult) -> None:
    from edgewise.cli.place import plain_table, print_table
    from edgewise.units import format_duration

    table = plain_table(result.what.what)
    table.add_column("runs on", no_wrap=True)
    for name in ("measured", "95 % interval", "estimated", "estimated /\nmeasured", "over\neager"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, seen in sorted(result.times.items(), key=lambda item: item[1].median_s):
        predicted_s = result.predicted_s.get(name)
        ratio = result.ratio("torch eager", of=name)
        table.add_row(
            name,
            format_duration(seen.median_s),
            f"{format_duration(seen.low_s)} to {format_duration(seen.high_s)}",
            "–" if predicted_s is None else format_duration(predicted_s),
            "–" if predicted_s is None else f"{predicted_s / seen.median_s:.2f}",
            "–" if ratio is None else f"{ratio:.2f}",
        )
    ratio = result.ratio(result.best_static)
    said = "–" if ratio is None else f"{ratio:.3f}"
    print_table(out, table, f"plan over {result.best_static}, the best alone: {said}")


def _show_classes(out: Console, result: PassResult) -> None:
    from edgewise.cli.place import plain_table, print_table
    from edgewise.units import format_duration

    table = plain_table("the plan's operators")
    for name in ("class", "runs on"):
        table.add_column(name, no_wrap=True)
    for name in ("steps", "estimated", "measured"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in result.classes:
        table.add_row(
            each.kind,
            each.backend,
            str(each.steps),
            format_duration(each.predicted_s),
            format_duration(each.measured_s),
        )
    print_table(out, table, "measured here with a clock around each, in a run of its own")
