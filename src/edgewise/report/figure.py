"""The time line of one scene as a picture file, for a README or a paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edgewise.errors import ConfigError, DataError, nearest_names
from edgewise.report.records import DemoReport, RequestPoint, SceneReport
from edgewise.report.wording import HERO, format_share, headline, say_policy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _SOFT, _LATE, _LOAD = "#1d2329", "#5b646d", "#c2410c", "#6b7280"
_SUFFIXES = (".png", ".svg", ".pdf")


def demo_figure(
    report: DemoReport, path: str | Path, *, scene: str | None = None, hero: str = HERO
) -> Path:
    """Draw one scene: latency of each request against its budget, one panel for each policy.

    Args:
        report: What was measured.
        path: Where to write; the suffix says what: ``.png``, ``.svg`` or ``.pdf``.
        scene: Name of the scene; that of the headline by default.
        hero: The policy the headline is about.

    Returns:
        The path that was written.

    Raises:
        ConfigError: matplotlib is not installed, or the suffix or the scene is unknown.
        DataError: The scene has no request, or the file cannot be written.
    """
    path = Path(path)
    if path.suffix not in _SUFFIXES:
        raise ConfigError(
            f"cannot draw a picture as {path.name!r}", help=f"end it in {', '.join(_SUFFIXES)}"
        )
    chosen = _choose(report, scene, hero)
    by_policy: dict[str, list[RequestPoint]] = {}
    for point in chosen.points:
        by_policy.setdefault(point.policy, []).append(point)
    if not by_policy:
        raise DataError(f"the scene {chosen.name!r} has no request to draw")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "the figure of a demo needs matplotlib, which is not installed",
            help="pip install 'edgewise[report]'",
        ) from error
    figure = Figure(figsize=(9.0, 0.9 + 1.25 * len(by_policy)), layout="constrained")
    grid = figure.subplots(len(by_policy), 1, sharex=True, sharey=True, squeeze=False)
    dsr = {row.policy: row.dsr for row in report.summaries if row.scene == chosen.name}
    for axes, (policy, points) in zip(grid[:, 0], by_policy.items(), strict=True):
        _draw(axes, chosen, points)
        axes.set_title(
            f"{say_policy(policy)}: {format_share(dsr.get(policy))} in time",
            loc="left",
            fontsize=10,
            fontweight="bold" if policy == hero else "normal",
            color=_INK,
        )
    grid[-1, 0].set_xlabel(
        "time since the scene's start, s\n"
        "dot: in time, the darker the deeper · ×: late · dashed: budget · grey: other programs ran",
        color=_SOFT,
        fontsize=9,
    )
    figure.supylabel(f"latency, ms ({report.provenance})", fontsize=10, color=_SOFT)
    figure.suptitle(chosen.title, fontsize=12, fontweight="bold", color=_INK)
    try:
        figure.savefig(path, dpi=160)
    except OSError as error:
        raise DataError(f"the figure could not be written to {path}: {error}") from error
    return path


def _choose(report: DemoReport, name: str | None, hero: str) -> SceneReport:
    scenes = {scene.name: scene for scene in report.scenes}
    wanted = name or headline(report, hero=hero).scene or next(iter(scenes), "")
    if wanted not in scenes:
        raise ConfigError(f"no scene {wanted!r} in this report", help=nearest_names(wanted, scenes))
    return scenes[wanted]


def _draw(axes: Axes, scene: SceneReport, points: Sequence[RequestPoint]) -> None:
    """Draw load, budget and requests of one policy."""
    from matplotlib.ticker import LogLocator, NullLocator

    for span in scene.load_spans:
        axes.axvspan(span.start_s, span.stop_s, color=_LOAD, alpha=0.13, linewidth=0)
    if scene.budget_line:
        times_s, budgets_s = zip(*sorted(scene.budget_line), strict=True)
        axes.step(
            [*times_s, scene.duration_s],
            [1e3 * b for b in (*budgets_s, budgets_s[-1])],
            where="post",
            color=_INK,
            linestyle=(0, (5, 2)),
            linewidth=1.1,
        )
    met = [p for p in points if p.met]
    late = [p for p in points if not p.met and p.exit_index is not None]
    axes.scatter(
        [p.start_s for p in met],
        [1e3 * p.latency_s for p in met],
        c=[-(p.depth_ratio or 0.0) for p in met],  # reversed: deep is dark
        cmap="viridis",
        vmin=-1.0,
        vmax=0.2,
        s=11,
        linewidths=0,
        zorder=3,
    )
    axes.scatter(
        [p.start_s for p in late],
        [1e3 * p.latency_s for p in late],
        marker="x",
        color=_LATE,
        s=16,
        linewidths=1.2,
        zorder=3,
    )
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlim(0.0, scene.duration_s)
    axes.tick_params(colors=_SOFT, labelsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#d5d3cc")
