from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from edgewise.report.records import DemoReport, LoadSpan
from edgewise.report.timeline import PANEL_HEIGHT, exit_level, lay_out


def test_every_request_is_inside_the_plot_and_late_ones_are_above_the_budget(
    report: DemoReport,
) -> None:
    timeline = lay_out(report.scenes[1])

    marks = [mark for panel in timeline.panels for mark in panel.marks]
    assert len(marks) == timeline.total == timeline.drawn == 40
    assert all(0 <= m.x <= 100 and 0 <= m.y <= PANEL_HEIGHT for m in marks)
    budget_y = timeline.budget[-1][1]
    assert all((m.y < budget_y) == (m.kind == "late") for m in marks)
    assert {m.kind for m in marks} == {"met", "late"}


def test_the_budget_is_a_step_line_without_gaps(report: DemoReport) -> None:
    pieces = lay_out(report.scenes[0]).budget

    assert pieces[0][0] == 0.0
    assert pieces[-1][2] == 100.0
    assert all(a[2:] == b[:2] for a, b in pairwise(pieces))


def test_only_the_hero_has_a_strip_and_it_covers_the_time_from_its_first_request(
    report: DemoReport,
) -> None:
    panels = {panel.policy: panel for panel in lay_out(report.scenes[0]).panels}

    assert not panels["branchynet"].strip
    strip = panels["edgewise"].strip
    assert round(strip[-1].x + strip[-1].width, 2) == 100.0
    assert [box.level for box in strip[:3]] == [0, 4, 8]


def test_too_many_requests_are_thinned_evenly_and_it_is_known(report: DemoReport) -> None:
    timeline = lay_out(report.scenes[0], max_points=15)

    assert timeline.every == 3
    assert timeline.total == 40
    assert timeline.drawn == 16  # 4 of 10 for each of the 4 policies
    assert {len(panel.marks) for panel in timeline.panels} == {4}


def test_loads_at_the_same_time_get_a_line_each(report: DemoReport) -> None:
    spans = ((0.0, 4.0, "a"), (2.0, 6.0, "b"), (5.0, 8.0, "c"))
    scene = replace(
        report.scenes[0],
        load_spans=tuple(LoadSpan(start_s=a, stop_s=b, label=name) for a, b, name in spans),
    )
    loads = lay_out(scene).loads

    assert {(box.label, box.y) for box in loads} == {("a", 0.0), ("b", 1.0), ("c", 0.0)}


def test_an_empty_scene_has_axes_and_no_panel(report: DemoReport) -> None:
    timeline = lay_out(replace(report.scenes[0], points=(), budget_line=(), duration_s=0.0))

    assert timeline.panels == ()
    assert timeline.y_ticks
    assert timeline.drawn == timeline.total == 0


def test_one_exit_has_the_colour_of_the_last() -> None:
    assert exit_level(0, 1) == exit_level(7, 8) == 8
