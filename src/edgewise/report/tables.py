"""Summaries of a demo as a table for the terminal, with and without rich."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgewise.errors import ConfigError
from edgewise.report.records import PolicySummary
from edgewise.report.wording import HERO, format_share, say_policy
from edgewise.units import format_duration

if TYPE_CHECKING:
    from rich.table import Table

_HEADINGS = (
    *("scene", "policy", "requests", "in time", "right", "right and in time", "mean depth"),
    *("p50", "p99"),
)
_TEXT_COLUMNS = 2


def summary_table(
    summaries: Sequence[PolicySummary], *, hero: str = HERO, provenance: str = "measured"
) -> Table:
    """Make a rich table of summaries, one line for each scene and policy.

    Args:
        summaries: In the order in which they appear.
        hero: The policy that is set in bold.
        provenance: ``measured``, ``simulated`` or ``estimated``; stands in the caption.

    Raises:
        ConfigError: rich is not installed.
    """
    try:
        from rich.table import Table
        from rich.text import Text
    except ImportError as error:
        raise ConfigError(
            "this table needs rich, which is not installed", help="pip install rich"
        ) from error
    table = Table(caption=f"all {provenance}; – is not known", caption_justify="left")
    for index, heading in enumerate(_HEADINGS):
        text = index < _TEXT_COLUMNS
        table.add_column(heading, justify="left" if text else "right", no_wrap=text)
    scene = None
    for summary, cells in zip(summaries, _lines(summaries), strict=True):
        if scene is not None and summary.scene != scene:
            table.add_section()
        scene = summary.scene
        # Text, not markup: a name in square brackets is a name.
        style = "bold" if summary.policy == hero else ""
        table.add_row(*(Text(cell) for cell in cells), style=style)
    return table


def summary_text(summaries: Sequence[PolicySummary], *, provenance: str = "measured") -> str:
    """Write summaries as plain text in aligned columns, for logs and for terminals without rich.

    Args:
        summaries: In the order in which they appear.
        provenance: ``measured``, ``simulated`` or ``estimated``; stands in the last line.
    """
    lines = [list(_HEADINGS), *_lines(summaries)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADINGS))]
    rows = [
        "  ".join(
            cell.ljust(width) if column < _TEXT_COLUMNS else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join([*rows, f"all {provenance}; – is not known"])


def _lines(summaries: Sequence[PolicySummary]) -> list[list[str]]:
    return [
        [
            summary.scene,
            say_policy(summary.policy),
            str(summary.requests),
            format_share(summary.dsr),
            format_share(summary.accuracy),
            format_share(summary.accuracy_in_time),
            format_share(summary.mean_exit_depth_ratio),
            format_duration(summary.p50_s),
            format_duration(summary.p99_s),
        ]
        for summary in summaries
    ]
