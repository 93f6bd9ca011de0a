"""Where everything of a scene's time line goes: plain geometry, no markup.

Horizontal places are per cent of the plot's width, so that a page can be as wide as its reader's
screen without scaling its text; vertical ones are pixels from the top.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgewise.report.records import RequestPoint, SceneReport
from edgewise.report.wording import HERO
from edgewise.units import format_duration

PANEL_HEIGHT = 108.0
STRIP_HEIGHT = 40.0
NUM_LEVELS = 9
MAX_POINTS = 3000
_PAD = 7.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One request. ``level`` is its exit's colour, 0 (first) to 8 (last); ``kind`` its shape."""

    x: float
    y: float
    level: int
    kind: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A rectangle with a colour level or a label; ``room`` is the width its label may take."""

    x: float
    width: float
    room: float = 0.0
    y: float = 0.0
    height: float = 0.0
    level: int = 0
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A labelled place on an axis."""

    at: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """The requests of one policy; ``strip`` shows its exits as bars, where wanted."""

    policy: str
    marks: tuple[Mark, ...]
    strip: tuple[Box, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One scene, ready to draw; all panels share both axes.

    Attributes:
        panels: One for each policy.
        loads: Background loads.
        late: The areas above the budget.
        budget: (x1, y1, x2, y2) of each piece of the budget line.
        x_ticks: Time since the scene's start.
        y_ticks: Latency, logarithmic.
        drawn: How many requests are drawn.
        total: How many there are.
        every: Of each policy every so-manieth request is drawn.
    """

    panels: tuple[Panel, ...]
    loads: tuple[Box, ...]
    late: tuple[Box, ...]
    budget: tuple[tuple[float, float, float, float], ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    drawn: int
    total: int
    every: int

    @property
    def any_refused(self) -> bool:
        """Whether a drawn request was refused."""
        return any(mark.kind == "refused" for panel in self.panels for mark in panel.marks)


def exit_level(exit_index: int, num_exits: int) -> int:
    """Colour level of an exit, 0 for the first to 8 for the last.

    Example:
        >>> [exit_level(e, 5) for e in range(5)]
        [0, 2, 4, 6, 8]
    """
    if num_exits <= 1:
        return NUM_LEVELS - 1
    return round(exit_index * (NUM_LEVELS - 1) / (num_exits - 1))


def lay_out(scene: SceneReport, *, hero: str = HERO, max_points: int = MAX_POINTS) -> Timeline:
    """Place everything of one scene.

    Args:
        scene: What happened.
        hero: The policy whose exits get a strip.
        max_points: Above this, every second, third, … request of each policy is drawn.
    """
    by_policy: dict[str, list[RequestPoint]] = {}
    for point in scene.points:
        by_policy.setdefault(point.policy, []).append(point)
    every = max(1, math.ceil(len(scene.points) / max_points))
    shown = {
        policy: sorted(points, key=lambda p: p.start_s)[::every]
        for policy, points in by_policy.items()
    }
    end_s = max([scene.duration_s, *(p.start_s for p in scene.points)]) or 1.0
    axis = _LogAxis(
        [p.latency_s for points in shown.values() for p in points]
        + [budget_s for _, budget_s in scene.budget_line]
    )

    def x_of(at_s: float) -> float:
        return round(100.0 * min(max(at_s / end_s, 0.0), 1.0), 2)

    def span(start_s: float, stop_s: float) -> tuple[float, float]:
        return x_of(start_s), round(x_of(stop_s) - x_of(start_s), 2)

    budget, late = _budget(scene, end_s, axis, x_of)
    boxes = sorted((*span(load.start_s, load.stop_s), load.label) for load in scene.load_spans)
    panels = []
    for policy, points in shown.items():
        marks = tuple(_mark(p, x_of(p.start_s), axis) for p in points)
        strip: list[Box] = []
        for point, after_s in zip(points, [*(p.start_s for p in points[1:]), end_s], strict=True):
            if policy != hero or point.exit_index is None:
                continue
            x, width = span(point.start_s, after_s)
            # With unequal stages the depth says more than the number of the exit.
            height = round((STRIP_HEIGHT - 2) * (point.depth_ratio or 0.0) + 2, 1)
            level = exit_level(point.exit_index, point.num_exits)
            label = say_exit(point)
            y = STRIP_HEIGHT - height
            strip.append(Box(x=x, width=width, y=y, height=height, level=level, label=label))
        panels.append(Panel(policy=policy, marks=marks, strip=tuple(strip)))
    return Timeline(
        panels=tuple(panels),
        loads=_lanes(boxes),
        late=late,
        budget=budget,
        x_ticks=tuple(Tick(at=x_of(t), label=f"{t:g} s") for t in _even_ticks(end_s)),
        y_ticks=axis.ticks(),
        drawn=sum(map(len, shown.values())),
        total=len(scene.points),
        every=every,
    )


def _lanes(boxes: list[tuple[float, float, str]]) -> tuple[Box, ...]:
    """Give loads that run at the same time a line each; ``y`` is the number of the line."""
    lines: list[list[tuple[float, float, str]]] = []
    for box in boxes:
        free = (line for line in lines if line[-1][0] + line[-1][1] <= box[0])
        line = next(free, None)
        if line is None:
            lines.append([box])
        else:
            line.append(box)
    return tuple(
        Box(x=x, width=width, room=round(after - x, 2), y=float(number), label=label)
        for number, line in enumerate(lines)
        for (x, width, label), after in zip(line, [*(b[0] for b in line[1:]), 100.0], strict=True)
        if after > x
    )


def say_exit(point: RequestPoint) -> str:
    """Which exit answered, in words."""
    if point.exit_index is None:
        return "refused"
    depth = "" if point.depth_ratio is None else f", {point.depth_ratio:.0%} of the depth"
    return f"exit {point.exit_index + 1} of {point.num_exits}{depth}"


def _mark(point: RequestPoint, x: float, axis: _LogAxis) -> Mark:
    lines = [
        f"{point.start_s:.2f} s: {say_exit(point)}",
        f"took {format_duration(point.latency_s)} of {format_duration(point.budget_s)}"
        + ("" if point.met else ", refused" if point.exit_index is None else ", too late"),
    ]
    if point.predicted_s is not None:
        lines.append(f"predicted {format_duration(point.predicted_s)}")
    if point.correct is not None:
        lines.append("right answer" if point.correct else "wrong answer")
    if point.reason:
        lines.append(point.reason)
    refused = point.exit_index is None
    return Mark(
        x=x,
        y=_PAD if refused else axis.y_of(point.latency_s),
        level=exit_level(point.exit_index or 0, point.num_exits),
        kind="refused" if refused else "met" if point.met else "late",
        title="\n".join(lines),
    )


def _budget(
    scene: SceneReport, end_s: float, axis: _LogAxis, x_of: Callable[[float], float]
) -> tuple[tuple[tuple[float, float, float, float], ...], tuple[Box, ...]]:
    """Pieces of the step line, and the boxes above it."""
    lines: list[tuple[float, float, float, float]] = []
    late: list[Box] = []
    steps = sorted(scene.budget_line)
    for index, (start_s, budget_s) in enumerate(steps):
        stop_s = steps[index + 1][0] if index + 1 < len(steps) else end_s
        x1, x2, y = x_of(start_s), x_of(stop_s), axis.y_of(budget_s)
        if lines and lines[-1][3] != y:
            lines.append((x1, lines[-1][3], x1, y))
        lines.append((x1, y, x2, y))
        late.append(Box(x=x1, width=round(x2 - x1, 2), height=y))
    return tuple(lines), tuple(late)


class _LogAxis:
    """Latency in seconds to pixels from the top of a panel."""

    def __init__(self, values_s: Sequence[float]) -> None:
        seen = [v for v in values_s if v > 0] or [0.001, 0.1]
        low, high = math.log10(min(seen)), math.log10(max(seen))
        spare = max(0.0, 0.6 - (high - low)) / 2  # at least a factor of four
        self.low, self.high = low - spare, high + spare

    def y_of(self, value_s: float) -> float:
        share = (math.log10(value_s) - self.low) / (self.high - self.low) if value_s > 0 else 0.0
        share = min(max(share, 0.0), 1.0)
        return round(PANEL_HEIGHT - _PAD - share * (PANEL_HEIGHT - 2 * _PAD), 1)

    def ticks(self) -> tuple[Tick, ...]:
        for steps in ((1, 2, 5), (1, 3), (1,)):
            values = [
                step * 10.0**decade
                for decade in range(math.floor(self.low), math.ceil(self.high) + 1)
                for step in steps
                if self.low <= math.log10(step) + decade <= self.high
            ]
            if len(values) <= 5:
                break
        return tuple(Tick(at=self.y_of(v), label=format_duration(v)) for v in values)


def _even_ticks(end_s: float) -> list[float]:
    steps = [m * 10.0**e for e in range(-3, 6) for m in (1, 2, 5)]
    step = next((s for s in steps if end_s / s <= 6), end_s)
    return [round(i * step, 6) for i in range(int(end_s / step + 1e-9) + 1)]
