from __future__ import annotations

from dataclasses import replace

import pytest

from edgewise.report.records import DemoReport
from edgewise.report.wording import format_share, headline


def test_the_headline_speaks_of_the_scene_with_load_and_says_how_long_it_was(
    report: DemoReport,
) -> None:
    found = headline(report)

    assert found.scene == "load"
    assert found.text == (
        "With other programs busy for 4 of 10 s, edgewise answered 100 % of 10 requests in time "
        "at 80.0 % accuracy; full depth 50.0 % at 80.0 %."
    )
    assert "while those programs ran, in time: edgewise 100 %" in found.detail


def test_the_ranking_puts_whoever_is_best_first(report: DemoReport) -> None:
    found = headline(report, hero="branchynet")

    assert found.text.startswith("With other programs busy for 4 of 10 s, branchynet answered 50.0")
    assert found.detail.startswith("Right and in time: edgewise 80.0 %, ")


def test_a_lead_within_the_noise_is_called_that(report: DemoReport) -> None:
    assert "order may be chance" in headline(report).detail  # ten requests show little

    rows = tuple(
        replace(row, requests=100_000, accuracy_in_time=0.9 if row.policy == "edgewise" else 0.5)
        for row in report.summaries
    )
    assert "chance" not in headline(replace(report, summaries=rows)).detail


def test_without_labels_the_headline_claims_no_accuracy(report: DemoReport) -> None:
    rows = tuple(replace(r, accuracy=None, accuracy_in_time=None) for r in report.summaries)
    found = headline(replace(report, summaries=rows))

    assert "accuracy" not in found.text
    assert found.detail.startswith("In time: edgewise")


def test_without_load_the_headline_names_the_scene(report: DemoReport) -> None:
    scenes = tuple(replace(scene, load_spans=()) for scene in report.scenes)
    found = headline(replace(report, scenes=scenes))

    assert found.text.startswith("In the scene “A calm machine”, edgewise answered")


def test_without_requests_nothing_is_claimed(report: DemoReport) -> None:
    found = headline(replace(report, scenes=(), summaries=()))

    assert found.text == "No request was answered by edgewise."
    assert found.detail == ""


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.9999, "99.9 %"), (1.0, "100 %"), (0.0001, "0.1 %"), (0.0, "0 %"), (0.5, "50.0 %")],
)
def test_a_share_is_never_rounded_to_all_or_nothing(share: float, text: str) -> None:
    assert format_share(share) == text
