"""Tenants with exits: the suffix leaves early under a deadline, and the planner counts that."""

from __future__ import annotations

import dataclasses
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgewise.backends import load_program
from edgewise.backends.null import NullProgram
from edgewise.backends.piece import ArraySpec, Piece, load_piece
from edgewise.backends.simulated_accelerator import SimulatedAccelerator
from edgewise.clock import VirtualClock
from edgewise.device.accelerator import Accelerator
from edgewise.errors import ConfigError, ModelError
from edgewise.frontends.outline import outline_model
from edgewise.model import StagedModel
from edgewise.placement.plan import make_placement
from edgewise.placement.problem import Problem, Tenant
from edgewise.predict import CostTable
from edgewise.profiles.partition import PartitionProfile
from edgewise.runtime.session import Session
from edgewise.runtime.tenants.engine import TenantEngine
from edgewise.runtime.tenants.records import TenantModel
from edgewise.runtime.tenants.routes import deadline_with_room
from edgewise.runtime.tenants.staged import StagedCuttable, suffix_work

STAGES = 4
STAGE_S, HEAD_S = 10e-3, 1e-3
COSTS = CostTable.from_costs([STAGE_S] * STAGES, [HEAD_S] * (STAGES - 1) + [0.0])
DEVICE = Accelerator(
    name="toy", sram_bytes=1 << 20, in_bytes_per_s=1e9, out_bytes_per_s=1e9, fixed_s=1e-3
)


def cost_s(unit: str) -> float:
    kind, _, where = unit.partition(":")
    if kind == "head":
        return float(COSTS.head_s[int(where)])
    start, stop = map(int, where.split("-"))
    return (stop - start) * STAGE_S


class Nothing(Piece):
    """A prefix of the right shape that computes nothing."""

    def __init__(self, stop: ArraySpec, start: ArraySpec) -> None:
        self.input, self.output, self.threads = start, stop, 1

    def run(self, x: Any) -> Any:  # noqa: ARG002
        return np.zeros(self.output.shape, dtype=self.output.dtype)


class Outline(StagedCuttable):
    """Without files."""

    def segment(self, start: int, stop: int) -> bytes:
        return f"{start}-{stop}".encode()


def world(deadline_s: float | None, *, place: int = 1) -> tuple[TenantEngine, VirtualClock, Any]:
    """An engine on a virtual clock, where units and the device take exactly their costs."""
    clock = VirtualClock()
    model = outline_model(STAGES)

    def load(staged: StagedModel, _: str, *, threads: int) -> NullProgram:
        return NullProgram(staged, clock=clock, cost_s=cost_s, threads=threads)

    tenant_model = Outline(model, COSTS, load=load)
    places = tenant_model.places
    specs = [ArraySpec(shape=p.shape, dtype=p.dtype) for p in places]

    def piece(content: bytes, _: str, *, threads: int) -> Piece:  # noqa: ARG001
        start, stop = map(int, content.decode().split("-"))
        return Nothing(specs[stop], specs[start])

    profile = PartitionProfile(
        model_id="outline",
        cuts=tuple(p.tensor for p in places),
        depth_ratio=np.array([p.depth_ratio for p in places]),
        prefix_bytes=np.linspace(0, 4e5, STAGES + 1),
        boundary_bytes=np.array([p.nbytes for p in places]),
        accelerator_s=np.linspace(0, 4e-3, STAGES + 1),
        cpu_s=np.array([[COSTS.remaining_s(p, STAGES - 1)] for p in range(STAGES)] + [[0.0]]),
    )
    problem = Problem.of(
        [Tenant(name="a", profile=profile, rate_per_s=1.0, deadline_s=deadline_s)], DEVICE, cores=1
    )
    engine = TenantEngine(
        [TenantModel(name="a", model=tenant_model, profile=profile, deadline_s=deadline_s)],
        make_placement(problem, [place], [0 if place == STAGES else 1], method="test"),
        device=SimulatedAccelerator(DEVICE, clock=clock, piece_loader=piece),
        clock=clock,
    )
    return engine, clock, np.zeros(places[0].shape, dtype=np.float32)


def test_a_deadline_makes_the_suffix_leave_early() -> None:
    found: dict[float | None, int | None] = {}
    for deadline_s in (None, 60e-3, 28e-3, 16e-3):
        engine, _, x = world(deadline_s)
        with engine:
            answer = engine.submit("a", x).result(10)
        assert answer.outcome == "answered", answer.reason
        found[deadline_s] = answer.exit_index
        assert answer.response_s <= (deadline_s or 1.0)

    assert list(found.values()) == [3, 3, 2, 1]


def test_a_model_wholly_on_the_device_answers_at_its_last_exit() -> None:
    engine, _, x = world(1.0, place=STAGES)
    with engine:
        answer = engine.submit("a", x).result(10)

    assert (answer.exit_index, answer.cpu_s) == (STAGES - 1, None)


def test_admission_leaves_time_for_the_nearest_exit_only() -> None:
    engine, _, x = world(16e-3)  # the whole suffix takes 30 ms
    with engine:
        assert engine.submit("a", x).result(10).outcome == "answered"
        refused = engine.submit("a", x, deadline_s=1e-3).result(10)

    assert refused.outcome == "refused"


@pytest.mark.parametrize("budget_s", [60e-3, 28e-3, 16e-3], ids=["whole", "late", "early"])
def test_the_share_that_the_planner_counts_is_what_the_engine_runs(budget_s: float) -> None:
    engine, _, x = world(budget_s)
    with engine:
        answers = [engine.submit("a", x).result(10) for _ in range(5)]
    spent_s = np.zeros(STAGES + 1)
    spent_s[1] = answers[0].service_s
    ratio, cv2 = suffix_work(outline_model(STAGES), COSTS, budget_s=budget_s, spent_s=spent_s)
    measured = np.mean([a.cpu_s for a in answers]) / COSTS.remaining_s(1, STAGES - 1)

    assert ratio[1] == pytest.approx(measured, rel=1e-6)
    assert cv2[1] == 0


def test_the_planner_is_told_less_work_where_time_is_short() -> None:
    model = outline_model(STAGES)
    ample, _ = suffix_work(model, COSTS, budget_s=1.0)
    short, _ = suffix_work(model, COSTS, budget_s=25e-3)
    mixed, cv2 = suffix_work(
        model, COSTS, budget_s=50e-3, spent_s=np.tile([0.0, 30e-3], (STAGES + 1, 1))
    )

    assert ample == pytest.approx(1.0)
    assert short[0] == pytest.approx((2 * STAGE_S + HEAD_S) / (STAGES * STAGE_S))
    assert short[-1] == 1.0
    assert short[0] < mixed[0] < 1
    assert cv2[0] > 0
    assert cv2[-1] == 0


def test_the_plan_with_less_work_is_predicted_to_be_faster() -> None:
    engine, _, _ = world(25e-3)
    engine.close()
    tenant = engine._tenants["a"]
    ratio, cv2 = suffix_work(outline_model(STAGES), COSTS, budget_s=25e-3)
    plain = Tenant(name="a", profile=tenant.profile, rate_per_s=20.0)
    early = dataclasses.replace(plain, suffix_ratio=ratio, suffix_cv2=cv2)
    times = [
        make_placement(Problem.of([t], DEVICE, cores=1), [0], [1], method="test")
        .predicted[0]
        .response_s
        for t in (plain, early)
    ]

    assert times[1] < times[0]


def test_policies_that_must_see_the_start_are_refused() -> None:
    for policy in ("oracle", "spinn", "uniexit"):
        with pytest.raises(ConfigError, match="cannot begin in the middle"):
            StagedCuttable(outline_model(STAGES), COSTS, policy=policy)
        with pytest.raises(ConfigError, match="cannot begin in the middle"):
            suffix_work(outline_model(STAGES), COSTS, budget_s=1.0, policy=policy)


@pytest.mark.parametrize("policy", ["edgewise", "fixed", "full_depth", "branchynet"])
def test_a_session_that_begins_in_the_middle_runs_only_what_is_left(policy: str) -> None:
    clock = VirtualClock()
    program = NullProgram(outline_model(STAGES), clock=clock, cost_s=cost_s)
    options: dict[str, Any] = {"exit_index": 3} if policy == "fixed" else {}
    if policy == "branchynet":
        options = {"threshold": 0.5}
    session = Session(program, COSTS, policy=policy, clock=clock, **options)
    x = np.zeros(program.boundary_shape(2, 1), dtype=np.float32)
    answer = session.run(x, budget_s=1.0, position=2)

    assert not any(u.startswith(("segment:0", "segment:1")) for u in program.ran)
    assert answer.exit_index is not None
    assert answer.exit_index >= 1
    with pytest.raises(ConfigError, match="expected a position from 0 to 3"):
        session.run(x, budget_s=1.0, position=4)


def test_a_real_net_gives_the_same_answer_wherever_it_is_cut(tiny_model: StagedModel) -> None:
    costs = CostTable.from_costs([1e-4] * 3, [1e-5] * 2 + [0.0])
    loads: list[int] = []
    gate = threading.Lock()

    def load(model: StagedModel, backend: str, *, threads: int) -> Any:
        with gate:
            loads.append(threads)
        return load_program(model, backend, threads=threads, check=False)

    model = StagedCuttable(tiny_model, costs, load=load)
    x = np.random.default_rng(0).normal(size=model.places[0].shape).astype(np.float32)
    whole = load_piece(model.segment(0, model.last), "onnx").run(x)
    clock = VirtualClock()
    suffixes = [model.load_suffix(p, threads=1, clock=clock) for p in range(model.last)]
    early, exit_index = suffixes[0].run(x, arrival_s=0.0, deadline_s=9e-5)
    assert exit_index == 0
    assert early.shape == whole.shape
    for place, suffix in enumerate(suffixes):
        boundary = load_piece(model.segment(0, place), "onnx").run(x) if place else x
        output, exit_index = suffix.run(boundary, arrival_s=0.0, deadline_s=None)
        np.testing.assert_allclose(output, whole, rtol=1e-5, atol=1e-6)
        assert exit_index == model.last - 1
    assert loads == [1]  # one program serves all places

    for suffix in suffixes:
        suffix.close()
    model.load_suffix(0, threads=1, clock=clock).close()
    assert loads == [1, 1]  # freed with its last user


def test_places_are_told_as_the_planner_needs_them(tiny_model: StagedModel) -> None:
    model = StagedCuttable(tiny_model, CostTable.from_costs([1e-4] * 3, [1e-5] * 3))
    weights = [p.prefix_bytes for p in model.places]

    assert model.last == 3
    assert weights == sorted(weights)
    assert weights[-1] == sum(s.weight_bytes for s in tiny_model.stages)
    assert model.places[-1].shape == (1, tiny_model.num_classes)
    assert model.places[-1].depth_ratio == pytest.approx(1.0)
    with pytest.raises(ModelError, match="found a piece from 2 to 2"):
        model.segment(2, 2)


def test_who_has_others_behind_it_leaves_them_time_for_their_nearest_exit() -> None:
    engine, clock, x = world(100e-3, place=1)  # alone it takes 31 ms
    with engine:
        alone = engine.submit("a", x).result(10)
        now_s = clock.now_s()
        # All three are due within one full run: each alone would go to the end.
        tickets = [engine.submit("a", x, due_s=now_s, deadline_s=d) for d in (40e-3, 42e-3, 44e-3)]
        answers = [t.result(10) for t in tickets]

    assert alone.exit_index == STAGES - 1
    assert [a.outcome for a in answers] == ["answered"] * 3, [a.reason for a in answers]
    assert all(a.response_s <= d for a, d in zip(answers, (40e-3, 42e-3, 44e-3), strict=True))


def request_of(
    *, deadline_s: float | None, due_s: float = 0.0, behind: tuple[float, ...] = ()
) -> Any:
    """A request before others with these deadlines, one worker, 10 ms to the nearest exit."""
    line = tuple(SimpleNamespace(deadline_at_s=d) for d in behind)
    route = SimpleNamespace(
        pool=SimpleNamespace(workers=1, line=line), expected=SimpleNamespace(soonest_cpu_s=10e-3)
    )
    at_s = float("inf") if deadline_s is None else due_s + deadline_s
    return SimpleNamespace(route=route, deadline_s=deadline_s, deadline_at_s=at_s, due_s=due_s)


@pytest.mark.parametrize(
    ("behind", "expected_s"),
    [
        pytest.param((), 0.1, id="nobody waits"),
        pytest.param((0.2,), 0.1, id="who waits has time"),
        pytest.param((0.06,), 0.05, id="who waits is pressed"),
        pytest.param((0.2, 0.06), 0.04, id="the second of them is"),
        pytest.param((0.015,), 0.1, id="who cannot be helped does not count"),
    ],
)
def test_room_is_left_for_those_behind(behind: tuple[float, ...], expected_s: float) -> None:
    request = request_of(deadline_s=0.1, behind=behind)

    assert deadline_with_room(request, 0.0) == pytest.approx(expected_s)
    assert deadline_with_room(request_of(deadline_s=None, behind=behind), 0.0) is None
