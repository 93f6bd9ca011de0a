"""A chart as a record, and as a picture file: what a claim shows besides its table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from edgewise.errors import ConfigError, DataError
from edgewise.report.curves import check_figure_path, save_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _SOFT = "#1d2329", "#5b646d"
# Told apart by people who see few colours too; ink comes first, for the hero.
_COLOURS = ("#1d2329", "#c2410c", "#2f6fab", "#7a9a3a", "#8a5fa8", "#b8860b", "#4aa3a2", "#9c6b4f")
_MARKS = "os^Dv*Px"


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line, or one set of bars.

    Attributes:
        name: For the legend.
        y: Values; ``None`` where there is none.
        x: Positions, or names of groups for bars; the same for all bars of a chart.
        low: Lower ends of 95 % intervals; empty where there are none.
        high: Upper ends.
    """

    name: str
    y: Sequence[float | None]
    x: Sequence[float | str]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One panel.

    Attributes:
        title: What it shows.
        x_label: With its unit.
        y_label: With its unit.
        series: In order.
        provenance: ``"measured"``, ``"simulated"``, ``"estimated"`` or ``"paper"`` joined to one of
            them; printed on the panel.
        kind: Lines, steps, points or grouped bars.
        y_range: Ends of the axis; by the values where ``None``.
        log_x: Whether positions are spread by their logarithm.
    """

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    provenance: str
    kind: Literal["line", "step", "points", "bars"] = "line"
    y_range: tuple[float, float] | None = None
    log_x: bool = False


def draw_charts(
    charts: Sequence[Chart], path: str | Path, *, title: str = "", columns: int = 2
) -> Path:
    """Draw charts as panels of one picture.

    Args:
        charts: At least one.
        path: Where to write; ``.png``, ``.svg`` or ``.pdf``.
        title: Above all.
        columns: Panels side by side, at most.

    Returns:
        The path that was written.

    Raises:
        ConfigError: matplotlib is not installed, or the suffix is unknown.
        DataError: There is nothing to draw, or the file cannot be written.
    """
    path = check_figure_path(path)
    if not any(s.y for chart in charts for s in chart.series):
        raise DataError("there is nothing to draw")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "this figure needs matplotlib, which is not installed",
            help="pip install 'edgewise[report]'",
        ) from error
    columns = min(columns, len(charts))
    rows = -(-len(charts) // columns)
    figure = Figure(figsize=(5.6 * columns, 0.4 + 3.9 * rows), layout="constrained")
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, chart in zip(grid, charts, strict=False):
        _draw(axes, chart)
    for axes in grid[len(charts) :]:
        axes.set_visible(False)
    figure.suptitle(title, fontsize=12, fontweight="bold", color=_INK)
    return save_figure(figure, path)


def _draw(axes: Axes, chart: Chart) -> None:
    draw = _bars if chart.kind == "bars" else _lines
    draw(axes, chart)
    if chart.log_x:
        axes.set_xscale("log")
    if chart.y_range is not None:
        axes.set_ylim(*chart.y_range)
    if chart.kind == "bars" and len(chart.series) > 1:
        _leave_room_for_the_legend(axes)
    axes.set_title(f"{chart.title} ({chart.provenance})", loc="left", fontsize=10, color=_INK)
    axes.set_xlabel(chart.x_label, fontsize=9)
    axes.set_ylabel(chart.y_label, fontsize=9)
    if len(chart.series) > 1:
        across = min(len(chart.series), 4) if chart.kind == "bars" else 1
        axes.legend(
            frameon=False, fontsize=8, ncols=across, loc="upper left" if across > 1 else "best"
        )
    style_axes(axes)


def _leave_room_for_the_legend(axes: Axes) -> None:
    low, high = axes.get_ylim()
    ticks = [tick for tick in axes.get_yticks() if low <= tick <= high]
    axes.set_ylim(low, high + 0.12 * (high - low))
    axes.set_yticks(ticks)


def _lines(axes: Axes, chart: Chart) -> None:
    for n, series in enumerate(chart.series):
        colour = _COLOURS[n % len(_COLOURS)]
        x = [v for v in series.x if not isinstance(v, str)]
        names = [str(v) for v in series.x if isinstance(v, str)]
        if names:
            x = list(range(len(names)))
            axes.set_xticks(x, names)
        y = _numbers(series.y)
        many = len(x) > 40
        axes.plot(
            x,
            y,
            color=colour,
            label=series.name,
            marker="" if many and chart.kind != "points" else _MARKS[n % len(_MARKS)],
            markersize=2.5 if many else 4.5,
            linewidth=0 if chart.kind == "points" else 1.5,
            drawstyle="steps-post" if chart.kind == "step" else "default",
        )
        if series.low and series.high:
            axes.fill_between(
                x, _numbers(series.low), _numbers(series.high), color=colour, alpha=0.13, lw=0
            )


def _bars(axes: Axes, chart: Chart) -> None:
    count = len(chart.series)
    width = 0.8 / count
    for n, series in enumerate(chart.series):
        places = np.arange(len(series.y)) + (n - (count - 1) / 2) * width
        y = _numbers(series.y)
        axes.bar(
            places, y, width=0.92 * width, color=_COLOURS[n % len(_COLOURS)], label=series.name
        )
        if series.low and series.high:
            spread = np.abs(np.stack([y - _numbers(series.low), _numbers(series.high) - y]))
            axes.errorbar(places, y, yerr=spread, fmt="none", ecolor=_SOFT, lw=1, capsize=2)
    names = [str(v) for v in chart.series[0].x]
    crowded = sum(map(len, names)) > 48
    axes.set_xticks(
        np.arange(len(names)),
        names,
        rotation=25 if crowded else 0,
        ha="right" if crowded else "center",
    )


def _numbers(values: Sequence[float | None]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([np.nan if v is None else v for v in values], dtype=np.float64)
