"""Replays of dispatch as panels of a figure, and as lines of a CSV file."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence

from edgewise.dispatch.problem import Objective
from edgewise.dispatch.replay import Gain, Replay
from edgewise.report.chart import Chart, Series

OBJECTIVE_NAMES: dict[Objective, str] = {
    "latency": "latency",
    "energy": "energy",
    "edp": "EDP",
}
METHOD_NAMES = {
    "static": "best single backend",
    "local": "operator-local",
    "greedy": "greedy",
    "viterbi": "exact",
    "best": "exact, segments",
}
UNITS: dict[Objective, str] = {"latency": "s", "energy": "J", "edp": "J s"}
MEAN = "mean"


def short_model(name: str) -> str:
    """A model's name for an axis.

    Example:
        >>> short_model("smollm2-135m"), short_model("qwen2.5-0.5b")
        ('smollm2 135m', 'qwen2.5 0.5b')
    """
    return name.removesuffix("-base").replace("-", " ")


def gain_charts(
    replays: Sequence[Replay],
    *,
    methods: Sequence[str],
    paper: Mapping[tuple[Objective, str], Sequence[float | None]] | None = None,
) -> tuple[Chart, ...]:
    """Gains over the best single backend: a panel for each table and objective, bars by method.

    Args:
        replays: Each gives its own panels.
        methods: Bars, in order.
        paper: By objective and name: gains in per cent, for the same models and their mean; drawn
            beside those of the first replay.
    """
    charts = []
    for number, found in enumerate(replays):
        for objective in dict.fromkeys(row.objective for row in found.rows):
            rows = found.of(objective)
            x = [*(short_model(row.model) for row in rows), MEAN]
            series = []
            for method in methods:
                gains = [
                    *(row.outcomes[method].gain for row in rows),
                    found.means[objective, method],
                ]
                series.append(_bars(METHOD_NAMES[method], x, gains))
            drawn = (paper or {}) if number == 0 else {}
            series += [
                Series(name=name, x=x, y=list(values))
                for (of, name), values in drawn.items()
                if of == objective
            ]
            charts.append(
                Chart(
                    title=f"{OBJECTIVE_NAMES[objective]}, {found.table}",
                    x_label="",
                    y_label="less than the best single backend (%)",
                    series=tuple(series),
                    provenance=found.provenance + (" and paper" if drawn else ""),
                    kind="bars",
                )
            )
    return tuple(charts)


def _bars(name: str, x: Sequence[str], gains: Sequence[Gain]) -> Series:
    known = all(g.low is not None for g in gains)
    return Series(
        name=name,
        x=x,
        y=[100 * g.ratio for g in gains],
        low=[100 * g.low for g in gains if g.low is not None] if known else (),
        high=[100 * g.high for g in gains if g.high is not None] if known else (),
    )


def switch_charts(replays: Sequence[Replay], *, methods: Sequence[str]) -> tuple[Chart, ...]:
    """Switches over all models, in per cent of operator-local's: a panel for each table.

    Args:
        replays: Each gives one panel.
        methods: Bars, in order.
    """
    kinds = ("backend", "device", "framework")
    charts = []
    for found in replays:
        objectives = list(dict.fromkeys(row.objective for row in found.rows))
        x = [f"{OBJECTIVE_NAMES[o]}: {kind}" for o in objectives for kind in kinds]
        charts.append(
            Chart(
                title=f"switches, {found.table}",
                x_label="",
                y_label="switches (% of operator-local's)",
                series=tuple(
                    Series(
                        name=METHOD_NAMES[method],
                        x=x,
                        y=[
                            100 * count / local if local else None
                            for o in objectives
                            for count, local in zip(
                                found.switches(o, method), found.switches(o, "local"), strict=True
                            )
                        ],
                    )
                    for method in methods
                ),
                provenance=found.provenance,
                kind="bars",
            )
        )
    return tuple(charts)


def replay_csv(found: Replay) -> str:
    """One line for each model, objective and method; empty cells are not known."""
    out = io.StringIO()
    write = csv.writer(out, lineterminator="\n")
    write.writerow(
        [
            *("table", "provenance", "model", "objective", "method", "instances"),
            *("best_single_backend", "latency_s", "energy_j", "edp_js", "switch_s"),
            *("backend_switches", "device_switches", "framework_switches", "segments"),
            *("gain_ratio", "gain_low_ratio", "gain_high_ratio", "exact"),
        ]
    )
    for row in found.rows:
        for method, outcome in row.outcomes.items():
            t, gain = outcome.totals, outcome.gain
            write.writerow(
                [
                    *(found.table, found.provenance, row.model, row.objective, method),
                    *(row.instances, row.baseline, t.latency_s, t.energy_j, t.edp, t.switch_s),
                    *(t.backend_switches, t.device_switches, t.framework_switches),
                    *(outcome.segments, gain.ratio, gain.low, gain.high, outcome.exact),
                ]
            )
    return out.getvalue()
