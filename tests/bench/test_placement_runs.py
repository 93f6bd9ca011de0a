from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgewise.backends.piece import Array, ArraySpec, Piece
from edgewise.bench.placement_runs import (
    FCFS,
    WARM_UP_RATIO,
    MeasuredModel,
    Models,
    Play,
    Row,
    compare,
    contended,
    mape,
    measure_model,
    play,
    steady_arrivals,
    tenants_of,
    together_ratio,
    within,
)
from edgewise.bench.remembered import RememberedModel
from edgewise.device.accelerator import Accelerator
from edgewise.errors import BackendError, ConfigError
from edgewise.frontends.partition import PartitionedModel, Place
from edgewise.model.graph import Graph, Op, TensorSpec
from edgewise.placement.forecast import forecast
from edgewise.placement.plan import Placement, make_placement
from edgewise.placement.problem import Problem
from edgewise.placement.simulate import simulate
from edgewise.profiles.partition import PartitionProfile
from edgewise.report.workload import PlayedRequest

SPEC = ArraySpec(shape=(1, 4), dtype="float32")
LAST = 3
TPU = Accelerator(
    name="tpu",
    sram_bytes=1000,
    in_bytes_per_s=1e6,
    out_bytes_per_s=1e6,
    fixed_s=2e-4,
    can_pin=True,
)


class Adder(Piece):
    """Adds one for each place between its ends; files that begin with ``bad`` fail."""

    def __init__(self, content: bytes) -> None:
        self.backend, self.threads = "fake", 1
        self.input = self.output = SPEC
        self.content = content.decode()

    def run(self, x: Array) -> Array:
        if self.content.startswith("bad"):
            raise BackendError("it does not compute")
        _, start, stop = self.content.split()
        return np.asarray(x + (int(stop[1:]) - int(start[1:])))


def load(content: bytes, format: Any, *, threads: int = 1) -> Piece:  # noqa: A002, ARG001
    return Adder(content)


class Cutter:
    def __init__(self, name: str) -> None:
        self.name = name
        names = [f"t{k}" for k in range(LAST + 1)]
        self.graph = Graph(
            inputs=("t0",),
            outputs=(names[-1],),
            ops=tuple(
                Op(
                    name=f"layer{k}",
                    kind="Gemm",
                    inputs=(names[k],),
                    outputs=(names[k + 1],),
                    flops=2e6,
                    is_contraction=True,
                )
                for k in range(LAST)
            ),
            tensors={n: TensorSpec(name=n, shape=(1, 4), dtype="float32") for n in names},
        )

    def segment(self, start: str, stop: str) -> bytes:
        return f"{self.name} {start} {stop}".encode()


def cut_model(name: str) -> PartitionedModel:
    return PartitionedModel(
        name=name,
        version="0" * 64,
        format="onnx",
        places=tuple(
            Place(
                tensor=f"t{k}",
                shape=SPEC.shape,
                dtype=SPEC.dtype,
                nbytes=SPEC.nbytes,
                prefix_bytes=200 * k,
                flops=2e6 * k,
                depth_ratio=k / LAST,
            )
            for k in range(LAST + 1)
        ),
        cutter=Cutter(name),
    )


def measured(name: str) -> MeasuredModel:
    """As if measured: suffixes of at most 1 ms, and prefixes too."""
    inputs = tuple(np.full(SPEC.shape, k, dtype=np.float32) for k in range(2))
    return MeasuredModel(
        name=name,
        model=RememberedModel(cut_model(name), inputs, load=load),
        profile=PartitionProfile(
            model_id=name,
            cuts=tuple(f"t{k}" for k in range(LAST + 1)),
            depth_ratio=np.arange(LAST + 1) / LAST,
            prefix_bytes=200 * np.arange(LAST + 1.0),
            boundary_bytes=np.full(LAST + 1, 16.0),
            accelerator_s=1e-3 * np.arange(LAST + 1) / LAST,
            cpu_s=1e-3 * np.arange(LAST, -1, -1)[:, None] / LAST,
        ),
        inputs=inputs,
    )


@pytest.fixture(name="pair", scope="module")
def make_pair() -> list[MeasuredModel]:
    return [measured("a"), measured("b")]


def problem_of(models: Sequence[MeasuredModel], *rates: float) -> Problem:
    return Problem.of(tenants_of(models, rates), TPU, cores=2)


def plan_of(problem: Problem, places: Sequence[int], cores: Sequence[int]) -> Placement:
    return make_placement(problem, places, cores, method="test")


def test_steady_gaps_have_the_law_of_a_poisson_stream_even_where_they_are_few() -> None:
    arrivals = steady_arrivals([10.0, 40.0], requests=500, rng=np.random.default_rng(0))

    assert [len(arrivals.of(k)) for k in (0, 1)] == [100, 400]
    assert (np.diff(arrivals.due_s) >= 0).all()
    for k, rate in ((0, 10.0), (1, 40.0)):
        gaps = np.diff(arrivals.of(k), prepend=0.0) * rate
        # One from each of N equal ranges: far nearer than 1 / sqrt(N), which is 10 and 5 %.
        assert gaps.mean() == pytest.approx(1, abs=0.01)
        assert gaps.std() == pytest.approx(1, abs=0.06)
        assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 0.25


def test_steady_arrivals_are_the_same_for_the_same_chance() -> None:
    one, two = (steady_arrivals([5.0], requests=20, rng=np.random.default_rng(3)) for _ in range(2))
    assert one.due_s.tolist() == two.due_s.tolist()


def test_settled_means_are_near_those_of_very_many_requests(pair: list[MeasuredModel]) -> None:
    """A device that is slower than described: what was said is off, what is settled is not.

    At rho 0.2 forty requests give the mean to 2.5 %, settled to less than half a per cent.
    """
    said = problem_of(pair[:1], 0.2 / 1.232e-3)
    true = replace(said, service_s=1.05 * said.service_s)
    long_run_s, truth_s = (simulate(p, [LAST], [0], seed=1).mean_s for p in (said, true))
    raw, settled = [], []
    for seed in range(30):
        arrivals = steady_arrivals(
            said.rates.tolist(), requests=40, rng=np.random.default_rng(seed)
        )
        replayed_s, observed_s = (
            simulate(
                p,
                [LAST],
                [0],
                horizon_s=arrivals.duration_s,
                arrivals=[arrivals.due_s],
                warm_up_ratio=0,
            ).mean_s
            for p in (said, true)
        )
        found = replace(row(observed_s, 1.0), replayed_s=replayed_s, long_run_s=long_run_s)
        raw.append(observed_s / truth_s - 1)
        settled.append(found.settled_s / truth_s - 1)

    assert np.std(settled) < 0.005
    assert np.std(settled) < 0.2 * np.std(raw)
    assert abs(np.mean(settled)) < 0.005


def test_every_request_of_a_play_is_answered_and_compared(pair: list[MeasuredModel]) -> None:
    problem = problem_of(pair, 60.0, 60.0)
    plan = plan_of(problem, [2, LAST], [1, 0])
    arrivals = steady_arrivals([60.0, 60.0], requests=40, rng=np.random.default_rng(0))
    seen = play(pair, problem, plan, arrivals, load=load)

    assert len(seen.requests) == len(arrivals.due_s)
    assert seen.lost == 0
    assert seen.calls > len(arrivals.due_s)  # and those that warmed it
    rows = compare("x", problem, plan, arrivals, seen)
    assert set(seen.overheads.handing_s) == {m.name for m in pair}
    device = problem.accelerator
    assert device is not None
    slower = replace(device, fixed_s=device.fixed_s + seen.overheads.gap_s)
    problem = Problem.of(problem.tenants, slower, cores=problem.cores)
    said = forecast(problem, np.array([plan.places]), np.array([plan.cores]))
    replayed = simulate(
        problem,
        plan.places,
        plan.cores,
        horizon_s=arrivals.duration_s,
        arrivals=[arrivals.of(0), arrivals.of(1)],
        warm_up_ratio=WARM_UP_RATIO,
    )
    for i, row in enumerate(rows):
        more_s = seen.overheads.handing_s[row.tenant]
        assert row.predicted_s == pytest.approx(said.response_s[0, i] + more_s)
        assert sum(row.predicted_parts_s) == pytest.approx(row.predicted_s)
        assert row.replayed_s == pytest.approx(replayed.tenants[i].mean_s + more_s)
        assert row.observed_s >= row.predicted_parts_s[1]  # no request beats its own prefix
        assert sum(row.observed_parts_s) == pytest.approx(row.observed_s)
        # The order of requests alone decides who reloads, and first come is first served.
        assert row.observed_miss == pytest.approx(replayed.tenants[i].miss, abs=0.051)
        assert row.requests == len(replayed.tenants[i].response_s)
    assert [row.paper_miss for row in rows] == [0.0, 0.0]  # they fit together, says the paper
    assert [row.predicted_miss for row in rows] == [0.5, 0.5]


def test_models_compiled_together_never_reload(pair: list[MeasuredModel]) -> None:
    problem = problem_of(pair, 50.0, 50.0).with_residency("pinned")
    plan = make_placement(
        problem, [LAST - 1, LAST - 1], [1, 1], shares_bytes=[400, 400], method="test"
    )
    arrivals = steady_arrivals([50.0, 50.0], requests=10, rng=np.random.default_rng(0))
    seen = play(pair, problem, plan, arrivals, load=load)
    rows = compare("x", problem, plan, arrivals, seen)

    assert [row.observed_miss for row in rows] == [0.0, 0.0]
    assert [row.predicted_miss for row in rows] == [0.0, 0.0]


def test_what_goes_on_beside_a_play_sees_its_engine_and_is_kept(pair: list[MeasuredModel]) -> None:
    class Changes:
        def __init__(self, engine: Any) -> None:
            self.engine = engine

        def __enter__(self) -> Any:
            self.engine.apply(plan_of(problem, [1], [2]), reason="test")
            return "kept"

        def __exit__(self, *_: object) -> None: ...

    problem = problem_of(pair[:1], 50.0)
    arrivals = steady_arrivals([50.0], requests=5, rng=np.random.default_rng(0))
    seen = play(
        pair[:1],
        problem,
        plan_of(problem, [LAST], [0]),
        arrivals,
        queue=FCFS,
        beside=Changes,
        load=load,
    )

    assert seen.extra == "kept"
    assert [change.placement.places for change in seen.changes] == [(LAST,), (1,)]
    assert {request.plan for request in seen.requests} == {1}


def test_measured_costs_are_means_of_all_rounds_because_queues_see_means() -> None:
    found = measure_model(
        "net",
        cut_model("net"),
        accelerator=TPU,
        rounds=4,
        time_cap_s=math.inf,
        rng=np.random.default_rng(0),
        load=load,
    )
    assert found.profile.cpu_s.shape == (LAST + 1, 1)
    assert (found.profile.cpu_s[:-1] > 0).all()
    assert found.profile.cpu_s[-1, 0] == 0
    assert "mean of 4 rounds" in found.profile.notes["cpu"]
    assert found.profile.accelerator == TPU.name
    assert len(found.inputs) == len({x.tobytes() for x in found.inputs})


def test_a_slow_round_counts_in_the_mean_and_in_the_variance() -> None:
    from edgewise.bench.placement_runs import _with_means
    from edgewise.profiling.segments import SegmentTimes

    rests = np.full((4, LAST, 1), 1e-3)
    rests[0] = 5e-3
    times = SegmentTimes(
        backend="fake", threads=(1,), segments_s=rests, rests_s=rests, kept_ratio=1.0
    )
    found = _with_means(measured("net").profile, times)

    assert found.cpu_s[:, 0].tolist() == pytest.approx([2e-3, 2e-3, 2e-3, 0])
    assert found.cpu_cv2 is not None
    assert found.cpu_cv2[0] == pytest.approx(3e-6 / 4e-6)  # var of (5, 1, 1, 1) over mean squared


def test_models_are_measured_once_in_a_run(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    helper = onnx.helper
    ends = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [1, 8]) for n in ("x", "y")]
    weight = onnx.numpy_helper.from_array(np.eye(8, dtype=np.float32), "w")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("Relu", ["m"], ["r"]),
        helper.make_node("MatMul", ["r", "w"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], initializer=[weight])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    (tmp_path / "resnet18-int8-v1.onnx").write_bytes(proto.SerializeToString())
    said: list[str] = []
    models = Models(TPU, tmp_path, rounds=3, time_cap_s=1.0, say=said.append)
    first = models.get("gpunet_standin", places=2)

    assert models.get("gpunet_standin", places=2) is first
    assert first.name == "gpunet_standin"
    assert "resnet18" in first.made
    assert said == ["gpunet_standin: measuring what is left after each place"]
    with pytest.raises(ConfigError):
        models.get("no_such_net", places=2)


def row(observed_s: float, predicted_s: float) -> Row:
    return Row(
        label="x",
        tenant="a",
        place=1,
        rate_per_s=1.0,
        requests=1,
        observed_s=observed_s,
        predicted_s=predicted_s,
        paper_s=math.inf,
        replayed_s=observed_s,
        long_run_s=observed_s,
        observed_miss=None,
        predicted_miss=0.0,
        paper_miss=0.0,
        observed_parts_s=(),
        predicted_parts_s=(),
        other_ratio=None,
    )


def test_errors_are_shares_of_what_was_observed() -> None:
    rows = [row(0.1, 0.104), row(0.2, 0.17)]

    assert rows[0].error_ratio() == pytest.approx(0.04)
    assert mape(rows) == pytest.approx((0.04 + 0.15) / 2)
    assert (within(rows, 0.05), within(rows, 0.16)) == (0.5, 1.0)
    assert mape(rows, "paper") == math.inf
    assert mape(rows, "replayed") == 0
    assert mape([replace(rows[0], long_run_s=0.104)]) == pytest.approx(0)
    assert mape([replace(rows[0], long_run_s=0.104)], "raw") == pytest.approx(0.04)


def test_requests_that_failed_are_lost_and_in_no_mean(pair: list[MeasuredModel]) -> None:
    request = PlayedRequest(
        tenant="a", due_s=0.5, sent_s=0.5, done_s=0.6, outcome="answered", met=None, plan=0
    )
    seen = Play(
        requests=(
            replace(request, due_s=0.01),  # warm-up
            request,
            replace(request, outcome="failed"),
            replace(request, tenant="b"),
        ),
        changes=(),
        origin_s=0.0,
        duration_s=1.0,
        late_p99_s=0.0,
        overruns=0,
        calls=4,
        other_ratio=None,
        steal_ratio=None,
    )
    assert seen.lost == 1
    assert seen.of("a") == [request]
    assert len(seen.of()) == 2
    problem = problem_of(pair, 1.0, 1.0)
    arrivals = steady_arrivals([1.0, 1.0], requests=4, rng=np.random.default_rng(0))
    rows = compare("x", problem, plan_of(problem, [LAST, LAST], [0, 0]), arrivals, seen)
    assert [r.requests for r in rows] == [1, 1]


def test_suffixes_slow_each_other_by_how_often_two_cores_are_busy(
    pair: list[MeasuredModel],
) -> None:
    slowed = [replace(m, together_ratio=1.5) for m in pair]
    # Suffixes of 1 ms at 200 a second each: either core is busy for a fifth of the time and more.
    problem = problem_of(slowed, 200.0, 200.0)
    found = contended(slowed, problem, [0, 0], [1, 1])
    cost_s = float(found.cpu_s[0, 0, 1])

    assert cost_s == pytest.approx(1e-3 * (1 + 0.5 * 200 * cost_s))  # by its fixed point
    assert found.rates.tolist() == problem.rates.tolist()
    calm = problem_of(slowed, 1e-3, 1e-3)
    assert contended(slowed, calm, [0, 0], [1, 1]).cpu_s[0, 0, 1] == pytest.approx(1e-3, rel=1e-5)
    assert contended(pair, problem, [0, 0], [1, 1]).cpu_s[0, 0, 1] == pytest.approx(1e-3)


def test_two_workers_of_one_pool_are_busy_together_as_in_m_m_2(pair: list[MeasuredModel]) -> None:
    slowed = [replace(pair[0], together_ratio=1.5)]
    problem = problem_of(slowed, 400.0)
    found = contended(slowed, problem, [0], [2])
    busy = 400 * float(found.cpu_s[0, 0, 2]) / 2
    # P(both busy) / P(this one busy), from the birth-death chain.
    a = 2 * busy
    empty = 1 / (1 + a + a**2 / 2 / (1 - busy))
    both = empty * a**2 / 2 / (1 - busy)

    assert found.cpu_s[0, 0, 2] == pytest.approx(1e-3 * (1 + 0.5 * both / busy), rel=1e-6)


def test_cores_that_share_nothing_do_not_slow_each_other() -> None:
    x = np.zeros(SPEC.shape, dtype=np.float32)
    assert together_ratio(cut_model("net"), x, cores=1, load=load) == 1
    assert together_ratio(cut_model("net"), x, cores=2, rounds=1, load=load) >= 1
