"""``edgewise dispatch plan``: who runs each operator of a transformer, what that gives, and why."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgewise.cli.dispatch.trace import read_lengths, trace_passes
from edgewise.cli.output import emit_json, stderr_console, stdout_console, to_plain
from edgewise.cli.place import plain_table, print_table
from edgewise.units import format_bytes, format_duration

if TYPE_CHECKING:
    from rich.console import Console

    from edgewise.dispatch.assemble import Choice
    from edgewise.dispatch.explain import Row
    from edgewise.dispatch.plan import DispatchPlan, PhasePlan, Reason
    from edgewise.dispatch.problem import Objective, Problem
    from edgewise.dispatch.trace import Trace
    from edgewise.profiles.operators import OperatorTable


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A name that is known, a config.json or its folder.", show_default=False
        ),
    ],
    *,
    table: Annotated[
        str | None,
        typer.Option(
            help="Costs: a file, or a name that ships. Default: measured here, else shipped.",
            show_default=False,
        ),
    ] = None,
    objective: Annotated[
        str, typer.Option(help="What to make small: latency, energy or edp.")
    ] = "latency",
    method: Annotated[
        str, typer.Option(help="best, viterbi, greedy, local, static, or static:BACKEND.")
    ] = "best",
    backends: Annotated[
        str | None,
        typer.Option(help="Which may be used: a,b. Default: all in the table.", show_default=False),
    ] = None,
    lengths: Annotated[
        str, typer.Option(help="Prefill lengths in tokens, separated by commas.")
    ] = "16,128",
    decode: Annotated[
        bool, typer.Option("--decode", help="Add a decode pass of one token.")
    ] = False,
    past: Annotated[int, typer.Option(help="Tokens in the cache before the decode pass.")] = 0,
    segments: Annotated[
        bool, typer.Option(help="Consider several operators compiled as one piece.")
    ] = True,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Copies of weights that backends may keep, over all passes: '200 MB'.",
            show_default=False,
        ),
    ] = None,
    cap: Annotated[
        str | None, typer.Option(help="Time that no pass may exceed: '40 ms'.", show_default=False)
    ] = None,
    dag: Annotated[
        bool,
        typer.Option("--dag", help="Count switches by tensor, on the real data flow; no segments."),
    ] = False,
    guard: Annotated[
        bool,
        typer.Option(help="Take the best single backend where the gain is not beyond doubt."),
    ] = True,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say for each kind of operator why, and by how much.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write the plan here, for dispatch run --plan.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object on standard output.")
    ] = False,
) -> None:
    """Choose a backend for each operator, switching counted, and compare with each backend alone.

    Exit code 5 where no plan is within --cap or --memory.
    """
    from edgewise.device import device_fingerprint
    from edgewise.dispatch.explain import explain_phase
    from edgewise.dispatch.plan_file import plan_to_json, write_plan
    from edgewise.dispatch.validity import check_plan
    from edgewise.model.transformer import load_architecture

    request = read_request(
        objective=objective, method=method, segments=segments, memory=memory, cap=cap, dag=dag
    )
    request = dataclasses.replace(request, guard=guard)
    costs = open_table(table)
    traces = trace_passes(load_architecture(model), read_lengths(lengths), decode=decode, past=past)
    names = [name.strip() for name in backends.split(",")] if backends is not None else None
    made = plan_passes(traces, costs, request, backends=names)
    checked = check_plan(
        made.plan, traces, backends=made.plan.backends, device_id=device_fingerprint().id
    )
    if json:
        rows = [explain_phase(phase, made.plan.objective) for phase in made.plan.phases]
        emit_json(
            {
                "plan": plan_to_json(made.plan),
                "explanation": to_plain(rows),
                "notes": [*made.notes, *checked.warnings],
            }
        )
    else:
        _show(stdout_console(), made, costs, checked.warnings, explain=explain)
    if out is not None:
        write_plan(made.plan, out)
        stderr_console().print(f"plan: {out}", soft_wrap=True)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked for.

    Attributes:
        objective: What to make small.
        method: How.
        segments: Whether several operators may be one piece.
        memory_bytes: Limit of copies of weights; ``None`` for none.
        cap_s: Limit of each pass's time; ``None`` for none.
        dag: Count switches by tensor.
        guard: Take the best single backend where the gain is not beyond doubt.
    """

    objective: Objective
    method: str = "best"
    segments: bool = True
    memory_bytes: float | None = None
    cap_s: float | None = None
    dag: bool = False
    guard: bool = True

    @property
    def limited(self) -> bool:
        """Whether there is a limit."""
        return self.memory_bytes is not None or self.cap_s is not None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan, and what is to be said with it."""

    plan: DispatchPlan
    notes: tuple[str, ...]


def read_request(
    *, objective: str, method: str, segments: bool, memory: str | None, cap: str | None, dag: bool
) -> Request:
    """Check what the options ask for.

    Raises:
        ConfigError: An option is wrong, or two do not go together.
    """
    from edgewise.dispatch.problem import OBJECTIVES
    from edgewise.errors import ConfigError, nearest_names
    from edgewise.units import parse_duration_s

    for known in OBJECTIVES:
        if known == objective:
            break
    else:
        raise ConfigError(f"no objective {objective!r}; {nearest_names(objective, OBJECTIVES)}")
    if dag and (memory or cap or objective == "edp" or method != "best"):
        raise ConfigError(
            "--dag finds the least latency or energy, without --memory, --cap or --method",
            help="leave out --dag, or the others",
        )
    if memory and cap:
        raise ConfigError(
            "--memory is over all passes and --cap for each, so give one of them",
            help="edgewise dispatch plan --help",
        )
    return Request(
        objective=known,
        method=method,
        segments=segments and not dag,
        memory_bytes=None if memory is None else read_bytes(memory),
        cap_s=None if cap is None else parse_duration_s(cap),
        dag=dag,
    )


def read_bytes(text: str) -> float:
    """Read a size: ``200 MB`` (10**6), ``1 GiB`` (2**30), ``5000``.

    Raises:
        ConfigError: It is none.

    Example:
        >>> read_bytes("200 MB"), read_bytes("1.5GiB"), read_bytes("0")
        (200000000.0, 1610612736.0, 0.0)
    """
    import re

    from edgewise.errors import ConfigError

    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([kKMG]?)(i?)B)?\s*", text)
    if found is None or (found[3] and not found[2]):
        raise ConfigError(f"--memory: expected a size, found {text!r}", help="--memory '200 MB'")
    power = " KMG".index((found[2] or " ").upper())
    return float(float(found[1]) * (1024 if found[3] else 1000) ** power)


def open_table(name: str | None) -> OperatorTable:
    """The table that is named, else this device's own, else one that ships.

    Raises:
        ProfileError: There is none, or it cannot be read.
    """
    from edgewise.profiles.operator_tables import default_operator_table, load_operator_table

    return default_operator_table() if name is None else load_operator_table(name)


def plan_passes(
    traces: Sequence[Trace],
    table: OperatorTable,
    request: Request,
    *,
    backends: Sequence[str] | None = None,
) -> Planned:
    """Decide for every forward pass, and make one plan.

    Raises:
        ConfigError, ProfileError, Infeasible: As what decides.
    """
    from edgewise.dispatch.assemble import make_plan
    from edgewise.dispatch.problem import build_problem

    problems = [
        build_problem([trace], table, backends=backends, segments=request.segments)
        for trace in traces
    ]
    notes: list[str] = []
    choices: Sequence[Choice]
    reasons: list[Reason] = ["constraint" if request.limited else "method"] * len(problems)
    if request.dag:
        choices = _by_tensor(problems, table, request, notes)
    elif request.memory_bytes is not None:
        choices = _within_memory(problems, table, request, notes)
    else:
        choices = _one_by_one(problems, table, request, notes, reasons)
    made = make_plan(
        list(zip(problems, choices, strict=True)),
        table,
        model=traces[0].model,
        objective=request.objective,
        method="residency" if request.dag else request.method,
        because=reasons,
        notes={"switches": "by tensor" if request.dag else "between neighbours"},
    )
    if missing := _not_measured(traces, table):
        notes.append(f"not measured, counted as nothing: {missing}")
    return Planned(plan=made, notes=tuple(notes))


def _not_measured(traces: Sequence[Trace], table: OperatorTable) -> str:
    """Kinds of operators that stay on torch and have no cost in the table."""
    from edgewise.dispatch.problem import HOME

    fixed = {n.shape for trace in traces for n in trace.nodes if not n.supported}
    return ", ".join(sorted({s.kind for s in fixed if (s, HOME) not in table.costs}))


def _one_by_one(
    problems: Sequence[Problem],
    table: OperatorTable,
    request: Request,
    notes: list[str],
    reasons: list[Reason],
) -> Sequence[Choice]:
    from edgewise.dispatch.guard import guard
    from edgewise.dispatch.search import decide

    found = [
        decide(p, objective=request.objective, method=request.method, cap_s=request.cap_s)
        for p in problems
    ]
    # A single backend need not be within a limit; and it needs no guard against itself.
    if request.guard and not request.limited and not request.method.startswith("static"):
        for i, problem in enumerate(problems):
            word = guard(problem, found[i], table, objective=request.objective)
            what = problem.traces[0].what
            low, gain, high = word.low_ratio, word.gain_ratio, word.high_ratio
            # Both ends are one where the table has no intervals: then nothing is sure.
            if word.kept and None not in {low, gain, high} and low != high:
                notes.append(f"guard: {what} saves {gain:.1%}, surely {low:.1%} or more: kept")
            else:
                kept = "kept" if word.kept else f"so {word.decision.method}"
                notes.append(f"guard: {what}: {word.reason}: {kept}")
            if not word.kept:
                found[i], reasons[i] = word.decision, "guard"
    if "guard" in reasons:
        return found  # what is exact was not taken
    if all(decision.exact for decision in found):
        notes.append("exact: no plan of this kind costs less")
    elif any(decision.lower_bound > 0 for decision in found):
        worst = max(decision.gap_ratio for decision in found)
        notes.append(f"within {100 * worst:.2g} % of the bound")
    return found


def _within_memory(
    problems: Sequence[Problem], table: OperatorTable, request: Request, notes: list[str]
) -> Sequence[Choice]:
    """Decide for all passes at once, since they share the memory; then take them apart."""
    from edgewise.dispatch.memory import kept_bytes
    from edgewise.dispatch.problem import Assignment, build_problem
    from edgewise.dispatch.search import decide

    joint = build_problem(
        [p.traces[0] for p in problems],
        table,
        backends=problems[0].backends,
        segments=request.segments,
    )
    decision = decide(
        joint,
        objective=request.objective,
        method=request.method,
        memory_bytes=request.memory_bytes,
    )
    kept = format_bytes(kept_bytes(joint, decision.assignment))
    notes.append(
        f"copies of weights {kept} of {format_bytes(request.memory_bytes)}, over all passes"
    )
    if not decision.exact:
        notes.append(f"within {100 * decision.gap_ratio:.2g} % of the bound")
    ends = [*joint.begins[1:], joint.num_operators]
    found = []
    for i, (p, begin, end) in enumerate(zip(problems, joint.begins, ends, strict=True)):
        wanted = {
            joint.segments[n].candidate[1]
            for n in decision.assignment.segments
            if joint.segments[n].candidate[0] == i
        }
        numbers = tuple(n for n, s in enumerate(p.segments) if s.candidate[1] in wanted)
        backend = decision.assignment.backend[begin:end]
        found.append(Assignment(backend=backend, segments=numbers))
    return found


def _by_tensor(
    problems: Sequence[Problem], table: OperatorTable, request: Request, notes: list[str]
) -> Sequence[Choice]:
    from edgewise.dispatch.residency import evaluate_residency, solve_residency
    from edgewise.dispatch.search import decide

    assert request.objective != "edp"  # noqa: S101 - the request was checked
    found = []
    for p in problems:
        trace = p.traces[0]
        best = solve_residency(trace, table, backends=p.backends, objective=request.objective)
        chain = decide(p, objective=request.objective, method="viterbi").assignment.backend
        counted = evaluate_residency(
            trace, table, [p.backends[b] for b in chain.tolist()], objective=request.objective
        )
        more = 100 * (counted.cost / best.cost - 1)
        notes.append(
            f"{trace.what}: {len(best.copies)} tensors are copied,"
            f" {format_bytes(sum(c.size_bytes for c in best.copies))} in"
            f" {format_duration(best.copy_s)}; the best chain, counted so, costs {more:.2g} % more"
        )
        found.append(best)
    return found


# --- what a person sees --------------------------------------------------------------------------


def _show(
    out: Console,
    made: Planned,
    table: OperatorTable,
    warnings: Sequence[str],
    *,
    explain: bool,
) -> None:
    plan = made.plan
    out.print(
        f"{plan.model}: objective {plan.objective}, method {plan.method}; costs {plan.table}"
        f" ({plan.provenance}, {plan.state}, {plan.thread_policy.key})",
        soft_wrap=True,
    )
    for warning in warnings:
        out.print(f"note: {warning}", soft_wrap=True)
    if excluded := len(table.excluded()):
        out.print(
            f"note: {excluded} rows of the table are not used: failed or wrong answers",
            soft_wrap=True,
        )
    _show_totals(out, plan)
    for note in made.notes:
        out.print(note, soft_wrap=True, style="dim")
    for phase in plan.phases:
        if explain:
            _show_reasons(out, phase, plan)
        else:
            out.print(f"{phase.what}: {say_mix(phase)}", soft_wrap=True)


def _show_totals(out: Console, plan: DispatchPlan) -> None:
    unit = {"latency": "time", "energy": "energy", "edp": "energy × time"}[plan.objective]
    table = plain_table(f"predicted {unit} of one pass")
    table.add_column("pass", no_wrap=True)
    table.add_column("plan", justify="right", no_wrap=True)
    for name in short_names(plan.backends).values():
        table.add_column(name.replace(":", ":\n"), justify="right", no_wrap=True)
    for name in ("saves", "switches"):
        table.add_column(name, justify="right", no_wrap=True)
    for phase in plan.phases:
        alone = static_values(phase, plan.objective)
        own = value_of(plan.objective, phase.predicted_s, phase.predicted_j)
        best = alone.get(phase.best_static)
        table.add_row(
            phase.what.replace(", ", ",\n"),
            say_value(plan.objective, own),
            *(say_value(plan.objective, alone.get(name)) for name in plan.backends),
            "–" if best is None or not best or own is None else f"{100 * (1 - own / best):+.1f} %",
            f"{phase.switches}: {format_duration(phase.switch_s)}",
        )
    print_table(out, table, "saves: against the best single backend, one operator at a time")


def value_of(objective: Objective, seconds: float, joules: float | None) -> float | None:
    """What an objective makes small; ``None`` where energy is not known."""
    if objective == "latency":
        return seconds
    return None if joules is None else joules if objective == "energy" else joules * seconds


def static_values(phase: PhasePlan, objective: Objective) -> Mapping[str, float]:
    """What each backend alone is predicted to come to, in the objective's unit."""
    found = {
        name: value_of(objective, seconds, phase.static_j.get(name))
        for name, seconds in phase.static_s.items()
    }
    return {name: value for name, value in found.items() if value is not None}


def say_value(objective: Objective, value: float | None) -> str:
    """Write a value of an objective for people.

    Example:
        >>> say_value("latency", 0.0123), say_value("energy", 0.5), say_value("edp", None)
        ('12.3 ms', '0.5 J', '–')
    """
    if value is None or not math.isfinite(value):
        return "–"
    return format_duration(value) if objective == "latency" else _with_prefix(value, objective)


def _with_prefix(value: float, objective: Objective) -> str:
    unit = "J" if objective == "energy" else "J·s"
    for prefix, scale in (("", 1.0), ("m", 1e-3), ("µ", 1e-6)):
        if value >= 0.1 * scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def short_names(backends: Sequence[str]) -> dict[str, str]:
    """Backends without their device, where that leaves them distinct.

    Example:
        >>> short_names(["torch:cpu", "openvino:CPU"])
        {'torch:cpu': 'torch', 'openvino:CPU': 'openvino'}
    """
    runtimes = Counter(name.partition(":")[0] for name in backends)
    return {
        name: runtime if runtimes[runtime := name.partition(":")[0]] == 1 else name
        for name in backends
    }


def say_mix(phase: PhasePlan) -> str:
    """How many pieces of which kind each backend runs."""
    kinds: dict[str, Counter[str]] = {}
    for step in phase.steps:
        kinds.setdefault(step.backend, Counter())[step.kind] += 1
    order = sorted(kinds, key=lambda name: -kinds[name].total())
    return "; ".join(
        f"{name} {', '.join(f'{number} {kind}' for kind, number in kinds[name].most_common())}"
        for name in order
    )


def _show_reasons(out: Console, phase: PhasePlan, plan: DispatchPlan) -> None:
    from edgewise.dispatch.explain import explain_phase

    short = short_names(plan.backends)
    table = plain_table(f"why: {phase.what}")
    table.add_column("piece", overflow="fold")
    table.add_column("×", justify="right", no_wrap=True)
    table.add_column("backend", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("next best, alone", no_wrap=True)
    table.add_column("why", overflow="fold")
    for row in explain_phase(phase, plan.objective):
        table.add_row(
            _say_piece(row),
            str(row.count),
            short[row.backend],
            format_duration(row.predicted_s),
            "–" if row.best_other is None else f"{short[row.best_other]} {_by(row.margin_ratio)}",
            row.reason if row.one_by_one_s is None else f"{row.reason}; {_singly(row)}",
        )
    print_table(
        out,
        table,
        f"all of a kind together; switches {format_duration(phase.switch_s)},"
        f" what stays on torch {format_duration(phase.fixed_s)}",
        *(
            ["saves a switch: the other is cheaper alone, but not with the switches to it"]
            if any(step.reason == "saves a switch" for step in phase.steps)
            else []
        ),
    )


def _say_piece(row: Row) -> str:
    name = row.name.removeprefix("model.layers.*.").removeprefix("model.")
    if row.one_by_one_s is None:
        return name
    return row.kind if name in {"layers.*", row.kind} else f"{row.kind} {name}"


def _by(ratio: float | None) -> str:
    return "" if ratio is None else f"{100 * ratio:+.1f} %"


def _singly(row: Row) -> str:
    """What a segment's operators cost one by one, against it."""
    if row.one_by_one_s is None or row.predicted_s <= 0:
        return ""
    return f"one by one {_by(row.one_by_one_s / row.predicted_s - 1)}"
