"""UniExit, Figure 7: all exit methods under dynamic DVFS, two networks on two devices."""

from __future__ import annotations

from edgewise.report.chart import Chart
from edgewise.reproduce import _simulated as sim
from edgewise.reproduce.registry import Figure, Reproduction, Setup, Verdict

TITLE = "Under dynamic DVFS static profiles lose deadlines and edgewise keeps them"

_DSR, _DEPTH = 0.98, 0.95
_STATIC = ("spinn", "eenet", "branchynet", "static_table", "full_depth")
# Table 7 gives the numbers of UniExit's bars, with fallback, on ResNet-50.
_PAPER_UNIEXIT = {
    ("jetson-orin-nano", "resnet50"): 98.56,
    ("jetson-xavier-nx", "resnet50"): 97.68,
}


def run(setup: Setup) -> Reproduction:
    """Play the same requests to every policy, network by network and device by device.

    Args:
        setup: ``seed``, ``seeds``, ``limit`` (requests per seed); ``quick`` plays one network.
    """
    seeds, count = sim.seeds_of(setup), sim.count_of(setup, full=300)
    figures: list[Figure] = []
    verdicts: list[Verdict] = []
    charts: list[Chart] = []
    details = {}
    names = list(sim.PLAYERS)
    for device, net in sim.cases(quick=setup.quick):
        found = sim.case(device, net)
        rows = sim.compare(
            found,
            [sim.PLAYERS[name] for name in names],
            clocks="dvfs",
            budget_s=sim.DEADLINE_S,
            seeds=seeds,
            count=count,
            say=setup.say,
        )
        for name in (*names, "oracle"):
            paper = _PAPER_UNIEXIT.get((device, net)) if name == "uniexit" else None
            figures += sim.row_figures(f"{found.title}, {name}", rows[name], paper_dsr=paper)
        verdicts += _verdicts(found.title, rows)
        charts.append(_chart(found.title, rows))
        details[f"{device}/{net}"] = sim.as_json(rows)
    return Reproduction(
        title=TITLE,
        source="UniExit, Figure 7 and section 7.2; DSR of UniExit from Table 7",
        setting=sim.setting(
            seeds=seeds,
            count=count,
            paper="the same networks, CIFAR-100 and ImageNet, on the boards; bars without numbers",
            deadline=f"{sim.DEADLINE_S * 1e3:.0f} ms from arrival, the paper's",
        ),
        figures=tuple(figures),
        verdicts=tuple(verdicts),
        notes=(
            (
                "DSR, depth and accuracy are over requests that some exit could have answered in"
                " time; the oracle knows each unit's time and takes the deepest such exit."
            ),
            (
                "edgewise and uniexit read the same predictions, so that what differs is how they"
                " decide."
            ),
            (
                "Rivals have the setting that does best at the profile. SPINN's is then its"
                " quickest threshold, which fits whatever its scale factor says."
            ),
        ),
        charts=tuple(charts),
        details=details,
    )


def _verdicts(title: str, rows: dict[str, sim.Rows]) -> list[Verdict]:
    ours, oracle = rows["edgewise"], rows["oracle"]
    dsr, depth = ours.mean("dsr"), ours.mean("depth_of_oracle")
    best = max(_STATIC, key=lambda name: rows[name].mean("dsr"))
    best_dsr = rows[best].mean("dsr")
    feasible = oracle.mean("feasible_ratio")
    return [
        Verdict(
            claim=f"{title}: edgewise answers at least {100 * _DSR:.0f} % in time",
            holds=dsr >= _DSR,
            detail=f"{100 * dsr:.1f} %, of the {100 * feasible:.1f} % of requests that can be",
        ),
        Verdict(
            claim=f"{title}: its mean depth is within {100 * (1 - _DEPTH):.0f} % of the oracle's",
            holds=depth >= _DEPTH,
            detail=(
                f"{ours.mean('mean_depth_ratio'):.3f} against"
                f" {oracle.mean('mean_depth_ratio'):.3f}: {100 * depth:.1f} %"
            ),
        ),
        Verdict(
            claim=f"{title}: every static-profile method answers fewer in time",
            holds=best_dsr < dsr,
            detail=f"best of them {best} with {100 * best_dsr:.1f} %",
        ),
    ]


def _chart(title: str, rows: dict[str, sim.Rows]) -> Chart:
    names = list(rows)
    ordered = [rows[name] for name in names]
    return Chart(
        title=title,
        x_label="",
        y_label="%",
        kind="bars",
        provenance="simulated",
        y_range=(0.0, 105.0),
        series=(
            sim.bars("in time", ordered, "dsr", names=names),
            sim.bars("right and in time", ordered, "right_in_time", names=names),
            sim.bars("mean depth", ordered, "mean_depth_ratio", names=names),
        ),
    )
