"""The engine with the simulated accelerator and real pieces: loading counted, memory given back."""

from __future__ import annotations

import dataclasses
import gc
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgewise.backends.piece import Piece, load_piece
from edgewise.backends.simulated_accelerator import SimulatedAccelerator
from edgewise.clock import MonotonicClock, VirtualClock
from edgewise.errors import BackendError
from edgewise.placement.plan import make_placement
from edgewise.placement.problem import Problem, Tenant
from edgewise.profiles.partition import PartitionProfile
from edgewise.runtime.tenants.engine import TenantEngine
from edgewise.runtime.tenants.records import QueueRule, TenantModel

PAGE_BYTES = 4096


def crowd(make_bench: Any, discipline: Any, until: Any) -> tuple[Any, Any]:
    """Forty requests of two models that displace each other, all waiting at once."""
    bench = make_bench("a", "b")
    clock = VirtualClock()
    device = SimulatedAccelerator(bench.description, clock=clock, piece_loader=bench.world.load)
    bench.device = device
    engine = bench.engine([3, 3], clock=clock, queue=QueueRule(discipline=discipline))
    before = device.misses
    door = bench.shut("a:")
    tickets = [engine.submit("a", bench.x(-1))]
    until(lambda: engine.snapshot().tenants[0].running)
    tickets += [engine.submit("ab"[k % 2], bench.x(k)) for k in range(40)]
    door.set()
    answers = [t.result(10) for t in tickets]
    assert {a.outcome for a in answers} == {"answered"}
    device.misses -= before
    engine.close()
    device.close()
    return device, engine


def test_switching_less_often_spends_less_time_loading(make_bench: Any, until: Any) -> None:
    fcfs, in_order = crowd(make_bench, "fcfs", until)
    aware, in_bursts = crowd(make_bench, "switch-aware", until)
    loads = [sum(t.load_s for t in e.snapshot().tenants) for e in (in_order, in_bursts)]

    assert fcfs.misses >= 40
    assert aware.misses <= 12  # 41 requests, four in a row
    assert loads[0] == pytest.approx(fcfs.misses * fcfs.description.load_s(600))
    assert loads[1] == pytest.approx(aware.misses * aware.description.load_s(600))


@pytest.mark.parametrize("fault", ["lost", "hangs", "fails"])
def test_injected_faults_of_the_simulated_device_cost_no_request(
    make_bench: Any, until: Any, fault: Any
) -> None:
    bench = make_bench("a")
    clock = VirtualClock()
    device = SimulatedAccelerator(bench.description, clock=clock, piece_loader=bench.world.load)
    bench.device = device
    engine = bench.engine([2], clock=clock)
    device.inject(fault)
    answer = engine.submit("a", bench.x()).result(10)

    assert answer.outcome == ("failed" if fault == "fails" else "answered")
    until(lambda: engine.placement.places == (2,) and not engine.lost)
    assert engine.submit("a", bench.x()).result(10).outcome == "answered"
    assert len(engine.changes) == (1 if fault == "fails" else 3)
    engine.close()
    device.close()


def pinned_plan(bench: Any, places: list[int]) -> Any:
    """Both models share the memory half and half."""
    return make_placement(
        bench.problem().with_residency("pinned"),
        places,
        [0 if p == 3 else 1 for p in places],
        shares_bytes=[500, 500],
        method="test",
    )


def pinning_bench(make_bench: Any) -> tuple[Any, SimulatedAccelerator]:
    bench = make_bench("a", "b")
    bench.description = dataclasses.replace(bench.description, can_pin=True)
    clock = VirtualClock()
    device = SimulatedAccelerator(bench.description, clock=clock, piece_loader=bench.world.load)
    bench.device = device
    return bench, device


def test_a_pinned_plan_reloads_nothing_once_requests_go_to_it(make_bench: Any) -> None:
    bench, device = pinning_bench(make_bench)
    clock = device._clock
    with bench.engine([3, 3], clock=clock) as engine:
        before = [engine.submit("ab"[k % 2], bench.x(k)).result(10) for k in range(6)]
        change = engine.apply(pinned_plan(bench, [3, 2]))
        misses = device.misses
        after = [engine.submit("ab"[k % 2], bench.x(k)).result(10) for k in range(20)]
        engine.apply(bench.plan([3, 3]))
        again = [engine.submit("ab"[k % 2], bench.x(k)).result(10) for k in range(6)]
    device.close()

    assert all(a.missed for a in before)
    assert {a.plan for a in after} == {change.number}
    assert not any(a.missed for a in after)
    assert device.misses - misses >= len(again)  # models switch again
    assert all(a.missed for a in again[1:])
    assert [float(a.output[0, 0]) for a in after] == [k + 3.0 for k in range(20)]


def test_requests_that_come_while_shares_change_are_answered_right(make_bench: Any) -> None:
    bench, device = pinning_bench(make_bench)
    with bench.engine([3, 3], clock=device._clock) as engine:
        tickets: list[tuple[int, Any]] = []
        stop = threading.Event()

        def send() -> None:
            while not stop.is_set() and len(tickets) < 2000:
                k = len(tickets)
                tickets.append((k, engine.submit("ab"[k % 2], bench.x(k))))

        sender = threading.Thread(target=send)
        sender.start()
        for _ in range(5):
            engine.apply(pinned_plan(bench, [3, 2]))
            engine.apply(bench.plan([2, 3]))
        stop.set()
        sender.join()
        answers = [(k, t.result(20)) for k, t in tickets]
    device.close()

    outcomes = {a.outcome for _, a in answers}
    assert outcomes <= {"answered", "refused"}  # refused: 256 of a tenant wait already
    assert "answered" in outcomes
    assert all(float(a.output[0, 0]) == k + 3 for k, a in answers if a.outcome == "answered")


def test_a_device_without_fixed_shares_refuses_a_pinned_plan_and_the_old_one_goes_on(
    make_bench: Any,
) -> None:
    bench = make_bench("a", "b")
    bench.description = dataclasses.replace(bench.description, can_pin=True)  # the planner's belief
    with bench.engine([3, 3]) as engine:
        with pytest.raises(BackendError, match="fixed shares"):
            engine.apply(pinned_plan(bench, [3, 2]))
        answer = engine.submit("a", bench.x()).result(10)

    assert (answer.outcome, answer.plan) == ("answered", 0)


def test_a_restart_does_not_keep_shares_that_no_plan_wants(make_bench: Any, until: Any) -> None:
    bench, device = pinning_bench(make_bench)
    with bench.engine([3, 3], clock=device._clock) as engine:
        engine.apply(pinned_plan(bench, [3, 3]))
        device.inject("lost")
        assert engine.submit("a", bench.x()).result(10).outcome == "answered"
        until(lambda: not engine.lost and engine.placement.places == (3, 3))
        assert not any(engine.submit(n, bench.x()).result(10).missed for n in "abab")
        engine.apply(bench.plan([3, 3]))
        answers = [engine.submit(n, bench.x()).result(10) for n in "abab"]
    device.close()

    assert all(a.missed for a in answers[1:])


class Heavy:
    """Two matrices of 256 kB, which can be cut between them."""

    name, format, last = "heavy", "onnx", 2
    places = tuple(
        SimpleNamespace(shape=(1, 256), dtype="float32", nbytes=1024, prefix_bytes=262144 * p)
        for p in range(3)
    )

    def __init__(self) -> None:
        pytest.importorskip("onnxruntime")
        onnx = pytest.importorskip("onnx")
        self.is_broken = False
        self._files = {(i, j): _chain(onnx, j - i) for i in range(2) for j in range(i + 1, 3)}

    def segment(self, start: int, stop: int) -> bytes:
        if self.is_broken and start:
            return b"not a model" * 20_000
        return self._files[start, stop]


def _chain(onnx: Any, length: int) -> bytes:
    helper, element = onnx.helper, onnx.TensorProto.FLOAT
    weights = np.eye(256, dtype=np.float32)
    names = [f"t{k}" for k in range(length + 1)]
    graph = helper.make_graph(
        [helper.make_node("MatMul", [names[k], f"w{k}"], [names[k + 1]]) for k in range(length)],
        "chain",
        [helper.make_tensor_value_info(names[0], element, [1, 256])],
        [helper.make_tensor_value_info(names[-1], element, [1, 256])],
        [onnx.numpy_helper.from_array(weights, f"w{k}") for k in range(length)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    model.ir_version = 10
    content: bytes = model.SerializeToString()
    return content


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGE_BYTES


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the kernel tells no memory")
def test_two_hundred_loads_unloads_and_failed_loads_leave_no_memory_behind(
    make_bench: Any,
) -> None:
    toy = make_bench("unused").description
    description = dataclasses.replace(toy, sram_bytes=1 << 20, in_bytes_per_s=1e12)
    model = Heavy()
    profile = PartitionProfile(
        model_id="heavy",
        cuts=("x", "a", "y"),
        depth_ratio=np.array([0, 0.5, 1]),
        prefix_bytes=np.array([0, 262144.0, 524288.0]),
        boundary_bytes=np.full(3, 1024.0),
        accelerator_s=np.array([0, 1e-6, 2e-6]),
        cpu_s=np.array([[2e-4], [1e-4], [0]]),
    )
    problem = Problem.of([Tenant(name="a", profile=profile, rate_per_s=1.0)], description, cores=1)
    plans = [make_placement(problem, [p], [0 if p == 2 else 1], method="test") for p in (0, 1, 2)]
    device = SimulatedAccelerator(description, clock=MonotonicClock())
    tenants = [TenantModel(name="a", model=model, profile=profile)]
    x = np.ones((1, 256), dtype=np.float32)
    resident = []
    with TenantEngine(tenants, plans[0], device=device, keep_idle=0) as engine:
        for cycle in range(200):
            model.is_broken = cycle % 3 == 2
            if model.is_broken:
                engine.apply(plans[2])
                with pytest.raises(BackendError):
                    engine.apply(plans[1])
            else:
                engine.apply(plans[cycle % 3])
                assert engine.submit("a", x).result(10).outcome == "answered"
            if cycle in {20, 199}:
                engine.drain(5)
                gc.collect()
                resident.append(_resident_bytes())
    device.close()

    assert resident[1] - resident[0] < 20e6


def test_real_pieces_run_in_threads_of_their_own(make_bench: Any) -> None:
    seen: set[tuple[int, int]] = set()

    def load(content: bytes, format: Any, *, threads: int) -> Piece:  # noqa: A002
        piece = load_piece(content, format, threads=threads)
        run = piece.run

        def noted(x: Any) -> Any:
            seen.add((id(piece), threading.get_ident()))
            return run(x)

        piece.run = noted  # type: ignore[method-assign]
        return piece

    bench = make_bench("a")
    model = Heavy()
    profile = PartitionProfile(
        model_id="heavy",
        cuts=("x", "a", "y"),
        depth_ratio=np.array([0, 0.5, 1]),
        prefix_bytes=np.array([0, 1.0, 2.0]),
        boundary_bytes=np.full(3, 1024.0),
        accelerator_s=np.array([0, 1e-6, 2e-6]),
        cpu_s=np.array([[2e-4], [1e-4], [0]]),
    )
    problem = Problem.of(
        [Tenant(name="a", profile=profile, rate_per_s=100.0)], bench.description, cores=2
    )
    plan = make_placement(problem, [0], [2], method="test")
    tenants = [TenantModel(name="a", model=model, profile=profile)]
    with TenantEngine(tenants, plan, load=load) as engine:
        seen.clear()
        x = np.ones((1, 256), dtype=np.float32)
        tickets = [engine.submit("a", x) for _ in range(50)]
        assert all(t.result(10).outcome == "answered" for t in tickets)

    pieces = [p for p, _ in seen]
    assert len(set(pieces)) == len(pieces)  # no piece ran in two threads
