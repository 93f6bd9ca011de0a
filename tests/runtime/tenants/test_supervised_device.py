"""The engine over a device in a real child process, which is killed, stopped and started again.

The child computes on the CPU; its supervision is that of a real Edge TPU.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgewise.backends.edgetpu.device import EdgeTpuDevice
from edgewise.clock import VirtualClock
from edgewise.device.accelerator import Accelerator
from edgewise.placement.plan import make_placement
from edgewise.placement.problem import Problem, Tenant
from edgewise.profiles.partition import PartitionProfile
from edgewise.runtime.tenants.engine import TenantEngine
from edgewise.runtime.tenants.records import TenantAnswer, TenantModel

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and uses prctl")

DEVICE = Accelerator(name="tpu", sram_bytes=8_000_000, in_bytes_per_s=400e6, out_bytes_per_s=50e6)
SHAPE = (1, 4)
TABLE = 10_000  # what a number beyond it cannot be looked up in


class Counting:
    """x → x + 1 in each of two stages; the first looks it up in a table that may be too short."""

    format, last = "onnx", 2
    places = tuple(
        SimpleNamespace(shape=SHAPE, dtype="float32", nbytes=16, prefix_bytes=16 * p)
        for p in range(3)
    )

    def __init__(self, name: str, *, table: int = TABLE) -> None:
        self.name = name
        self._table = table

    def segment(self, start: int, stop: int) -> bytes:
        helper, element = onnx.helper, onnx.TensorProto.FLOAT
        table = np.arange(1, self._table + 1, dtype=np.float32)
        nodes, last = [], "x"
        for k in range(start, stop):
            if k == 0:
                nodes.append(helper.make_node("Cast", [last], ["i"], to=onnx.TensorProto.INT64))
                nodes.append(helper.make_node("Gather", ["table", "i"], ["s0"]))
            else:
                nodes.append(helper.make_node("Add", [last, "one"], [f"s{k}"]))
            last = f"s{k}"
        graph = helper.make_graph(
            nodes,
            "count",
            [helper.make_tensor_value_info("x", element, SHAPE)],
            [helper.make_tensor_value_info(last, element, SHAPE)],
            [
                onnx.numpy_helper.from_array(table, "table"),
                onnx.numpy_helper.from_array(np.ones(1, np.float32), "one"),
            ],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
        content: bytes = model.SerializeToString()
        return content


def profile_of(name: str) -> PartitionProfile:
    return PartitionProfile(
        model_id=name,
        cuts=("x", "s0", "s1"),
        depth_ratio=np.array([0, 0.5, 1]),
        prefix_bytes=np.array([0, 16.0, 32.0]),
        boundary_bytes=np.full(3, 16.0),
        accelerator_s=np.array([0, 1e-4, 2e-4]),
        cpu_s=np.array([[2e-4], [1e-4], [0]]),
    )


def is_gone(pid: int | None) -> bool:
    """Whether a process has ended; one that nobody reaped yet has."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


class Stand:
    """An engine over such a device, and everything that its requests were told.

    Two tenants: ``whole`` runs in the child only, ``cut`` half there and half here.
    """

    def __init__(self, *, table: int = TABLE, **options: Any) -> None:
        usual: dict[str, Any] = {"library": None, "watchdog_least_s": 30.0}
        self.device = EdgeTpuDevice(DEVICE, **{**usual, **options})
        self.told: Counter[int] = Counter()
        self.pids: set[int] = set()
        models = {"whole": Counting("whole"), "cut": Counting("cut", table=table)}
        problem = Problem.of(
            [Tenant(name=n, profile=profile_of(n), rate_per_s=50.0) for n in models],
            DEVICE,
            cores=2,
        )
        self.engine = TenantEngine(
            [TenantModel(name=n, model=m, profile=profile_of(n)) for n, m in models.items()],
            make_placement(problem, [2, 1], [0, 1], method="test"),
            device=self.device,
            cores=2,
            first_retry_s=0.01,
        )
        self.note_child()

    def note_child(self) -> int:
        """The child's number, also for the look at the end."""
        pid = self.device.pid
        assert pid is not None
        self.pids.add(pid)
        return pid

    def submit(self, tenant: str, value: float) -> Any:
        x = np.full(SHAPE, value, dtype=np.float32)
        return self.engine.submit(tenant, x, on_done=self._note)

    def _note(self, answer: TenantAnswer) -> None:
        self.told[answer.number] += 1

    def submit_many(self, count: int) -> list[tuple[int, Any]]:
        return [(k, self.submit(("whole", "cut")[k % 2], k)) for k in range(count)]


def check(tickets: list[tuple[int, Any]]) -> None:
    """Every request was answered, and rightly."""
    answers = [(k, t.result(30)) for k, t in tickets]
    assert {a.outcome for _, a in answers} == {"answered"}, {a.reason for _, a in answers}
    for k, a in answers:
        assert a.output is not None
        np.testing.assert_array_equal(a.output, np.full(SHAPE, k + 2, dtype=np.float32))


@pytest.fixture(name="stand")
def _stand() -> Iterator[Callable[..., Stand]]:
    """``stand()``; checks in the end that each submit was told once and nothing is left."""
    made: list[Stand] = []

    def make(**options: Any) -> Stand:
        made.append(Stand(**options))
        return made[-1]

    yield make
    for each in made:
        each.engine.close(drain_s=10)
        if each.device.pid is not None:
            each.note_child()
        each.device.close()
        assert all(map(is_gone, each.pids))
        assert set(each.told) == set(range(each.engine._number))
        assert set(each.told.values()) <= {1}
    assert not [t.name for t in threading.enumerate() if t.name.startswith("edgewise-")]
    assert not [t.name for t in threading.enumerate() if t.name == "accelerator child"]


def test_a_child_that_is_killed_under_load_costs_no_request_and_is_started_again(
    stand: Callable[..., Stand], until: Any
) -> None:
    world = stand()
    before = world.note_child()
    tickets = world.submit_many(200)
    tickets[20][1].result(30)
    os.kill(before, signal.SIGKILL)
    check(tickets)
    until(lambda: world.engine.placement.places == (2, 1) and not world.engine.lost)

    assert world.note_child() != before
    assert [c.placement.places for c in world.engine.changes] == [(2, 1), (0, 0), (2, 1)]
    assert "SIGKILL" in world.engine.changes[1].reason
    again = world.submit_many(4)
    check(again)
    assert {t.result().plan for _, t in again} == {2}


def test_a_child_that_hangs_past_its_watchdog_is_killed_and_started_again(
    stand: Callable[..., Stand], until: Any
) -> None:
    world = stand(watchdog_least_s=0.3)
    hung = world.note_child()
    os.kill(hung, signal.SIGSTOP)
    check(world.submit_many(6))
    until(lambda: world.engine.placement.places == (2, 1) and not world.engine.lost)

    assert is_gone(hung)
    assert "did not answer within 0.3 s" in world.engine.changes[1].reason
    check(world.submit_many(4))


def test_without_restarts_left_the_cpu_serves_until_there_are_some_again(
    stand: Callable[..., Stand], until: Any
) -> None:
    clock = VirtualClock()
    world = stand(restarts=1, within_s=60.0, clock=clock)
    for _ in range(2):
        os.kill(world.note_child(), signal.SIGKILL)
        check(world.submit_many(4))
        until(lambda: world.engine.lost == "" or "the next try is in 60 s" in world.engine.lost)
        if world.engine.lost == "":
            until(lambda: world.engine.placement.places == (2, 1))

    assert world.engine.placement.places == (0, 0)
    assert "restarted 1 times within 60 s" in world.engine.lost
    assert world.device.pid is None
    check(world.submit_many(4))
    clock.sleep_s(61.0)
    until(lambda: world.engine.placement.places == (2, 1))
    check(world.submit_many(4))


def test_a_prefix_that_fails_at_invocation_fails_its_own_requests_only(
    stand: Callable[..., Stand],
) -> None:
    world = stand(table=10)
    child = world.note_child()
    bad = [world.submit("cut", 50 + k) for k in range(3)]
    good = [(k, world.submit("whole", k)) for k in range(20)]
    fits = [(k, world.submit("cut", k)) for k in range(8)]
    check(good)
    check(fits)

    for ticket in bad:
        answer = ticket.result(30)
        assert answer.outcome == "failed"
        assert "prefix 'cut/1'" in answer.reason
    assert world.device.pid == child
    assert len(world.engine.changes) == 1


def test_an_engine_that_is_closed_while_the_child_is_dead_ends_every_request(
    stand: Callable[..., Stand],
) -> None:
    world = stand(restarts=0)
    os.kill(world.note_child(), signal.SIGKILL)
    tickets = world.submit_many(40)
    world.engine.close(drain_s=0.0)

    outcomes = {t.result(1).outcome for _, t in tickets}
    assert outcomes <= {"answered", "dropped", "failed"}
    refused = world.submit("whole", 1).result(1)
    assert (refused.outcome, refused.reason) == ("refused", "the engine is closing")
