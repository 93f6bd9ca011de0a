"""The demo: one classifier, four policies, the same images, three scenes in real time."""

from __future__ import annotations

import datetime as dt
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edgewise.bench.background import Load, LoadSchedule
from edgewise.report.records import (
    DemoReport,
    ExitRow,
    LoadSpan,
    RequestPoint,
    SceneReport,
    summarise,
)
from edgewise.units import format_duration

if TYPE_CHECKING:
    from edgewise.clock import Clock
    from edgewise.runtime import Session

Float32 = npt.NDArray[np.float32]
POLICIES = ("full_depth", "static_table", "branchynet", "edgewise")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What one scene asks of the machine.

    Attributes:
        name: Short.
        title: For people.
        description: One or two sentences.
        budget_ratio: (share of the scene, budget as a multiple of the full-depth time) in order;
            each holds until the next.
        loads: (start, stop) as shares of the scene, and the load that runs between them.
    """

    name: str
    title: str
    description: str
    budget_ratio: tuple[tuple[float, float], ...]
    loads: tuple[tuple[float, float, Load], ...] = ()

    def budget_at(self, share: float) -> float:
        """Budget as a multiple of the full-depth time, at a share of the scene."""
        value = self.budget_ratio[0][1]
        for start, ratio in self.budget_ratio:
            if start <= share:
                value = ratio
        return value


def default_scenes(cores: int, *, least_ratio: float = 0.3) -> tuple[Scene, ...]:
    """Calm; other programs that come and go; a budget that shrinks.

    Args:
        cores: Usable cores: there are one more busy programs than cores, so that every core is
            contended.
        least_ratio: Where the shrinking budget ends, as a multiple of the full-depth time; what the
            first exit needs with some room.
    """
    hogs = cores + 1
    steps = 11
    shrinking = tuple(
        (i / steps, 1.5 - (1.5 - least_ratio) * i / (steps - 1)) for i in range(steps)
    )
    return (
        Scene(
            name="calm",
            title="A calm machine",
            description="Nothing else runs. The budget is half as much again as the whole network"
            " takes, so everybody should be in time.",
            budget_ratio=((0.0, 1.5),),
        ),
        Scene(
            name="load",
            title="Other programs come and go",
            description=f"Twice, {hogs} busy programs start on {cores} cores and stop again. The"
            " budget stays the same; the whole network no longer fits it.",
            budget_ratio=((0.0, 1.5),),
            loads=(
                (0.2, 0.5, Load("cpu", processes=hogs)),
                (0.65, 0.9, Load("memory", processes=hogs)),
            ),
        ),
        Scene(
            name="tightening",
            title="A budget that shrinks",
            description="The machine is calm again, but the time allowed falls step by step from"
            f" 1.5 times what the whole network takes to {least_ratio:.2g} times.",
            budget_ratio=shrinking,
        ),
    )


def play_scene(  # noqa: PLR0913 - a scene's whole circumstances
    scene: Scene,
    sessions: Sequence[Session],
    images: Float32,
    labels: npt.NDArray[np.int64],
    *,
    duration_s: float,
    full_depth_s: float,
    clock: Clock,
    on_progress: Callable[[float], None] | None = None,
) -> SceneReport:
    """Play one scene: every image goes to every policy, whose order rotates.

    Args:
        scene: What to play.
        sessions: One per policy, sharing a program.
        images: [N, C, H, W] inputs, used in turn.
        labels: [N].
        duration_s: How long.
        full_depth_s: What budgets are multiples of.
        clock: Real time.
        on_progress: Told the share played.
    """
    points: list[RequestPoint] = []
    schedule = LoadSchedule(
        [(a * duration_s, b * duration_s, load) for a, b, load in scene.loads], clock=clock
    )
    with schedule:
        begin_s = clock.now_s()
        n = 0
        while (share := (clock.now_s() - begin_s) / duration_s) < 1.0:
            if on_progress is not None:
                on_progress(share)
            budget_s = scene.budget_at(share) * full_depth_s
            x, label = images[n % len(images)][None], int(labels[n % len(images)])
            for turn in range(len(sessions)):
                session = sessions[(turn + n) % len(sessions)]
                start_s = clock.now_s()
                answer = session.run(x, budget_s=budget_s, arrival_s=start_s)
                points.append(
                    RequestPoint(
                        policy=session.policy.name,
                        scene=scene.name,
                        start_s=start_s - begin_s,
                        latency_s=answer.observed_s,
                        budget_s=budget_s,
                        exit_index=answer.exit_index,
                        num_exits=session.model.num_exits,
                        depth_ratio=answer.depth_ratio,
                        correct=None if answer.label is None else answer.label == label,
                        predicted_s=answer.predicted_s,
                        met=answer.met,
                        reason=answer.reason,
                    )
                )
            n += 1
    return SceneReport(
        name=scene.name,
        title=scene.title,
        description=scene.description,
        duration_s=duration_s,
        budget_line=tuple((a * duration_s, r * full_depth_s) for a, r in scene.budget_ratio),
        load_spans=tuple(
            LoadSpan(start_s=p.start_s, stop_s=p.stop_s, label=p.label) for p in schedule.played
        ),
        points=tuple(points),
    )


def assemble(  # noqa: PLR0913 - the facts a report carries
    scenes: Sequence[SceneReport],
    sessions: Sequence[Session],
    *,
    device: dict[str, str],
    command: str,
    data_source: str,
    notes: Sequence[str],
    sample_accuracy: Sequence[float] | None = None,
) -> DemoReport:
    """Put the scenes of a demo and the facts around them into one report."""
    session = sessions[0]
    model, costs = session.model, session.costs
    points = [p for s in scenes for p in s.points]
    order = {name: i for i, name in enumerate(POLICIES)}
    summaries = sorted(
        summarise(points),
        key=lambda s: ([c.name for c in scenes].index(s.scene), order.get(s.policy, 99)),
    )
    return DemoReport(
        title="Answers in time, on this machine",
        created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        device=device,
        model={
            "name": model.name,
            "exits": str(model.num_exits),
            "full depth": f"{format_duration(costs.full_depth_s())} (median, {costs.provenance})",
            "data": data_source,
            "python": platform.python_version(),
        },
        backend=session.program.backend,
        thread_policy=f"{session.program.threads} thread, no spinning",
        command=command,
        scenes=tuple(scenes),
        summaries=tuple(summaries),
        exit_table=exit_rows(session, sample_accuracy),
        notes=tuple(notes),
        provenance=costs.provenance,
    )


def exit_rows(session: Session, sample_accuracy: Sequence[float] | None) -> tuple[ExitRow, ...]:
    """Depth, accuracy and cost of each exit, as profiled on the calm machine."""
    costs = session.costs
    rows = []
    samples = costs.samples
    for e in session.model.exits:
        total = upper = None
        if samples.size and samples.shape[1] == 2 * costs.num_exits:
            way = samples[:, 0 : 2 * e.index + 1 : 2].sum(axis=1) + samples[:, 2 * e.index + 1]
            total, upper = float(np.median(way)), float(np.quantile(way, 0.98))
        rows.append(
            ExitRow(
                name=f"{e.index} · {e.name}",
                depth_ratio=e.depth_ratio,
                accuracy=sample_accuracy[e.index] if sample_accuracy is not None else e.accuracy,
                median_s=total if total is not None else costs.remaining_s(0, e.index),
                upper_s=upper,
            )
        )
    return tuple(rows)


__all__ = [
    "POLICIES",
    "Scene",
    "assemble",
    "default_scenes",
    "exit_rows",
    "play_scene",
]
