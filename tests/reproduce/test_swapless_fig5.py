from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edgewise.bench.placement_runs import Row
from edgewise.reproduce import swapless_fig5 as claim
from edgewise.reproduce.registry import Reproduction, Setup, run_claim


@pytest.fixture(name="found", scope="module")
def run_quickly(small_zoo: Path) -> Reproduction:
    assert small_zoo.is_dir()
    return run_claim("swapless-fig5", Setup(quick=True, limit=6))


def test_every_place_is_played_and_every_verdict_given(found: Reproduction) -> None:
    low, rates = found.details["low"], found.details["rates"]
    places = [row["place"] for row in low]

    assert places == list(range(len(places)))
    assert len(places) >= 3
    assert len(rates) == 4  # two places at two rates
    assert len({row["place"] for row in rates}) == 2
    assert all(row["observed_s"] > 0 for row in (*low, *rates))
    assert len(found.verdicts) == 4
    assert {f.provenance for f in found.figures} == {"measured", "estimated"}


def test_the_setting_says_what_is_real_and_what_else_ran(found: Reproduction) -> None:
    assert "simulated" in found.setting["observed"]
    assert "real clock" in found.setting["observed"]
    assert found.setting["other load"]


def test_both_charts_show_predicted_and_observed(found: Reproduction) -> None:
    for chart in found.charts:
        names = [series.name for series in chart.series]
        assert any("predicted" in name for name in names)
        assert any("observed" in name for name in names)


def row(place: int, rate: float, observed_s: float) -> Row:
    return Row(
        label="x",
        tenant="a",
        place=place,
        rate_per_s=rate,
        requests=1,
        observed_s=observed_s,
        predicted_s=observed_s,
        paper_s=observed_s,
        replayed_s=observed_s,
        long_run_s=observed_s,
        observed_miss=None,
        predicted_miss=0.0,
        paper_miss=0.0,
        observed_parts_s=(0.0,) * 5,
        predicted_parts_s=(0.0,) * 5,
        other_ratio=0.0,
        given_s=observed_s,
        given_settled_s=observed_s,
    )


CROSSING = [row(9, 1.0, 0.10), row(7, 1.0, 0.12), row(9, 2.0, 0.16), row(7, 2.0, 0.13)]


def test_the_observed_crossing_lies_where_straight_lines_cross() -> None:
    # From 20 ms behind to 30 ms ahead over one request a second.
    assert claim._seen_crossing_per_s(CROSSING, (9, 7)) == pytest.approx(1.4)
    assert claim._seen_crossing_per_s(CROSSING[:2], (9, 7)) is None


@pytest.mark.parametrize(("crossing", "holds"), [(1.4, True), (2.5, False)])
def test_the_formulas_are_right_where_they_tell_the_better_cut(
    crossing: float, *, holds: bool
) -> None:
    verdicts = claim._verdicts(Setup(), CROSSING, CROSSING, (9, 7), crossing=crossing)
    assert verdicts[3].holds is holds


def test_a_miss_on_a_busy_machine_says_nothing_and_on_a_quiet_one_that_it_failed() -> None:
    off = [replace(row(0, 1.0, 0.1), predicted_s=0.2)]
    quiet = claim._verdicts(Setup(), off, CROSSING, (9, 7), crossing=None)
    busy = claim._verdicts(
        Setup(), [replace(off[0], other_ratio=0.5)], CROSSING, (9, 7), crossing=None
    )
    assert [v.holds for v in quiet] == [False, True, False, None]
    assert [v.holds for v in busy] == [None, True, None, None]
    assert "other programs used 50 %" in busy[0].detail
