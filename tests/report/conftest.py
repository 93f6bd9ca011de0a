"""A small demo report with everything that a page must cope with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgewise.report.records import (
    DemoReport,
    ExitRow,
    LoadSpan,
    RequestPoint,
    SceneReport,
    summarise,
)

POLICIES = ("full_depth", "static_table", "branchynet", "edgewise")


def make_point(policy: str, scene: str, index: int) -> RequestPoint:
    """Every second request of all but edgewise is late in the scene with load."""
    late = scene == "load" and policy != "edgewise" and index % 2 == 1
    exit_index = 2 if policy == "full_depth" else index % 3
    return RequestPoint(
        policy=policy,
        scene=scene,
        start_s=float(index),
        latency_s=0.030 if late else 0.004 * (exit_index + 1),
        budget_s=0.015,
        exit_index=exit_index,
        num_exits=3,
        depth_ratio=(0.25, 0.5, 1.0)[exit_index],
        correct=index % 5 != 0,
        predicted_s=None if policy == "full_depth" else 0.005,
        met=not late,
        reason="deepest that fits",
    )


def make_scene(name: str, title: str, *, loaded: bool) -> SceneReport:
    return SceneReport(
        name=name,
        title=title,
        description=f"What {name} is about.",
        duration_s=10.0,
        budget_line=((0.0, 0.020), (5.0, 0.015)),
        load_spans=(LoadSpan(start_s=2.0, stop_s=6.0, label="2 × cpu"),) if loaded else (),
        points=tuple(make_point(policy, name, i) for i in range(10) for policy in POLICIES),
    )


def with_scenes(report: DemoReport, *scenes: SceneReport) -> DemoReport:
    """The report with other scenes and the summaries that belong to them."""
    summaries = summarise(point for scene in scenes for point in scene.points)
    return replace(report, scenes=scenes, summaries=tuple(summaries))


@pytest.fixture
def report() -> DemoReport:
    empty = DemoReport(
        title="A demo",
        created="2026-01-02T03:04:05Z",
        device={"processor": "One", "memory": "2 GiB"},
        model={"network": "Net"},
        backend="onnxruntime:CPU",
        thread_policy="1 thread",
        command="edgewise demo",
        scenes=(),
        summaries=(),
        exit_table=(
            ExitRow(name="early", depth_ratio=0.25, accuracy=0.7, median_s=0.004, upper_s=0.005),
            ExitRow(name="middle", depth_ratio=0.5, accuracy=0.8, median_s=0.008, upper_s=0.009),
            ExitRow(name="last", depth_ratio=1.0),
        ),
        notes=("The machine was noisy.",),
    )
    return with_scenes(
        empty,
        make_scene("calm", "A calm machine", loaded=False),
        make_scene("load", "Other programs run", loaded=True),
    )
