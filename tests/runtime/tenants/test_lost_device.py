"""The accelerator goes, hangs and comes back: every request ends, and the plan follows."""

from __future__ import annotations

from typing import Any

import pytest

from edgewise.backends.accelerator import AcceleratorLost


def test_a_lost_device_costs_no_request_and_comes_back(make_bench: Any, until: Any) -> None:
    bench = make_bench("a", "b")
    engine = bench.engine([2, 3])
    door = bench.shut("a:0-2")
    tickets = [engine.submit("a", bench.x())]
    until(lambda: bench.device.order)
    tickets += [engine.submit(n, bench.x()) for n in "bab"]
    bench.device.refuses_restart = True
    bench.device.lost = "pulled out"
    door.set()
    answers = [t.result(10) for t in tickets]

    assert [a.outcome for a in answers] == ["answered"] * 4
    assert [float(a.output[0, 0]) for a in answers] == [3.0] * 4
    assert {a.service_s for a in answers} == {None}
    assert {a.plan for a in answers} == {1}
    assert engine.placement.places == (0, 0)
    assert "pulled out" in engine.changes[1].reason
    assert engine.lost
    until(lambda: bench.device.restarts > 1)  # tried again and again
    with pytest.raises(AcceleratorLost, match="away"):
        engine.apply(bench.plan([1, 1]))
    bench.device.refuses_restart = False
    until(lambda: engine.placement.places == (2, 3))
    assert engine.changes[-1].reason == "the accelerator is back"
    assert engine.submit("a", bench.x()).result(10).service_s is not None
    assert engine.lost == ""
    assert engine.snapshot().tenants[0].waiting == 0


def test_the_cpu_plan_shares_the_cores_by_load(make_bench: Any, until: Any) -> None:
    bench = make_bench("a", "b")
    engine = bench.engine([2, 3], cores=4)
    bench.device.refuses_restart = True
    bench.device.lost = "gone"
    assert engine.submit("a", bench.x()).result(10).outcome == "answered"

    until(lambda: engine.placement.places == (0, 0))
    assert sum(engine.placement.cores) == 4
    assert min(engine.placement.cores) >= 1


def test_more_tenants_than_cores_take_turns_while_the_device_is_away(
    make_bench: Any, until: Any
) -> None:
    bench = make_bench("a", "b", "c")
    engine = bench.engine([3, 3, 3], cores=1)
    bench.device.refuses_restart = True
    bench.device.lost = "gone"
    engine.submit("a", bench.x()).result(10)
    until(lambda: engine.placement.places == (0, 0, 0))
    door = bench.shut("a:0-3")
    tickets = [engine.submit(n, bench.x()) for n in "abc"]
    until(lambda: not any(engine.waiting.values()))  # each has a worker, one has the core
    bench_door_held = sum(t.done for t in tickets)
    door.set()

    assert bench_door_held <= 2
    assert [t.result(10).outcome for t in tickets] == ["answered"] * 3
    assert "take turns on 1 cores" in " ".join(engine.placement.notes)


def test_a_model_that_cannot_run_on_the_cpu_fails_cleanly(make_bench: Any, until: Any) -> None:
    bench = make_bench("a", "b")
    engine = bench.engine([3, 3])
    bench.world.refuse.add("a:0-3")
    bench.device.refuses_restart = True
    door = bench.shut("b:")
    first = engine.submit("b", bench.x())
    until(lambda: bench.device.order)
    second = engine.submit("a", bench.x())
    bench.device.lost = "gone"
    door.set()

    assert first.result(10).outcome == "answered"
    assert second.result(10).outcome == "failed"
    assert "the accelerator was lost" in second.result(10).reason
    bench.device.refuses_restart = False
    bench.world.refuse.clear()
    until(lambda: engine.placement.places == (3, 3))
    assert engine.submit("a", bench.x()).result(10).outcome == "answered"


def test_a_device_that_is_away_at_the_start_is_waited_for_on_the_cpu(
    make_bench: Any, until: Any
) -> None:
    bench = make_bench("a")
    bench.device.lost = "held by another process"
    bench.device.refuses_restart = True
    engine = bench.engine([2])

    assert engine.placement.places == (0,)
    assert "held by another" in engine.changes[0].reason
    assert engine.submit("a", bench.x()).result(10).outcome == "answered"
    bench.device.refuses_restart = False
    until(lambda: engine.placement.places == (2,))


def test_a_device_lost_during_a_change_keeps_answers_coming(make_bench: Any, until: Any) -> None:
    bench = make_bench("a")
    engine = bench.engine([1])
    bench.device.refuses_restart = True
    bench.device.lost = "unplugged"
    with pytest.raises(AcceleratorLost, match="unplugged"):
        engine.apply(bench.plan([2]))
    until(lambda: engine.placement.places == (0,))
    assert engine.submit("a", bench.x()).result(10).outcome == "answered"


def test_a_cancelled_request_of_a_lost_device_stays_cancelled(make_bench: Any, until: Any) -> None:
    bench = make_bench("a")
    engine = bench.engine([3])
    door = bench.shut("a:0-3")
    ticket = engine.submit("a", bench.x())
    until(lambda: bench.device.order)
    ticket.cancel()
    bench.device.refuses_restart = True
    bench.device.lost = "gone"
    door.set()

    assert ticket.result(10).outcome == "cancelled"


def test_a_device_that_is_lost_again_at_once_is_tried_more_rarely(
    make_bench: Any, until: Any
) -> None:
    bench = make_bench("a")
    engine = bench.engine([3])
    waits = []
    for _ in range(3):
        bench.device.lost = "again"
        engine.submit("a", bench.x()).result(10)
        until(lambda: engine.placement.places == (0,) or not engine.lost)
        waits.append(engine._retry_s)
        until(lambda: not engine.lost and engine.placement.places == (3,))

    assert waits == [0.01, 0.02, 0.04]
