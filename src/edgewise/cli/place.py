"""``edgewise place``: who runs where, what that is predicted to give, and what else would."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgewise.cli.output import emit_json, stderr_console, stdout_console, to_plain

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from edgewise.placement.explain import Explanation, RateCurve
    from edgewise.placement.plan import Placement, Share
    from edgewise.placement.problem import Problem
    from edgewise.placement.workload import Workload
    from edgewise.profiles.partition import PartitionProfile
    from edgewise.report.chart import Chart


def place(
    workload: Annotated[
        Path, typer.Argument(help="TOML file with a device and its tenants.", show_default=False)
    ],
    *,
    method: Annotated[
        str, typer.Option(help="How to search: best, or a method that the output compares.")
    ] = "best",
    rates: Annotated[
        str | None,
        typer.Option(
            help="Requests per second in place of the file's: door=3,yard=5.", show_default=False
        ),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Say why there, at which rates elsewhere, and what binds."),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write the plan here, for run-workload --plan.")
    ] = None,
    figure: Annotated[
        Path | None,
        typer.Option(
            help="Draw mean response over rate, a line for each place: .png, .svg or .pdf."
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object on standard output.")
    ] = False,
) -> None:
    """Choose how much of every model runs on the accelerator, and who gets which cores.

    Exit code 5 where no plan can keep up; the closest one is shown.
    """
    from edgewise.errors import Infeasible
    from edgewise.placement.explain import explain as explain_plan
    from edgewise.placement.search import overloads
    from edgewise.placement.workload import load_workload
    from edgewise.report.curves import check_figure_path

    if figure is not None:
        check_figure_path(figure)
    found = load_workload(workload)
    instead = read_rates(rates)
    rates_per_s = found.rates_per_s(instead=instead)
    found, _ = count_exits(
        found, functools.partial(plan_workload, rates_per_s=rates_per_s, method=method)
    )
    trouble: Infeasible | None = None
    try:
        problem, plan = plan_workload(found, rates_per_s=rates_per_s, method=method)
    except Infeasible as error:
        trouble = error
        problem, plan = closest_of(error, found, rates_per_s)
    others = alternatives(found, rates_per_s, plan)
    phases = [] if instead else plan_phases(found, method)
    explanation = explain_plan(problem, plan, methods=()) if explain and plan.stable else None
    curves = rate_curves(problem, plan) if explain and plan.stable else []
    if json:
        emit_json(_as_json(found, plan, others, phases, explanation, curves))
    else:
        console = stdout_console()
        show_plan(console, found, plan)
        _show_others(console, [t.name for t in found.tenants], plan, others)
        _show_phases(console, found, phases)
        if explanation is not None:
            _show_reasons(console, explanation, curves)
        if explain:
            why_not = {
                p.method: "; ".join((*p.notes, *overloads(problem, p)))
                for p in others
                if not p.stable
            }
            for name, why in why_not.items():
                console.print(f"why not {name}: {why}", soft_wrap=True)
    if trouble is not None:
        raise trouble
    _write_files(found, problem, plan, out=out, figure=figure)


def count_exits(
    workload: Workload, search: Callable[[Workload], tuple[Problem, Placement]]
) -> tuple[Workload, dict[str, Any]]:
    """Have the planner count what early exits save, with costs that are measured where needed.

    Args:
        workload: Its tenants with ``exits`` are loaded.
        search: Plans for a workload.

    Returns:
        The workload with what is left of their suffixes, and their models by tenant.

    Raises:
        ConfigError: A model has no exits.
        BackendError: A model cannot be loaded.
    """
    tenants = [t for t in workload.tenants if t.exits]
    if not tenants:
        return workload, {}
    from edgewise.bench.staged_tenants import open_with_exits, with_exits
    from edgewise.cli.demo import measuring

    say = stderr_console()
    models: dict[str, Any] = {}
    for tenant in tenants:
        with measuring(say, f"costs of {tenant.name}") as on_progress:
            models[tenant.name] = open_with_exits(tenant, on_progress=on_progress)
    with say.status("counting what early exits save"):
        return with_exits(workload, models, search), models


def read_rates(text: str | None) -> dict[str, float]:
    """Read ``a=3,b=5``.

    Raises:
        ConfigError: A part is not NAME=NUMBER, or the number not above zero.
    """
    from edgewise.errors import ConfigError

    found: dict[str, float] = {}
    for part in (text or "").split(","):
        if not part.strip():
            continue
        name, _, number = part.partition("=")
        try:
            rate = float(number)
        except ValueError:
            rate = 0.0
        if not (name.strip() and 0 < rate < float("inf")):
            raise ConfigError(
                f"--rates: expected NAME=RATE with a rate above zero, found {part.strip()!r}",
                help="--rates door=3,plate=0.5",
            )
        found[name.strip()] = rate
    return found


def plan_workload(
    workload: Workload, *, rates_per_s: Sequence[float] | None = None, method: str = "best"
) -> tuple[Problem, Placement]:
    """Plan for every residency that a workload allows, and take the better one.

    Raises:
        Infeasible: No plan of any can keep up; ``closest`` is one that comes near.
        ConfigError: There is no such method.
    """
    problem = workload.problem(rates_per_s=rates_per_s)
    found = search_within(workload, problem, method=method)
    return problem.with_residency(found.residency), found


def search_within(workload: Workload, problem: Problem, *, method: str = "best") -> Placement:
    """As `edgewise.placement.search.plan`, with the residencies that a workload allows.

    Args:
        workload: Says which.
        problem: What to plan for.
        method: How to search.

    Raises:
        Infeasible: As `plan_workload`.
        ConfigError: Likewise.
    """
    from edgewise.errors import Infeasible
    from edgewise.placement.search import plan

    kinds = workload.residencies
    if method == "best":  # weighs both kinds itself
        return plan(problem, method, residency="either" if len(kinds) > 1 else kinds[0])
    found: list[Placement] = []
    trouble: Infeasible | None = None
    for kind in kinds:
        try:
            found.append(plan(problem.with_residency(kind), method))
        except Infeasible as error:
            trouble = trouble or error
    if found:
        return min(found, key=lambda p: p.score)
    assert trouble is not None  # noqa: S101 - there is at least one kind
    raise trouble


def closest_of(
    error: Exception, workload: Workload, rates_per_s: Sequence[float]
) -> tuple[Problem, Placement]:
    """The plan that an `Infeasible` carries; the error itself where it carries none."""
    from edgewise.placement.plan import Placement

    closest = getattr(error, "closest", None)
    if not isinstance(closest, Placement):
        raise error
    return workload.problem(residency=closest.residency, rates_per_s=rates_per_s), closest


def alternatives(
    workload: Workload, rates_per_s: Sequence[float], chosen: Placement
) -> list[Placement]:
    """What every other method would do, the better first."""
    from edgewise.errors import ConfigError
    from edgewise.placement.search import method_names, propose

    problem = workload.problem(rates_per_s=rates_per_s)
    found = []
    for name in method_names():
        # Methods that do not fit the device or the objective say so.
        with contextlib.suppress(ConfigError):
            if name not in _LEFT_OUT:
                found.append(propose(problem, name))
    others = (p for p in found if p.method != chosen.method)
    return sorted(others, key=lambda p: (not p.stable, p.score))


# The oracle of small cases takes long; the default is one of the others.
_LEFT_OUT = {"exhaustive", "best"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A stretch of a workload with rates of its own, and the plan for it.

    Attributes:
        from_s: When it begins.
        rates_per_s: Of every tenant.
        placement: The plan; ``None`` where none keeps up.
        problem: Why there is none; ``""`` else.
    """

    from_s: float
    rates_per_s: tuple[float, ...]
    placement: Placement | None
    problem: str = ""


def plan_phases(workload: Workload, method: str = "best") -> list[Phase]:
    """Plan for every set of rates that the workload steps through; empty where none steps."""
    from edgewise.errors import Infeasible

    if len(workload.phases_s) < 2:
        return []
    found = []
    for from_s in workload.phases_s:
        rates_per_s = workload.rates_per_s(from_s)
        placement, problem = None, ""
        try:
            _, placement = plan_workload(workload, rates_per_s=rates_per_s, method=method)
        except Infeasible as error:
            problem = error.message
        found.append(
            Phase(from_s=from_s, rates_per_s=rates_per_s, placement=placement, problem=problem)
        )
    return found


# --- what a person sees --------------------------------------------------------------------------


def show_plan(out: Console, workload: Workload, plan: Placement) -> None:
    """Print a plan: what every tenant gets, and what it is predicted to see."""
    device = plan.accelerator or "no accelerator"
    what = "fixed shares of its memory" if plan.residency == "pinned" else "models switch"
    cores = f"{workload.cores} core{'' if workload.cores == 1 else 's'}"
    out.print(
        f"{workload.name}: {device} ({what}) and {cores}; objective {plan.objective}, method"
        f" {plan.method}, {plan.evaluated} candidates",
        soft_wrap=True,
    )
    print_table(
        out,
        _shares_table(workload, plan),
        "depth: work before the cut; cores: (workers × threads of each)",
    )
    lines = [*_say_exits(workload, plan), *_say_costs(workload, plan)]
    if plan.accelerator is not None:
        lines.insert(0, f"accelerator busy {_percent(plan.accelerator_busy)}")
    print_table(out, _predictions_table(workload, plan), *lines)
    for note in plan.notes:
        out.print(f"note: {note}", soft_wrap=True)


def plain_table(title: str) -> Table:
    """A table whose lines fit a narrow terminal.

    Args:
        title: Above it.
    """
    from rich import box
    from rich.table import Table

    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )


def short_tensor(name: str, length: int = 22) -> str:
    """A tensor's telling end, without what exporters and quantisers append.

    Args:
        name: Of the tensor.
        length: Characters at most.
    """
    for tail in ("_QuantizeLinear_Output", "_quantized", "_output_0"):
        name = name.removesuffix(tail)
    return name if len(name) <= length else "…" + name[1 - length :]


def print_table(out: Console, table: Table, *lines: str) -> None:
    """Print a table, and lines under it that may be wider."""
    out.print()
    out.print(table)
    for line in lines:
        out.print(line, soft_wrap=True, style="dim")


def _shares_table(workload: Workload, plan: Placement) -> Table:
    from edgewise.units import format_bytes

    table = plain_table("plan")
    table.add_column("tenant", overflow="fold")
    table.add_column("cut at", justify="right")
    table.add_column("tensor", no_wrap=True)
    for name in ("depth", "prefix", "memory", "cores"):
        table.add_column(name, justify="right", no_wrap=True)
    for tenant, share in zip(workload.tenants, plan.shares, strict=True):
        profile = tenant.profile
        held = share.sram_bytes
        table.add_row(
            share.tenant,
            f"{share.place}/{profile.last}",
            short_tensor(share.cut),
            f"{100 * profile.depth_ratio[share.place]:.0f} %",
            format_bytes(float(profile.prefix_bytes[share.place])) if share.place else "–",
            format_bytes(held) if held is not None else "switch" if share.place else "–",
            _say_cores(share),
        )
    return table


def _say_cores(share: Share) -> str:
    if not share.cores:
        return "–"
    return f"{share.cores} ({share.workers}×{share.threads})" if share.cores > 1 else "1"


def say_provenance(workload: Workload, profile: PartitionProfile, place: int) -> str:
    """How the costs behind a tenant's predictions came about, by its profile."""
    parts = []
    if place > 0 and workload.accelerator is not None:
        parts.append(f"accelerator {profile.accelerator_provenance}")
    if profile.cpu_s[place, 0] > 0:
        parts.append(f"CPU {profile.cpu_provenance}")
    return ", ".join(parts)


def _predictions_table(workload: Workload, plan: Placement) -> Table:
    from edgewise.report.wording import format_share

    table = plain_table("predicted")
    table.add_column("tenant", overflow="fold")
    columns = ["rate", "mean", "p95", "p99", "reloads", "CPU busy"]
    with_budget = any(t.budget_s is not None for t in workload.tenants)
    if with_budget:
        columns += ["budget", "late"]
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for tenant, seen in zip(workload.tenants, plan.predicted, strict=True):
        share = next(s for s in plan.shares if s.tenant == seen.tenant)
        row = [
            seen.tenant,
            f"{seen.rate_per_s:.3g}/s",
            _time(seen.response_s),
            _time(seen.p95_s),
            _time(seen.p99_s),
            format_share(seen.miss) if share.place else "–",
            _percent(seen.cpu_busy) if share.cores or seen.cpu_s else "–",
        ]
        if with_budget:
            row += [_time(tenant.budget_s), format_share(seen.deadline_miss)]
        table.add_row(*row)
    return table


def work_left(workload: Workload, plan: Placement) -> dict[str, float]:
    """By tenant with exits: the share of its suffix's work that is done on average."""
    return {
        s.tenant: float(workload.suffixes[s.tenant][0][s.place])
        for s in plan.shares
        if s.tenant in workload.suffixes and s.cores
    }


def _say_exits(workload: Workload, plan: Placement) -> list[str]:
    return [
        f"{name} leaves early: {_percent(ratio)} of its work after the cut is counted"
        for name, ratio in work_left(workload, plan).items()
    ]


def _say_costs(workload: Workload, plan: Placement) -> list[str]:
    """How the costs behind the predictions came about, tenants with the same on one line."""
    found: dict[str, list[str]] = {}
    for tenant, share in zip(workload.tenants, plan.shares, strict=True):
        said = say_provenance(workload, tenant.profile, share.place)
        found.setdefault(said, []).append(tenant.name)
    return [f"from costs of {', '.join(names)}: {said}" for said, names in found.items()]


def _show_others(
    out: Console, names: Sequence[str], plan: Placement, others: Sequence[Placement]
) -> None:
    shown = [p for p in others if p.stable]
    if not shown:
        if others:
            out.print("no other method has a plan that keeps up", soft_wrap=True)
        return
    table = plain_table("what other methods would give")
    table.add_column("method", no_wrap=True)
    table.add_column("cut at", overflow="fold")
    table.add_column("cores")
    table.add_column("memory")
    for name in ("mean", "worst p95", "device busy", "score"):
        table.add_column(name, justify="right")
    for each in [plan, *shown]:
        table.add_row(
            each.method,
            " ".join(str(p) for p in each.places),
            " ".join(str(k) for k in each.cores),
            "switch" if each.residency == "switch" else "shares",
            _time(mean_s(each)),
            _time(max(p.p95_s for p in each.predicted)),
            _percent(each.accelerator_busy),
            "the plan" if each is plan else _against(each.score, plan.score),
        )
    lines = [f"cuts and cores in the order {', '.join(names)}"]
    failed = [p.method for p in others if not p.stable]
    if failed:
        lines.append(f"cannot keep up: {', '.join(failed)}")
    print_table(out, table, *lines)


def mean_s(plan: Placement) -> float:
    """Predicted mean response over all requests."""
    total = sum(p.rate_per_s for p in plan.predicted)
    return sum(p.rate_per_s * p.response_s for p in plan.predicted) / total


def _against(score: float, plan: float) -> str:
    from math import isfinite

    if not (isfinite(score) and isfinite(plan) and plan > 0):
        return "–"
    return f"{100 * (score / plan - 1):+.0f} %"


def _show_phases(out: Console, workload: Workload, phases: Sequence[Phase]) -> None:
    if not phases:
        return
    names = ", ".join(t.name for t in workload.tenants)
    table = plain_table("as rates change")
    for name in ("from", "rates per second", "cut at", "cores"):
        table.add_column(name, overflow="fold")
    table.add_column("mean", justify="right")
    for phase in phases:
        plan = phase.placement
        table.add_row(
            f"{phase.from_s:g} s",
            " ".join(f"{rate:.3g}" for rate in phase.rates_per_s),
            "–" if plan is None else " ".join(str(p) for p in plan.places),
            "–" if plan is None else " ".join(str(k) for k in plan.cores),
            "no plan keeps up" if plan is None else _time(mean_s(plan)),
        )
    print_table(out, table, f"rates, cuts and cores in the order {names}")


def _time(time_s: float | None) -> str:
    from edgewise.report.workload import format_time

    return format_time(time_s)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _show_reasons(out: Console, explanation: Explanation, curves: Sequence[RateCurve]) -> None:
    from edgewise.placement.explain import score_text

    table = plain_table("why")
    table.add_column("tenant", overflow="fold")
    table.add_column("the best other place, everybody else staying", overflow="fold")
    for reason in explanation.tenants:
        table.add_row(reason.tenant, reason.text)
    print_table(out, table)
    changes = [
        f"{curve.tenant}: place {c.before} below {c.rate_per_s:.3g}/s, place {c.after} above"
        for curve in curves
        for c in curve.crossovers
    ]
    for line in changes or ["the best places stay the same at every rate that can be kept up with"]:
        out.print(line, soft_wrap=True)
    table = plain_table("what more would save, at the same places")
    for name in ("resource", "change"):
        table.add_column(name)
    for name in (explanation.objective, "saves"):
        table.add_column(name, justify="right")
    for limit in explanation.limits:
        score = score_text(explanation.objective, limit.score)
        table.add_row(limit.resource, limit.change, score, _percent(limit.less_ratio))
    print_table(out, table, f"what binds: {explanation.binds or 'nothing'}")


def rate_curves(problem: Problem, plan: Placement) -> list[RateCurve]:
    """For every tenant, its places over its rate, the others as in the plan."""
    import numpy as np

    from edgewise.placement.explain import rate_curve

    own = problem.with_residency(plan.residency)
    found = []
    for tenant in problem.tenants:
        most = tenant.rate_per_s * _most_ratio(own, plan, tenant.name)
        rates = np.linspace(most / _RATES, most, _RATES)
        found.append(rate_curve(own, tenant.name, rates, places=plan.places))
    return found


_RATES = 48


def _most_ratio(problem: Problem, plan: Placement, tenant: str) -> float:
    """How many times its rate a tenant may have until no place can keep up; at most 11."""
    from math import isfinite

    from edgewise.placement.explain import rate_curve

    rate = next(t.rate_per_s for t in problem.tenants if t.name == tenant)
    ratios = [2.0 ** (n / 2) for n in range(-2, 7)]
    curve = rate_curve(problem, tenant, [rate * r for r in ratios], places=plan.places)
    works = [r for r, scores in zip(ratios, curve.score, strict=True) if isfinite(scores.min())]
    return 2**0.5 * works[-1] if works else 1.0


def crossover_charts(curves: Sequence[RateCurve], plan: Placement, provenance: str) -> list[Chart]:
    """Draw each tenant's places over its rate: those that are best somewhere, and both ends.

    Args:
        curves: Of `rate_curves`.
        plan: Its places are drawn too.
        provenance: Of the costs behind.
    """
    import numpy as np

    from edgewise.report.chart import Chart, Series

    is_time = plan.objective in {"mean", "weighted", "p99"}
    charts = []
    for curve, chosen in zip(curves, plan.places, strict=True):
        last = curve.score.shape[1] - 1
        wanted = sorted({0, last, chosen, *curve.best.tolist()})
        scale = 1e3 if is_time else 1.0
        lines = [
            Series(
                name=f"place {p}" + (" (the plan)" if p == chosen else ""),
                x=curve.rates_per_s.tolist(),
                y=[scale * v if np.isfinite(v) else None for v in curve.score[:, p].tolist()],
            )
            for p in wanted
            if np.isfinite(curve.score[:, p]).any()
        ]
        lines += [
            Series(
                name=f"{c.before} → {c.after} at {c.rate_per_s:.3g}/s",
                x=[c.rate_per_s],
                y=[
                    scale
                    * float(np.interp(c.rate_per_s, curve.rates_per_s, curve.score[:, c.after]))
                ],
            )
            for c in curve.crossovers
        ]
        best = curve.score.min(axis=1)
        # Ends of curves go to infinity: what lies before them is to be seen.
        top = float(np.median(best[np.isfinite(best)])) if np.isfinite(best).any() else 1.0
        charts.append(
            Chart(
                title=curve.tenant,
                x_label=f"requests of {curve.tenant} per second",
                y_label=f"{plan.objective} over all tenants" + (", ms" if is_time else ""),
                series=tuple(lines),
                provenance=provenance,
                y_range=(0.0, 3 * scale * top),
            )
        )
    return charts


def _write_files(
    workload: Workload, problem: Problem, plan: Placement, *, out: Path | None, figure: Path | None
) -> None:
    from edgewise.cli.evaluate import write_text
    from edgewise.placement.plan import placement_text
    from edgewise.report.chart import draw_charts

    say = stderr_console()
    if out is not None:
        write_text(out, placement_text(plan) + "\n")
        say.print(f"plan: {out}", soft_wrap=True)
    if figure is not None:
        charts = crossover_charts(rate_curves(problem, plan), plan, _all_costs(workload))
        title = f"{workload.name}: where to cut, over the rate"
        columns = 3 if len(charts) == 3 else 2
        written = draw_charts(charts, figure, title=title, columns=columns)
        say.print(f"figure: {written}", soft_wrap=True)


def _all_costs(workload: Workload) -> str:
    """How all costs came about, in a few words."""
    kinds = {t.profile.cpu_provenance for t in workload.tenants}
    words = f"CPU {'/'.join(sorted(kinds))}"
    if workload.accelerator is None:
        return words
    kinds = {t.profile.accelerator_provenance for t in workload.tenants}
    return f"accelerator {'/'.join(sorted(kinds))}, {words}"


def _as_json(
    workload: Workload,
    plan: Placement,
    others: Sequence[Placement],
    phases: Sequence[Phase],
    explanation: Explanation | None,
    curves: Sequence[RateCurve],
) -> dict[str, Any]:
    costs = {
        t.name: say_provenance(workload, t.profile, share.place)
        for t, share in zip(workload.tenants, plan.shares, strict=True)
    }
    steps = [
        {"mean_s": None if p.placement is None else mean_s(p.placement), **_plain(p)}
        for p in phases
    ]
    return {
        "workload": workload.name,
        "cores": workload.cores,
        "mean_s": mean_s(plan),
        "costs_are": costs,
        "work_left_ratio": work_left(workload, plan),
        "placement": to_plain(plan),
        "alternatives": [{"mean_s": mean_s(p), **_plain(p)} for p in others],
        "phases": steps,
        "explanation": None if explanation is None else to_plain(explanation),
        "crossovers": {c.tenant: to_plain(c.crossovers) for c in curves},
    }


def _plain(record: object) -> dict[str, Any]:
    plain = to_plain(record)
    assert isinstance(plain, dict)  # noqa: S101 - a record
    return plain
