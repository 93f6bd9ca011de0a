from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

import pytest

from edgewise.errors import ConfigError, DataError
from edgewise.report.curves import accuracy_figure
from edgewise.report.evaluation import (
    Estimate,
    Evaluation,
    EvaluationRow,
    best_rows,
    evaluation_csv,
    evaluation_lines,
    evaluation_table,
)


def estimate(value: float) -> Estimate:
    return Estimate(value=value, low=value - 0.1, high=value + 0.1)


def row(
    policy: str, budget_ratio: float, *, dsr: float = 1.0, accuracy: float = 0.8
) -> EvaluationRow:
    return EvaluationRow(
        policy=policy,
        budget_ratio=budget_ratio,
        budget_s=0.01 * budget_ratio,
        requests=50,
        dsr=estimate(dsr),
        accuracy=estimate(accuracy),
        accuracy_in_time=estimate(dsr * accuracy),
        mean_depth_ratio=estimate(0.5),
        flops_ratio=estimate(0.51),
        mean_s=0.005 * budget_ratio,
        p50_s=0.005 * budget_ratio,
        p99_s=0.009 * budget_ratio,
        is_bound=policy == "oracle",
    )


@pytest.fixture
def found() -> Evaluation:
    rows = [row(p, b) for b in (0.5, 1.0) for p in ("edgewise", "msdnet", "oracle")]
    return Evaluation(
        model="tiny",
        backend="null",
        threads=1,
        data="50 inputs",
        full_depth_s=0.01,
        provenance="simulated",
        rows=tuple(rows),
        skipped={},
        energy_note="no meter",
    )


def test_the_csv_has_a_line_for_each_row_and_empty_fields_for_the_unknown(
    found: Evaluation,
) -> None:
    lines = list(csv.DictReader(io.StringIO(evaluation_csv(found))))

    assert len(lines) == 6
    assert lines[0]["policy"] == "edgewise"
    assert float(lines[0]["accuracy_low"]) == pytest.approx(0.7)
    assert float(lines[3]["budget_s"]) == pytest.approx(0.01)
    assert lines[0]["energy_j"] == ""
    assert {line["provenance"] for line in lines} == {"simulated"}


def test_the_table_says_how_its_numbers_came_about(found: Evaluation) -> None:
    table = evaluation_table(found)

    assert "all simulated" in str(table.caption)
    assert table.row_count == 6


def test_a_bound_is_called_one_and_no_joules_are_a_dash(found: Evaluation) -> None:
    lines = evaluation_lines(found)

    assert [line[1] for line in lines[:3]] == ["edgewise", "msdnet", "oracle (bound)"]
    assert {line[-1] for line in lines} == {"–"}


def test_who_is_best_leaves_out_bounds_and_who_is_late() -> None:
    rows = [
        row("late", 1.0, dsr=0.5, accuracy=0.99),
        row("oracle", 1.0, accuracy=0.95),
        row("good", 1.0, accuracy=0.9),
        row("fair", 1.0, accuracy=0.8),
    ]

    assert [r.policy for r in best_rows(rows, least_dsr=0.98)] == ["good", "fair"]


def test_a_figure_has_a_curve_for_each_policy(found: Evaluation, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    drawn = accuracy_figure(found, tmp_path / "curves.svg")

    text = drawn.read_text(encoding="utf-8")
    for name in ("edgewise", "msdnet", "oracle", "simulated"):
        assert name in text


def test_a_figure_of_an_unknown_kind_is_refused(found: Evaluation, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot draw a picture"):
        accuracy_figure(found, tmp_path / "curves.jpeg2")


def test_a_figure_without_an_answer_is_refused(found: Evaluation, tmp_path: Path) -> None:
    silent = replace(found, rows=tuple(replace(r, mean_s=None) for r in found.rows))

    with pytest.raises(DataError, match="no request was answered"):
        accuracy_figure(silent, tmp_path / "curves.png")


def test_a_figure_that_cannot_be_written_says_so(found: Evaluation, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    with pytest.raises(DataError, match="could not be written"):
        accuracy_figure(found, tmp_path / "no" / "curves.png")
