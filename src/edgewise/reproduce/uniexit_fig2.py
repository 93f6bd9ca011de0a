"""UniExit, Figure 2: exit methods that rely on a static profile, at locked and at moving clocks."""

from __future__ import annotations

from collections.abc import Mapping

from edgewise.bench.simulation import over_seeds
from edgewise.report.chart import Chart
from edgewise.report.evaluation import Estimate
from edgewise.reproduce import _simulated as sim
from edgewise.reproduce.registry import Figure, Reproduction, Setup, Verdict

TITLE = "Methods that rely on a static profile lose deadlines once the clocks move"

_STATIC = ("spinn", "eenet", "branchynet", "static_table", "full_depth")
_SHOWN = (*_STATIC, "edgewise")


def run(setup: Setup) -> Reproduction:
    """Play each method at the highest clocks and on the down-up trace.

    Args:
        setup: ``seed``, ``seeds``, ``limit`` (requests per seed); ``quick`` plays one network.
    """
    seeds, count = sim.seeds_of(setup), sim.count_of(setup)
    device = sim.DEVICES[0]
    figures: list[Figure] = []
    verdicts: list[Verdict] = []
    charts: list[Chart] = []
    details = {}
    for net in sim.NETS[:1] if setup.quick else sim.NETS:
        found = sim.case(device, net)
        by_clocks = {
            clocks: sim.compare(
                found,
                [sim.PLAYERS[name] for name in _SHOWN],
                clocks=clocks,
                budget_s=sim.DEADLINE_S,
                seeds=seeds,
                count=count,
                say=setup.say,
            )
            for clocks in sim.CLOCKS
        }
        for name in _SHOWN:
            for clocks, rows in by_clocks.items():
                depth = rows[name].mean("mean_depth_ratio")
                figures.append(
                    sim.percent(
                        f"{found.title}: DSR of {name}, {clocks} clocks",
                        rows[name],
                        "dsr",
                        note=f"mean depth {depth:.2f}",
                    )
                )
        lost = {name: _lost(by_clocks, name) for name in _SHOWN}
        verdicts.append(
            Verdict(
                claim=f"{found.title}: every static-profile method loses, in each interval",
                holds=all(lost[name].low > 0 for name in _STATIC),
                detail="points lost: "
                + ", ".join(f"{name} {100 * lost[name].value:.1f}" for name in _SHOWN),
            )
        )
        charts.append(_chart(found.title, by_clocks))
        details[f"{device}/{net}"] = {
            clocks: sim.as_json(rows) for clocks, rows in by_clocks.items()
        }
    return Reproduction(
        title=TITLE,
        source="UniExit, Figure 2 and section 2.2",
        setting=sim.setting(
            seeds=seeds,
            count=count,
            paper="SPINN, EENet, E3 on a Jetson; bars without numbers",
            deadline=(
                f"{sim.DEADLINE_S * 1e3:.0f} ms in both, so that only the clocks differ (the paper"
                " has 15 ms at locked clocks)"
            ),
        ),
        figures=tuple(figures),
        verdicts=tuple(verdicts),
        notes=(
            "E3 has no public code or description to build from and is left out.",
            (
                "SPINN is without its scale factor here, as the paper takes it; uniexit-fig7 has"
                " both."
            ),
        ),
        charts=tuple(charts),
        details=details,
    )


def _lost(by_clocks: Mapping[sim.Clocks, Mapping[str, sim.Rows]], name: str) -> Estimate:
    """DSR at locked clocks less that on the trace, seed by seed."""
    static, dvfs = by_clocks["static"][name].rows, by_clocks["dvfs"][name].rows
    return over_seeds([a.dsr - b.dsr for a, b in zip(static, dvfs, strict=True)])


def _chart(title: str, by_clocks: Mapping[sim.Clocks, Mapping[str, sim.Rows]]) -> Chart:
    return Chart(
        title=title,
        x_label="",
        y_label="answered in time, %",
        kind="bars",
        provenance="simulated",
        y_range=(0.0, 105.0),
        series=tuple(
            sim.bars(f"{clocks} clocks", [rows[name] for name in _SHOWN], "dsr", names=_SHOWN)
            for clocks, rows in by_clocks.items()
        ),
    )
