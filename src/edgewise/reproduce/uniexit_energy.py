"""Beyond UniExit: a joint latency-energy budget, which the paper names as future work."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edgewise.bench.simulation import Row, look_back, play, summarise
from edgewise.device.state import DeviceState
from edgewise.exits import make_policy
from edgewise.predict.state_costs import StateCosts
from edgewise.report.chart import Chart
from edgewise.reproduce import _simulated as sim
from edgewise.reproduce.registry import Figure, Reproduction, Setup, Verdict
from edgewise.runtime.repricing import Repricer

TITLE = "A router under a joint latency and energy budget: depth and accuracy over joules"

# Of the mean joules that the router uses without an energy budget.
_RATIOS = (0.5, 0.7, 0.85, 1.0, 1.2)
_DSR = 0.98
# Costs that change by less are not published.
_PUBLISHED_RATIO = 0.003
# Margins are learnt from what ran, so that two budgets differ in more than the budget.
_TOLERANCE = 0.005


@dataclass(slots=True)
class _Meter:
    """Notes what an exit is predicted to use as its stage begins, after which nobody turns back."""

    costs: StateCosts | None = None
    predicted_j: float = np.nan
    least_j: float = np.nan

    def on_unit(self, unit: str) -> None:
        kind, _, place = unit.partition(":")
        if kind != "stage":
            return
        costs, k = self.costs, int(place)
        assert costs is not None  # noqa: S101 - a state is told before the first request
        assert costs.stage_j is not None  # noqa: S101 - campaigns of simulated devices have joules
        assert costs.head_j is not None  # noqa: S101
        self.predicted_j = float(costs.stage_j[: k + 1].sum() + costs.head_j[k])
        if k == 0:
            self.least_j = self.predicted_j


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The requests of one seed under one energy budget.

    Attributes:
        row: What came of them.
        predicted_j: [R], what the exit that answered was predicted to use when it was chosen.
        used_j: [R], what was used.
        least_j: [R], what the first exit was predicted to use when the request began.
    """

    row: Row
    predicted_j: npt.NDArray[np.float64]
    used_j: npt.NDArray[np.float64]
    least_j: npt.NDArray[np.float64]

    def over_ratio(self, amounts_j: npt.NDArray[np.float64], budget_j: float) -> float:
        """Share of requests above the budget, of those whose first exit fitted."""
        fitted = self.least_j <= budget_j
        over = amounts_j > (1 + _PUBLISHED_RATIO) * budget_j
        return float(over[fitted].mean()) if fitted.any() else 0.0

    def unfit_ratio(self, budget_j: float) -> float:
        """Share of requests for which not even the first exit fits the energy budget."""
        return float((self.least_j > budget_j).mean())


def run(setup: Setup) -> Reproduction:
    """Sweep the energy budget at one deadline.

    Args:
        setup: ``seed``, ``seeds``, ``limit`` (requests per seed); ``quick`` plays one device.
    """
    seeds, count = sim.seeds_of(setup, full=3), sim.count_of(setup, full=300)
    figures: list[Figure] = []
    verdicts: list[Verdict] = []
    charts: list[Chart] = []
    details: dict[str, Any] = {}
    for device in sim.DEVICES[:1] if setup.quick else sim.DEVICES:
        found = sim.case(device, "resnet50")
        free = [_play(found, seed=seed, count=count, budget_j=None) for seed in seeds]
        whole_j = float(np.mean([point.row.energy_j for point in free]))
        points = {math.inf: free}
        for ratio in _RATIOS[1::2] if setup.quick else _RATIOS:
            setup.say(f"{found.title}: {ratio:.0%} of {whole_j:.3g} J")
            budget_j = ratio * whole_j
            points[budget_j] = [
                _play(found, seed=seed, count=count, budget_j=budget_j) for seed in seeds
            ]
        ordered = {b: points[b] for b in sorted(points)}
        rows = {
            b: sim.Rows(name=_name(b), rows=tuple(p.row for p in each))
            for b, each in ordered.items()
        }
        for budget_j, each in rows.items():
            figures += _figures(found.title, budget_j, each, ordered[budget_j])
        verdicts += _verdicts(found.title, ordered, rows)
        charts += _charts(found.title, rows)
        details[f"{device}/resnet50"] = sim.as_json({r.name: r for r in rows.values()})
    return Reproduction(
        title=TITLE,
        source="UniExit, section 8, future work; no figure of the paper",
        setting=sim.setting(
            seeds=seeds,
            count=count,
            paper="nothing to compare with",
            deadline=f"{sim.DEADLINE_S * 1e3:.0f} ms, on the down-up trace",
            energy=(
                "of the whole simulated board while a request runs, idle power included; predicted"
                " by a small network fitted on the same states as the costs"
            ),
        ),
        figures=tuple(figures),
        verdicts=tuple(verdicts),
        notes=(
            (
                "A request for which not even the first exit fits the energy budget is answered"
                " there: it is counted apart."
            ),
        ),
        charts=tuple(charts),
        details=details,
    )


def _play(found: sim.Case, *, seed: int, count: int, budget_j: float | None) -> Point:
    scene = found.scene(
        clocks="dvfs",
        budget_s=sim.DEADLINE_S,
        seed=seed,
        count=count,
        spacing_s=sim.SHORT_SPACING_RATIO * sim.DEADLINE_S,
    )
    fitted = sim.joule_predictor(found.device.name, found.net)
    policy = make_policy("edgewise", found.inputs, energy_budget_j=budget_j)
    repricer, meter = Repricer(fitted, [policy]), _Meter()
    taken: list[tuple[float, float]] = []

    def on_state(state: DeviceState) -> None:
        repricer.on_state(state)
        meter.costs = fitted.predict(state)

    played = play(
        scene,
        policy,
        on_state=on_state,
        on_unit=meter.on_unit,
        on_answer=lambda _: taken.append((meter.predicted_j, meter.least_j)),
    )
    predicted_j, least_j = np.array(taken).T
    return Point(
        row=summarise(scene, played, look_back(scene)),
        predicted_j=predicted_j,
        used_j=played.energy_j,
        least_j=least_j,
    )


def _name(budget_j: float) -> str:
    return "no energy budget" if math.isinf(budget_j) else f"{1e3 * budget_j:.0f} mJ"


def _figures(title: str, budget_j: float, rows: sim.Rows, points: Sequence[Point]) -> list[Figure]:
    unfit = float(np.mean([p.unfit_ratio(budget_j) for p in points]))
    found = rows.estimate("energy_j")
    several = len(points) > 1
    return [
        Figure(
            name=f"{title}, {rows.name}: mean energy of a request",
            unit="J",
            ours=found.value,
            low=found.low if several else None,
            high=found.high if several else None,
            provenance="simulated",
            note=f"{100 * unfit:.0f} % have no exit within it" if unfit else "",
        ),
        *sim.row_figures(f"{title}, {rows.name}", rows),
    ]


def _verdicts(
    title: str, points: Mapping[float, Sequence[Point]], rows: Mapping[float, sim.Rows]
) -> list[Verdict]:
    over = max(p.over_ratio(p.predicted_j, b) for b, each in points.items() for p in each)
    used = max(p.over_ratio(p.used_j, b) for b, each in points.items() for p in each)
    least_dsr = min(each.mean("dsr") for each in rows.values())
    fields = ("energy_j", "mean_depth_ratio")
    falls = {
        field: float(np.max(-np.diff([each.mean(field) for each in rows.values()]), initial=0.0))
        / rows[math.inf].mean(field)
        for field in fields
    }
    return [
        Verdict(
            claim=f"{title}: no energy budget is broken, by predicted energy",
            holds=over == 0.0,
            detail=(
                f"of requests whose first exit fitted, at most {100 * over:.1f} % were predicted to"
                f" use more when their exit was chosen; up to {100 * used:.0f} % did use more"
            ),
        ),
        Verdict(
            claim=f"{title}: a larger energy budget never gives less depth",
            holds=max(falls.values()) <= _TOLERANCE,
            detail="largest step back: "
            + ", ".join(f"{field} {100 * fall:.2f} %" for field, fall in falls.items()),
        ),
        Verdict(
            claim=f"{title}: deadlines are kept under every energy budget",
            holds=least_dsr >= _DSR,
            detail=f"at least {100 * least_dsr:.1f} %",
        ),
    ]


def _charts(title: str, rows: Mapping[float, sim.Rows]) -> list[Chart]:
    x = [1e3 * each.mean("energy_j") for each in rows.values()]
    panels = (("mean_depth_ratio", "mean depth, %"), ("right_in_time", "right and in time, %"))
    return [
        Chart(
            title=title,
            x_label="mean energy of a request, mJ",
            y_label=label,
            provenance="simulated",
            series=(sim.line("edgewise", x, list(rows.values()), field),),
        )
        for field, label in panels
    ]
