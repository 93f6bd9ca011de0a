"""A demo as one HTML file that needs no network and no script.

The places of all marks come from ``timeline``, the words from ``wording``; this file only brings
them to the template beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources

from edgewise.errors import ConfigError
from edgewise.report.records import DemoReport, PolicySummary, SceneReport, wilson_interval
from edgewise.report.timeline import (
    PANEL_HEIGHT,
    STRIP_HEIGHT,
    Timeline,
    exit_level,
    lay_out,
)
from edgewise.report.wording import HERO, format_share, headline, say_policy
from edgewise.units import format_duration

_COLUMNS: tuple[tuple[str, bool, Callable[[float | None], str]], ...] = (
    # name, whether more is better, how it is written
    ("dsr", True, format_share),
    ("accuracy", True, format_share),
    ("accuracy_in_time", True, format_share),
    ("p50_s", False, format_duration),
    ("p99_s", False, format_duration),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    """One number of the summary table. ``why`` stands in the cell when there is no number."""

    text: str = ""
    is_best: bool = False
    interval: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One policy in one scene, with its cells by column."""

    summary: PolicySummary
    cells: dict[str, _Cell]
    right: float
    wrong: float
    late: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _SceneView:
    """One scene with everything that the page shows of it."""

    scene: SceneReport
    timeline: Timeline
    rows: dict[str, _Row]


def render_demo_page(report: DemoReport, *, hero: str = HERO) -> str:
    """Write a demo as a self-contained HTML page.

    Args:
        report: What was measured.
        hero: The policy the page is about: the headline's subject, and the one whose exits are
            drawn as a strip.

    Returns:
        The whole document, light or dark as its reader prefers.

    Raises:
        ConfigError: jinja2 is not installed.
    """
    try:
        import jinja2
    except ImportError as error:
        raise ConfigError(
            "the page of a demo needs jinja2, which is not installed",
            help="pip install 'edgewise[report]'",
        ) from error
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        share=format_share, duration=format_duration, policy=say_policy, keep=_keep_together
    )
    source = resources.files("edgewise.report").joinpath("page.html.j2").read_text("utf-8")
    scenes = [_view(scene, report.summaries, hero=hero) for scene in report.scenes]
    num_exits = len(report.exit_table) or max(
        (p.num_exits for scene in report.scenes for p in scene.points), default=0
    )
    return environment.from_string(source).render(
        report=report,
        headline=headline(report, hero=hero),
        hero=hero,
        scenes=scenes,
        levels=[exit_level(index, num_exits) for index in range(num_exits)],
        panel_height=PANEL_HEIGHT,
        strip_height=STRIP_HEIGHT,
    )


def best_of(
    rows: Sequence[PolicySummary], column: str, *, write: Callable[[float | None], str]
) -> str | None:
    """Text of the best value of a column; ``None`` when fewer than two rows have one.

    Compared as written: rows that read the same are equally good.

    Args:
        rows: The policies of one scene.
        column: Name of a member of ``PolicySummary``.
        write: How the value is written.
    """
    more_is_better = {name: more for name, more, _ in _COLUMNS}[column]
    values = [v for row in rows if (v := getattr(row, column)) is not None]
    if len(values) < 2:
        return None
    return write(max(values) if more_is_better else min(values))


def _view(scene: SceneReport, summaries: Sequence[PolicySummary], *, hero: str) -> _SceneView:
    rows = [row for row in summaries if row.scene == scene.name]
    trials = {row.policy: _trials(scene, row.policy) for row in rows}
    best = {name: best_of(rows, name, write=write) for name, _, write in _COLUMNS}
    return _SceneView(
        scene=scene,
        timeline=lay_out(scene, hero=hero),
        rows={row.policy: _row(row, best, trials[row.policy]) for row in rows},
    )


def _trials(scene: SceneReport, policy: str) -> dict[str, int]:
    """How many requests stand behind each share of a policy."""
    points = [p for p in scene.points if p.policy == policy]
    refused = sum(p.exit_index is None for p in points)
    judged = sum(p.exit_index is not None and p.correct is not None for p in points)
    return {"dsr": len(points), "accuracy": judged, "accuracy_in_time": judged + refused}


def _row(summary: PolicySummary, best: dict[str, str | None], trials: dict[str, int]) -> _Row:
    cells: dict[str, _Cell] = {}
    for name, _, write in _COLUMNS:
        value = getattr(summary, name)
        if value is None:
            cells[name] = _Cell(why=_why_empty(summary, name))
            continue
        interval = ""
        if trials.get(name):
            low, high = wilson_interval(value, trials[name])
            interval = f"{100 * low:.1f}–{100 * high:.1f}"
        text = write(value)
        cells[name] = _Cell(text=text, is_best=text == best[name], interval=interval)
    in_time = summary.dsr or 0.0
    # Without labels what was in time counts as such, without a claim about the answers.
    right = in_time if summary.accuracy_in_time is None else summary.accuracy_in_time
    wrong = max(0.0, in_time - right)
    late = 1.0 - in_time if summary.dsr is not None else 0.0
    return _Row(
        summary=summary,
        cells=cells,
        right=round(100 * right, 2),
        wrong=round(100 * wrong, 2),
        late=round(100 * late, 2),
    )


def _why_empty(summary: PolicySummary, column: str) -> str:
    if not summary.requests:
        return "no requests"
    if summary.p50_s is None:
        return "no answers"
    return "no labels" if column.startswith("accuracy") else "not known"


def _keep_together(text: str) -> str:
    """Keep a number and its per cent sign on one line."""
    return text.replace(" %", "\u00a0%")
