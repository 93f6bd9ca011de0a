from __future__ import annotations

from pathlib import Path

import pytest

from edgewise.report.chart import draw_charts
from edgewise.reproduce import _dispatch as common
from edgewise.reproduce.registry import Figure, Reproduction, Setup, run_claim

SETUP = Setup(quick=True, models=("modernbert-base", "smollm2-135m"))


@pytest.fixture(name="figures", scope="module")
def both() -> dict[str, Reproduction]:
    return {name: run_claim(f"dispatch-{name}", SETUP) for name in ("fig3", "fig4")}


def simulated(found: Reproduction, name: str) -> Figure:
    return next(f for f in found.figures if f.name == name and f.provenance == "simulated")


def test_the_papers_gain_stands_beside_ours_for_each_model(
    figures: dict[str, Reproduction],
) -> None:
    for model in SETUP.models:
        figure = simulated(figures["fig3"], f"EDP: {model}")

        assert figure.paper == common.PAPER_EDP[model]
        # The table was fitted to these; a change that moves them must be seen.
        assert figure.ours == pytest.approx(figure.paper, abs=5)


def test_means_of_other_models_than_the_papers_are_not_compared(
    figures: dict[str, Reproduction],
) -> None:
    assert simulated(figures["fig3"], "latency: mean gain").paper is None
    assert figures["fig3"].verdicts[0].holds is None


def test_little_is_gained_where_the_gpu_has_its_operands(
    figures: dict[str, Reproduction],
) -> None:
    exact = simulated(figures["fig3"], "latency, GPU's operands in place: mean gain, exact")

    assert exact.ours is not None
    assert 0 <= exact.ours < 3


def test_ways_to_choose_are_in_order_and_the_exact_one_switches_less(
    figures: dict[str, Reproduction],
) -> None:
    order, calm = figures["fig4"].verdicts[:2]

    assert order.holds
    assert calm.holds


def test_measured_and_simulated_figures_never_share_a_name(
    figures: dict[str, Reproduction],
) -> None:
    for found in figures.values():
        names = [f.name for f in found.figures]
        assert len(set(names)) == len(names)


def test_panels_are_drawn_and_say_how_they_came_about(
    figures: dict[str, Reproduction], tmp_path: Path
) -> None:
    for name, found in figures.items():
        assert all("simulated" in c.provenance or "measured" in c.provenance for c in found.charts)
        path = draw_charts(found.charts[-1:], tmp_path / f"{name}.svg")
        assert path.stat().st_size > 0
