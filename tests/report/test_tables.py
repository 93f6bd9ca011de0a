from __future__ import annotations

import io

from edgewise.report.records import DemoReport, PolicySummary
from edgewise.report.tables import summary_table, summary_text


def printed(summaries: list[PolicySummary]) -> str:
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=160).print(summary_table(summaries))
    return out.getvalue()


def test_both_tables_have_a_line_for_each_scene_and_policy(report: DemoReport) -> None:
    for text in (printed(list(report.summaries)), summary_text(report.summaries)):
        assert sum("full depth" in line for line in text.splitlines()) == 2
        assert "80.0 %" in text
        assert "ms" in text
        assert "measured" in text


def test_numbers_end_in_the_same_column(report: DemoReport) -> None:
    lines = summary_text(report.summaries).splitlines()

    assert len({len(line) for line in lines[:-1]}) == 1


def test_unknown_is_a_dash_and_a_name_in_brackets_stays_a_name() -> None:
    row = PolicySummary(
        scene="[red]s[/red]",
        policy="[bold]p",
        requests=0,
        dsr=None,
        accuracy=None,
        accuracy_in_time=None,
        mean_exit_depth_ratio=None,
        p50_s=None,
        p99_s=None,
    )

    assert "[red]s[/red]" in printed([row])
    assert printed([row]).count("–") == 6 + 1  # and once in the caption
    assert summary_text([row]).count("–") == 6 + 1


def test_no_summaries_make_an_empty_table() -> None:
    assert "policy" in summary_text([])
    assert "policy" in printed([])
