"""``edgewise dispatch replay``: what each way to choose would cost, on a table of costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgewise.cli.output import emit_json, stderr_console, stdout_console, to_plain
from edgewise.cli.place import plain_table, print_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.table import Table

    from edgewise.dispatch.problem import Objective
    from edgewise.dispatch.replay import Gain, Replay, Row
    from edgewise.dispatch.trace import Trace
    from edgewise.profiles.operators import OperatorTable

_MOST_LISTED = 12


def replay(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="Names, config.json files or folders; all known models that the table covers by"
            " default.",
            show_default=False,
        ),
    ] = None,
    *,
    table: Annotated[
        str | None,
        typer.Option(
            help="jetson-like (simulated), another name that ships, or a file; what was measured"
            " here by default.",
            show_default=False,
        ),
    ] = None,
    objective: Annotated[str, typer.Option(help="latency, energy, edp or all.")] = "all",
    backends: Annotated[
        str | None,
        typer.Option(
            help="Which to choose from, separated by commas; all by default.", show_default=False
        ),
    ] = None,
    rule: Annotated[
        str, typer.Option(help="How to count: clean, or paper, which counts every MLP once more.")
    ] = "clean",
    segments: Annotated[
        bool, typer.Option("--segments", help="Let several operators run as one piece.")
    ] = False,
    csv: Annotated[
        Path | None, typer.Option(help="Write a line for each model, objective and method.")
    ] = None,
    figure: Annotated[
        Path | None, typer.Option(help="Draw the gains here: .png, .svg or .pdf.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object on standard output.")
    ] = False,
) -> None:
    """Compare ways to choose a backend for each operator, on costs measured before.

    Nothing is run. Each model's trace is its prefills of 16, 32, 64 and 128 tokens and, where it
    generates text, one decode pass.
    """
    from edgewise.cli.evaluate import write_text
    from edgewise.dispatch.replay import replay as replay_traces
    from edgewise.profiles.operator_tables import default_operator_table, load_operator_table
    from edgewise.report.curves import check_figure_path
    from edgewise.report.dispatch import gain_charts, replay_csv

    if figure is not None:
        check_figure_path(figure)
    objectives = _read_objectives(objective)
    names = _read_names(backends)
    costs = load_operator_table(table) if table is not None else default_operator_table()
    traces, missing = _traces(models or [], costs, rule)
    found = replay_traces(traces, costs, objectives=objectives, backends=names, segments=segments)
    notes = [*_say_table(costs), *missing, *_say_choice(found)]
    if json:
        emit_json({"rule": rule, **_as_json(found), "notes": notes})
    else:
        _show(stdout_console(), found, notes)
    say = stderr_console()
    if csv is not None:
        write_text(csv, replay_csv(found))
        say.print(f"table: {csv}", soft_wrap=True)
    if figure is not None:
        from edgewise.report.chart import draw_charts

        drawn = gain_charts([found], methods=_shown(found)[1:])
        path = draw_charts(drawn, figure, title="Dispatch, replayed", columns=1)
        say.print(f"figure: {path}", soft_wrap=True)


def _read_objectives(text: str) -> tuple[Objective, ...]:
    from edgewise.dispatch.problem import OBJECTIVES
    from edgewise.errors import ConfigError, nearest_names

    if text == "all":
        return OBJECTIVES
    found = tuple(o for o in OBJECTIVES if o == text)
    if not found:
        raise ConfigError(
            f"--objective: expected latency, energy, edp or all, found {text!r}",
            help=nearest_names(text, (*OBJECTIVES, "all")),
        )
    return found


def _read_names(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _traces(
    models: Sequence[str], table: OperatorTable, rule: str
) -> tuple[dict[str, tuple[Trace, ...]], list[str]]:
    """Traces of the models that were named, or of those that the table covers; and what is not."""
    from edgewise.dispatch.forward import RULES, paper_traces
    from edgewise.dispatch.replay import missing_shapes
    from edgewise.errors import ConfigError, ProfileError, nearest_names
    from edgewise.model.transformer import architecture_names, load_architecture

    if rule not in RULES:
        raise ConfigError(
            f"--rule: expected clean or paper, found {rule!r}", help=nearest_names(rule, RULES)
        )
    if not table.backends():
        raise ProfileError(
            f"table {table.name!r} has no usable cost", help="edgewise dispatch measure"
        )
    found, missing = {}, []
    for each in models or architecture_names():
        architecture = load_architecture(each)
        traces = paper_traces(architecture, rule="paper" if rule == "paper" else "clean")
        absent = missing_shapes(traces, table)
        if models or not absent:
            found[architecture.name] = traces
        else:
            missing.append(f"left out: {architecture.name}: the table lacks {len(absent)} shapes")
    if not found:
        raise ProfileError(
            f"table {table.name!r} has all shapes of no model that is known",
            help="edgewise dispatch measure adds what is missing",
        )
    return found, missing


def _say_table(table: OperatorTable) -> list[str]:
    """Where the costs are from, and whether that is here."""
    from edgewise.device import device_fingerprint
    from edgewise.profiles.operator_file import check_table

    state = "" if table.state == "calm" else f", {table.state}"
    found = [f"costs: {table.name}, {table.provenance}; {table.thread_policy.key}{state}"]
    if table.provenance == "simulated":
        return [*found, "simulated: a stated model of such a board, not a measurement of one"]
    here = device_fingerprint()
    found += check_table(table, device_id=here.id, thread_policy=table.thread_policy)
    if len(found) == 1 and table.thread_policy.threads > here.usable_cores:
        found.append(
            f"table {table.name!r} is for {table.thread_policy.key}, here {here.usable_cores:g}"
            " cores may be used"
        )
    return found


def _say_choice(found: Replay) -> list[str]:
    lines = []
    if len(found.backends) == 1:
        lines.append(f"one backend only ({found.backends[0]}): there is nothing to choose")
    lines += [f"no {objective}: {why}" for objective, why in found.left_out.items()]
    return lines


def _shown(found: Replay) -> tuple[str, ...]:
    """Methods with a column; ``best`` is the exact optimum again where there are no segments."""
    return ("static", "local", "greedy", "viterbi", *(["best"] if found.segments else []))


def _show(out: Console, found: Replay, notes: Sequence[str]) -> None:
    from edgewise.profiles.operator_file import excluded_in_words

    for line in notes:
        out.print(line, soft_wrap=True)
    choice = len(found.backends) > 1
    for objective in dict.fromkeys(row.objective for row in found.rows if choice):
        rows = found.of(objective)
        print_table(
            out,
            _gains_table(found, objective, rows),
            "gain: less than the best single backend, in brackets 95 % intervals; gap: greedy above"
            f" the exact optimum; all {found.provenance}",
        )
        print_table(
            out, _switches_table(found, objective, rows), "switches of backend / device / framework"
        )
    print_table(out, _statics_table(found), f"one backend for everything, {found.provenance}")
    lines = excluded_in_words(found.excluded)
    if lines:
        what = "row" if len(lines) == 1 else "rows"
        out.print(f"\n{len(lines)} {what} of the table that no plan uses:")
    for line in lines[:_MOST_LISTED]:
        out.print(line, soft_wrap=True)
    if len(lines) > _MOST_LISTED:
        out.print(f"and {len(lines) - _MOST_LISTED} more: --json lists them")


def _gains_table(found: Replay, objective: Objective, rows: Sequence[Row]) -> Table:
    from edgewise.report.dispatch import METHOD_NAMES, OBJECTIVE_NAMES

    table = plain_table(OBJECTIVE_NAMES[objective])
    for name in ("model", "best single"):
        table.add_column(name, overflow="fold")
    table.add_column("its cost", justify="right", no_wrap=True)
    methods = _shown(found)[1:]
    for method in methods:
        table.add_column(METHOD_NAMES[method], justify="right", no_wrap=True)
    table.add_column("gap", justify="right", no_wrap=True)
    for row in rows:
        total = row.statics[row.baseline].of(objective) if row.baseline else None
        table.add_row(
            row.model,
            row.baseline or "none can",
            _amount(total, objective),
            *(_gain(row.outcomes[m].gain) for m in methods),
            _percent(row.greedy_gap, digits=2),
        )
    if len(rows) > 1:
        table.add_section()
        table.add_row("mean", "", "", *(_gain(found.means[objective, m]) for m in methods), "")
    return table


def _switches_table(found: Replay, objective: Objective, rows: Sequence[Row]) -> Table:
    from edgewise.report.dispatch import METHOD_NAMES

    methods = _shown(found)[1:]
    table = plain_table("")
    table.add_column("model", overflow="fold")
    table.add_column("operators", justify="right")
    for method in methods:
        table.add_column(METHOD_NAMES[method], justify="right", no_wrap=True)
    for row in rows:
        counts = [row.outcomes[m].totals for m in methods]
        table.add_row(
            row.model,
            str(row.instances),
            *(f"{t.backend_switches}/{t.device_switches}/{t.framework_switches}" for t in counts),
        )
    table.add_section()
    fewer = (_percent(found.fewer_switches(objective, m)) for m in methods[1:])
    table.add_row("fewer than operator-local", "", "", *fewer)
    return table


def _statics_table(found: Replay) -> Table:
    table = plain_table("single backends")
    table.add_column("model", overflow="fold")
    for name in found.backends:
        table.add_column(name, justify="right", no_wrap=True)
    for row in {row.model: row for row in found.rows}.values():
        cells = []
        for name in found.backends:
            total = row.statics.get(name)
            if total is None:
                cells.append("–")
                continue
            joules = "" if total.energy_j is None else f", {_amount(total.energy_j, 'energy')}"
            cells.append(_amount(total.latency_s, "latency") + joules)
        table.add_row(row.model, *cells)
    return table


def _amount(value: float | None, objective: Objective) -> str:
    from edgewise.report.dispatch import UNITS
    from edgewise.units import format_duration

    if objective == "latency" or value is None:
        return format_duration(value)
    return f"{value:.3g} {UNITS[objective]}"


def _percent(ratio: float | None, *, digits: int = 1) -> str:
    return "–" if ratio is None or ratio != ratio else f"{100 * ratio:.{digits}f} %"  # noqa: PLR0124 - NaN


def _gain(gain: Gain) -> str:
    if gain.low is None or gain.high is None:
        return _percent(gain.ratio)
    return f"{_percent(gain.ratio)}\n[{100 * gain.low:.1f}, {100 * gain.high:.1f}]"


def _as_json(found: Replay) -> dict[str, Any]:
    from edgewise.profiles.operator_file import excluded_in_words

    means: dict[str, Any] = {}
    for (objective, method), gain in found.means.items():
        means.setdefault(objective, {})[method] = to_plain(gain)
    rows = [
        {
            "model": row.model,
            "objective": row.objective,
            "instances": row.instances,
            "best_single_backend": row.baseline,
            "single_backends": {
                name: {"latency_s": t.latency_s, "energy_j": t.energy_j, "edp_js": t.edp}
                for name, t in row.statics.items()
            },
            "methods": {
                name: {
                    **_plain(o.totals),
                    "edp_js": o.totals.edp,
                    "gain": to_plain(o.gain),
                    "exact": o.exact,
                    "operators": dict(o.operators),
                    "segments": o.segments,
                }
                for name, o in row.outcomes.items()
            },
            "greedy_gap_ratio": row.greedy_gap,
        }
        for row in found.rows
    ]
    return {
        "table": found.table,
        "provenance": found.provenance,
        "device_id": found.device_id,
        "thread_policy": found.thread_policy.key,
        "state": found.state,
        "backends": list(found.backends),
        "segments": found.segments,
        "mean_gain": means,
        "fewer_switches_ratio": {
            objective: {
                method: found.fewer_switches(objective, method)
                for of, method in found.means
                if of == objective
            }
            for objective in dict.fromkeys(row.objective for row in found.rows)
        },
        "rows": rows,
        "excluded": excluded_in_words(found.excluded),
    }


def _plain(record: object) -> dict[str, Any]:
    plain = to_plain(record)
    assert isinstance(plain, dict)  # noqa: S101 - a record
    return plain
