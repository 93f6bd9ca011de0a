from __future__ import annotations

import numpy as np
import pytest

from edgewise.backends import load_program
from edgewise.bench.background import Load
from edgewise.bench.demo import POLICIES, Scene, assemble, default_scenes, play_scene
from edgewise.clock import MonotonicClock
from edgewise.frontends.outline import outline_model
from edgewise.model import Validation
from edgewise.predict import CostTable
from edgewise.report.records import DemoReport
from edgewise.runtime import Session

CALM = Scene(name="calm", title="Calm", description="Nothing else.", budget_ratio=((0.0, 1.5),))


def make_sessions(*, cost_s: float = 2e-4) -> list[Session]:
    rng = np.random.default_rng(0)
    model = outline_model(4)
    labels = rng.integers(0, 10, 50)
    model = model.with_heads(
        {},
        accuracy=dict(enumerate((0.6, 0.7, 0.8, 0.9))),
        validation=Validation(logits=rng.normal(size=(4, 50, 10)), labels=labels),
    )
    clock = MonotonicClock()
    program = load_program(model, "null", clock=clock, cost_s=lambda _: cost_s)
    costs = CostTable.from_costs([cost_s] * 4, [cost_s / 10] * 3 + [0.0])
    return [Session(program, costs, policy=p, clock=clock) for p in POLICIES]


def images() -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((7, 3, 8, 8), dtype=np.float32), np.arange(7) % 10


def test_a_budget_holds_until_the_next_one_begins() -> None:
    scene = Scene(
        name="s", title="S", description=".", budget_ratio=((0.0, 2.0), (0.5, 1.0), (0.75, 0.5))
    )

    assert [scene.budget_at(t) for t in (0.0, 0.49, 0.5, 0.74, 0.75, 0.99)] == [
        2.0, 2.0, 1.0, 1.0, 0.5, 0.5,
    ]  # fmt: skip


def test_the_scenes_are_calm_then_contended_on_every_core_then_tighter() -> None:
    calm, load, tightening = default_scenes(4, least_ratio=0.4)

    assert not calm.loads
    assert not tightening.loads
    assert [len(s.loads) for s in (calm, load, tightening)] == [0, 2, 0]
    ratios = [r for _, r in tightening.budget_ratio]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[-1] == pytest.approx(0.4)


def test_every_image_goes_to_every_policy_in_an_order_that_rotates() -> None:
    x, y = images()

    scene = play_scene(
        CALM, make_sessions(), x, y, duration_s=0.3, full_depth_s=0.01, clock=MonotonicClock()
    )

    assert len(scene.points) >= 3 * len(POLICIES)
    size = len(POLICIES)
    rounds = [scene.points[i : i + size] for i in range(0, len(scene.points), size)]
    assert all({p.policy for p in turn} == set(POLICIES) for turn in rounds)
    assert len({turn[0].policy for turn in rounds[: len(POLICIES)]}) > 1
    assert [p.start_s for p in scene.points] == sorted(p.start_s for p in scene.points)


def test_a_load_runs_only_where_the_scene_says_and_its_real_times_are_reported() -> None:
    x, y = images()
    load = Load("cpu", duty_ratio=0.05)
    scene = Scene(
        name="load",
        title="Load",
        description=".",
        budget_ratio=((0.0, 1.5),),
        loads=((0.2, 0.6, load),),
    )

    played = play_scene(
        scene, make_sessions(), x, y, duration_s=1.5, full_depth_s=0.01, clock=MonotonicClock()
    )

    (span,) = played.load_spans
    assert span.start_s >= 0.3 - 1e-3
    assert span.start_s < span.stop_s
    assert not load.is_running


def test_a_failing_session_leaves_no_load_behind() -> None:
    x, y = images()
    load = Load("cpu", duty_ratio=0.05)
    scene = Scene(
        name="load",
        title="Load",
        description=".",
        budget_ratio=((0.0, 1.5),),
        loads=((0.0, 1.0, load),),
    )
    sessions = make_sessions()

    def stop(share: float) -> None:
        if share > 0.3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play_scene(
            scene,
            sessions,
            x,
            y,
            duration_s=1.0,
            full_depth_s=0.01,
            clock=MonotonicClock(),
            on_progress=stop,
        )

    assert not load.is_running


def test_the_report_keeps_scenes_and_policies_in_order_and_survives_json() -> None:
    x, y = images()
    sessions = make_sessions()
    scenes = [
        play_scene(CALM, sessions, x, y, duration_s=0.2, full_depth_s=0.01, clock=MonotonicClock())
    ]

    report = assemble(
        scenes, sessions, device={"processor": "test"}, command="edgewise demo",
        data_source="zeros", notes=("n",),
    )  # fmt: skip

    assert [s.policy for s in report.summaries] == list(POLICIES)
    assert len(report.exit_table) == 4
    assert [row.accuracy for row in report.exit_table] == [0.6, 0.7, 0.8, 0.9]
    assert report.provenance == sessions[0].costs.provenance
    assert DemoReport.from_json(report.to_json()) == report
