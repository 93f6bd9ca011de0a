from __future__ import annotations

import json
import statistics
from dataclasses import replace

import numpy as np
import pytest

from edgewise.errors import DataError
from edgewise.report.records import DemoReport, RequestPoint, summarise, wilson_interval


def point(**changes: object) -> RequestPoint:
    plain = RequestPoint(
        policy="edgewise",
        scene="calm",
        start_s=0.0,
        latency_s=0.01,
        budget_s=0.02,
        exit_index=1,
        num_exits=3,
        depth_ratio=0.5,
        correct=True,
        predicted_s=None,
        met=True,
        reason="",
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


REFUSED = point(exit_index=None, depth_ratio=None, correct=None, met=False, latency_s=0.0)


def test_a_report_survives_json(report: DemoReport) -> None:
    assert DemoReport.from_json(report.to_json()) == report


def test_numbers_from_numpy_are_written_as_numbers(report: DemoReport) -> None:
    scene = replace(report.scenes[0], duration_s=np.float64(10.0))
    read = DemoReport.from_json(replace(report, scenes=(scene,)).to_json())

    assert read.scenes[0].duration_s == 10.0


def test_a_report_of_another_schema_is_refused(report: DemoReport) -> None:
    text = report.to_json().replace('"schema_version": 1', '"schema_version": 2')
    with pytest.raises(DataError, match="expected a demo report of schema 1, found 2"):
        DemoReport.from_json(text)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "null", '"x"'], ids=repr)
def test_what_is_no_report_is_refused(text: str) -> None:
    with pytest.raises(DataError):
        DemoReport.from_json(text)


def test_a_damaged_report_is_refused_with_the_place(report: DemoReport) -> None:
    data = json.loads(report.to_json())
    data["scenes"][1]["points"][3]["latency_s"] = "soon"
    with pytest.raises(DataError, match=r"report\.scenes\[1\]\.points\[3\]\.latency_s"):
        DemoReport.from_json(json.dumps(data))

    del data["scenes"][1]["points"][3]["latency_s"]
    with pytest.raises(DataError, match="latency_s"):
        DemoReport.from_json(json.dumps(data))


def test_a_refused_request_counts_against_dsr_but_not_against_accuracy() -> None:
    (row,) = summarise([point(), point(correct=False), point(met=False, latency_s=0.03), REFUSED])

    assert row.requests == 4
    assert row.dsr == 0.5
    assert row.accuracy == pytest.approx(2 / 3)
    assert row.accuracy_in_time == 0.25
    assert row.mean_exit_depth_ratio == 0.5
    assert row.p50_s == 0.01


def test_without_labels_accuracy_is_unknown_not_zero() -> None:
    (row,) = summarise([point(correct=None)])

    assert row.accuracy is None
    assert row.accuracy_in_time is None
    assert row.dsr == 1.0


def test_a_policy_that_answered_nothing_has_no_latency_and_no_depth() -> None:
    (row,) = summarise([REFUSED])

    assert row.dsr == 0.0
    assert (row.p50_s, row.p99_s, row.mean_exit_depth_ratio, row.accuracy) == (None,) * 4


def test_summaries_keep_the_order_of_scenes_and_policies() -> None:
    rows = summarise(
        point(scene=scene, policy=policy)
        for scene, policy in [("b", "y"), ("a", "x"), ("b", "x"), ("a", "y")]
    )

    assert [(r.scene, r.policy) for r in rows] == [
        *(("b", "y"), ("b", "x")),
        *(("a", "x"), ("a", "y")),
    ]
    assert summarise([]) == []


def test_the_median_agrees_with_the_standard_library() -> None:
    latencies_s = [0.001 * (7 * i % 23 + 1) for i in range(23)]
    (row,) = summarise(point(latency_s=latency_s) for latency_s in latencies_s)

    assert row.p50_s == pytest.approx(statistics.median(latencies_s))
    assert row.p99_s is not None
    assert statistics.median(latencies_s) < row.p99_s <= max(latencies_s)


def test_wilson_agrees_with_solving_the_score_equation() -> None:
    # The bounds are where |seen - p| is z standard errors of p itself.
    for share, count in [(0.0, 10), (0.3, 40), (0.98, 150), (1.0, 5)]:
        for bound in wilson_interval(share, count):
            z = abs(share - bound) / max((bound * (1 - bound) / count) ** 0.5, 1e-12)
            assert bound in (0.0, 1.0) or z == pytest.approx(1.959964, rel=1e-6)


@pytest.mark.parametrize(
    "wrong",
    [
        {"latency_s": float("nan")},
        {"latency_s": float("inf")},
        {"budget_s": -1.0},
        {"exit_index": 3},
        {"exit_index": -1},
        {"exit_index": None, "met": True},
    ],
    ids=str,
)
def test_an_impossible_request_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(DataError):
        point(**wrong)


def test_an_unknown_provenance_is_refused(report: DemoReport) -> None:
    with pytest.raises(DataError, match="measured, simulated, estimated"):
        replace(report, provenance="guessed")
