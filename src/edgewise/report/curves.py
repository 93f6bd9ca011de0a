"""Accuracy over latency as a picture file, one curve for each policy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from edgewise.errors import ConfigError, DataError
from edgewise.report.evaluation import Evaluation
from edgewise.report.wording import HERO, say_policy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK, _SOFT = "#1d2329", "#5b646d"
_SUFFIXES = (".png", ".svg", ".pdf")
_MARKS = "osD^vPX*<>hp"


def check_figure_path(path: str | Path) -> Path:
    """Return a path whose suffix says a kind of picture.

    Raises:
        ConfigError: It does not.
    """
    path = Path(path)
    if path.suffix not in _SUFFIXES:
        raise ConfigError(
            f"cannot draw a picture as {path.name!r}", help=f"end it in {', '.join(_SUFFIXES)}"
        )
    return path


def accuracy_figure(evaluation: Evaluation, path: str | Path, *, hero: str = HERO) -> Path:
    """Draw two panels over mean latency: accuracy of all answers, and of answers in time.

    Args:
        evaluation: What was measured; each policy's points are its budgets.
        path: Where to write; ``.png``, ``.svg`` or ``.pdf``.
        hero: The policy drawn in ink.

    Returns:
        The path that was written.

    Raises:
        ConfigError: matplotlib is not installed, or the suffix is unknown.
        DataError: There is nothing to draw, or the file cannot be written.
    """
    path = check_figure_path(path)
    if not any(row.mean_s is not None for row in evaluation.rows):
        raise DataError("no request was answered: there is no latency to draw")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "this figure needs matplotlib, which is not installed",
            help="pip install 'edgewise[report]'",
        ) from error
    figure = Figure(figsize=(11.0, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharex=True)
    _draw(left, evaluation, "accuracy", hero)
    _draw(right, evaluation, "accuracy_in_time", hero)
    left.set_title("right answers", loc="left", fontsize=10, color=_INK)
    right.set_title("right answers in time", loc="left", fontsize=10, color=_INK)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=8, frameon=False)
    figure.supxlabel(
        f"mean latency, ms ({evaluation.provenance}); dashed: the budgets,"
        f" {', '.join(f'{100 * b:.4g} %' for b in evaluation.budgets)} of the whole network",
        fontsize=9,
        color=_SOFT,
    )
    figure.suptitle(
        f"{evaluation.model} on {evaluation.backend}", fontsize=12, fontweight="bold", color=_INK
    )
    return save_figure(figure, path)


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a figure and return where.

    Raises:
        DataError: The file cannot be written.
    """
    try:
        figure.savefig(path, dpi=160)
    except OSError as error:
        raise DataError(f"the figure could not be written to {path}: {error}") from error
    return path


def style_axes(axes: Axes) -> None:
    """Two quiet spines and quiet numbers."""
    axes.tick_params(colors=_SOFT, labelsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#d5d3cc")


def _draw(axes: Axes, evaluation: Evaluation, what: str, hero: str) -> None:
    for ratio in evaluation.budgets:
        axes.axvline(
            1e3 * ratio * evaluation.full_depth_s,
            color="#d5d3cc",
            linestyle=(0, (4, 3)),
            linewidth=0.8,
            zorder=0,
        )
    for index, policy in enumerate(evaluation.policies):
        points = []
        for row in evaluation.rows:
            estimate = getattr(row, what)
            if row.policy == policy and row.mean_s is not None and estimate is not None:
                points.append((1e3 * row.mean_s, 100 * estimate.value))
        if not points:
            continue
        bold = policy == hero
        axes.plot(
            *zip(*points, strict=True),
            marker=_MARKS[index % len(_MARKS)],
            markersize=6 if bold else 4,
            linewidth=2.2 if bold else 1.0,
            color=_INK if bold else None,
            zorder=4 if bold else 3,
            label=say_policy(policy),
        )
    axes.set_ylabel("%", color=_SOFT)
    style_axes(axes)
