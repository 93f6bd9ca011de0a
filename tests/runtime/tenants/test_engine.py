"""Requests through the engine: order, admission, cancelling, failing, plans and their ends."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import numpy as np
import pytest

from edgewise.errors import BackendError, ConfigError, ShapeError
from edgewise.runtime.tenants.engine import TenantEngine
from edgewise.runtime.tenants.records import QueueRule, TenantModel


def value(answer: Any) -> float:
    assert answer.outcome == "answered", answer.reason
    return float(answer.output[0, 0])


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_a_request_is_answered_wherever_its_model_is_cut(make_bench: Any, place: int) -> None:
    bench = make_bench("a")
    answer = bench.engine([place]).submit("a", bench.x(5)).result(10)

    assert value(answer) == 8.0
    assert (answer.service_s is None) == (place == 0)
    assert (answer.cpu_s is None) == (place == 3)
    assert answer.plan == 0
    assert answer.response_s >= 0


def test_one_thread_alone_uses_the_device(make_bench: Any) -> None:
    bench = make_bench("a", "b")
    engine = bench.engine([1, 3])
    tickets = [engine.submit(n, bench.x()) for n in "abab"]
    engine.apply(bench.plan([2, 2]))
    assert all(value(t.result(10)) == 3.0 for t in tickets)

    assert len(bench.device.users) == 1


def test_a_piece_is_loaded_for_each_worker_with_its_threads(make_bench: Any) -> None:
    bench = make_bench("a")
    plan = bench.plan([1], [4])
    share = dataclasses.replace(plan.shares[0], workers=2, threads=2)
    engine = bench.engine([0])
    bench.world.loaded.clear()
    engine.apply(dataclasses.replace(plan, shares=(share,)))

    assert bench.world.loaded.count("a:1-3x2") == 2


def test_fcfs_serves_in_the_order_of_arrival(make_bench: Any) -> None:
    bench = make_bench("a", "b")
    engine = bench.engine([3, 3], queue=QueueRule(discipline="fcfs"))
    door = bench.shut("a:")
    tickets = [engine.submit(n, bench.x(k)) for k, n in enumerate("abbaab")]
    door.set()
    for ticket in tickets:
        ticket.result(10)

    assert [k for _, k in bench.device.order] == [0, 1, 2, 3, 4, 5]


def test_the_earliest_deadline_is_first_while_a_model_is_resident(
    make_bench: Any, until: Any
) -> None:
    bench = make_bench("a")
    engine = bench.engine([3], admission=False)
    door = bench.shut("a:")
    tickets = [engine.submit("a", bench.x(0))]
    until(lambda: bench.device.order)
    for k, deadline_s in enumerate([0.9, None, 0.3, 0.6], start=1):
        tickets.append(engine.submit("a", bench.x(k), deadline_s=deadline_s))
    door.set()
    for ticket in tickets:
        ticket.result(10)

    assert [k for _, k in bench.device.order] == [0, 3, 4, 1, 2]


def test_a_burst_of_the_resident_model_ends_when_others_wait(make_bench: Any, until: Any) -> None:
    bench = make_bench("a", "b")
    engine = bench.engine([3, 3], queue=QueueRule(burst=2))
    door = bench.shut("a:")
    tickets = [engine.submit("a", bench.x(0))]
    until(lambda: bench.device.order)
    tickets += [engine.submit("a", bench.x(k)) for k in (1, 2, 3, 4)]
    tickets += [engine.submit("b", bench.x(k)) for k in (10, 11, 12)]
    door.set()
    for ticket in tickets:
        ticket.result(10)

    assert [k for _, k in bench.device.order] == [0, 1, 2, 10, 11, 3, 4, 12]


def test_a_full_line_refuses_at_once_and_says_when_to_try_again(make_bench: Any) -> None:
    bench = make_bench("a", "b")
    engine = bench.engine([0, 0], max_waiting=2)
    door = bench.shut("a:")
    tickets = [engine.submit("a", bench.x()) for _ in range(6)]
    refused = [t for t in tickets if t.done]

    assert len(refused) >= 3  # one runs, two wait
    answer = refused[-1].result(0)
    assert answer.outcome == "refused"
    assert "try again in" in answer.reason
    assert answer.retry_after_s > 0
    assert value(engine.submit("b", bench.x()).result(10)) == 3.0  # the other does not notice
    door.set()


def test_what_would_miss_its_deadline_behind_others_is_refused(make_bench: Any, until: Any) -> None:
    bench = make_bench("a")
    engine = bench.engine([0])  # 3 ms each on one worker
    door = bench.shut("a:")
    first = engine.submit("a", bench.x())
    until(lambda: engine.snapshot().tenants[0].running)
    for _ in range(5):
        engine.submit("a", bench.x())
    late = engine.submit("a", bench.x(), deadline_s=0.012)
    fine = engine.submit("a", bench.x(), deadline_s=60.0)

    assert late.result(0).outcome == "refused"
    assert "predicted in" in late.result(0).reason
    assert 0 < late.result(0).retry_after_s < 0.02
    assert not fine.done
    door.set()
    assert first.result(10).outcome == fine.result(10).outcome == "answered"


def test_a_deadline_that_an_idle_machine_misses_is_refused_without_a_time(make_bench: Any) -> None:
    bench = make_bench("a")
    answer = bench.engine([0]).submit("a", bench.x(), deadline_s=1e-3).result(0)

    assert answer.outcome == "refused"
    assert answer.retry_after_s is None
    assert "not even an idle machine" in answer.reason


def test_cancelling_a_waiting_request_frees_its_place_at_once(make_bench: Any, until: Any) -> None:
    bench = make_bench("a")
    engine = bench.engine([2])
    door = bench.shut("a:")
    running, waiting = engine.submit("a", bench.x(1)), engine.submit("a", bench.x(2))
    until(lambda: bench.device.order)

    assert waiting.cancel()
    assert waiting.result(0).outcome == "cancelled"
    assert engine.waiting == {"a": 0}
    assert not waiting.cancel()
    door.set()
    assert running.result(10).outcome == "answered"
    assert [k for _, k in bench.device.order] == [1]


def test_cancelling_a_running_request_ends_it_after_its_step(make_bench: Any, until: Any) -> None:
    bench = make_bench("a")
    engine = bench.engine([2])
    door = bench.shut("a:0-2")
    ticket = engine.submit("a", bench.x())
    until(lambda: bench.device.order)

    assert ticket.cancel()
    assert not ticket.done
    door.set()
    answer = ticket.result(10)
    assert (answer.outcome, answer.output, answer.cpu_s) == ("cancelled", None, None)


def test_cancelling_on_the_cpu_drops_the_output(make_bench: Any, until: Any) -> None:
    bench = make_bench("a")
    engine = bench.engine([0])
    door = bench.shut("a:0-3")
    running, waiting = engine.submit("a", bench.x()), engine.submit("a", bench.x())
    until(lambda: engine.snapshot().tenants[0].running)

    assert waiting.cancel()
    assert running.cancel()
    door.set()
    assert running.result(10).outcome == waiting.result(10).outcome == "cancelled"


@pytest.mark.parametrize("bad", ["a:0-1", "a:1-3"], ids=["prefix", "suffix"])
def test_a_model_that_fails_at_invocation_fails_its_own_requests_only(
    make_bench: Any, bad: str
) -> None:
    bench = make_bench("a", "b")
    engine = bench.engine([1, 1])
    bench.world.fail.add(bad)
    broken, fine = engine.submit("a", bench.x()), engine.submit("b", bench.x())

    assert broken.result(10).outcome == "failed"
    assert "does not compute" in broken.result(10).reason
    assert value(fine.result(10)) == 3.0
    bench.world.fail.clear()
    assert value(engine.submit("a", bench.x()).result(10)) == 3.0


def test_a_tenant_that_cannot_be_loaded_leaves_the_others_in_peace(make_bench: Any) -> None:
    bench = make_bench("a", "b")
    bench.world.refuse.add("a:")
    engine = bench.engine([1, 1])
    answer = engine.submit("a", bench.x()).result(0)

    assert answer.outcome == "failed"
    assert "cannot load a:0-1" in answer.reason
    assert "cannot load" in engine.snapshot().tenants[0].problem
    assert value(engine.submit("b", bench.x()).result(10)) == 3.0
    bench.world.refuse.clear()
    engine.apply(bench.plan([2, 1]))
    assert value(engine.submit("a", bench.x()).result(10)) == 3.0


def test_an_engine_that_can_serve_nobody_does_not_start(make_bench: Any) -> None:
    bench = make_bench("a")
    bench.world.fail.add("a:")
    with pytest.raises(BackendError, match="no tenant can be served"):
        bench.engine([1])


def test_a_plan_that_fails_to_load_leaves_the_old_one(make_bench: Any, until: Any) -> None:
    bench = make_bench("a", "b")
    engine = bench.engine([1, 1])
    alive, keys = bench.world.alive, set(bench.device.prefixes)
    bench.world.fail.add("b:2-3")
    with pytest.raises(BackendError, match=r"tenant 'b' cannot run as planned.*does not compute"):
        engine.apply(bench.plan([2, 2], [2, 2]))

    assert engine.placement.places == (1, 1)
    assert len(engine.changes) == 1
    # What had loaded is closed by its own thread.
    until(lambda: (bench.world.alive, set(bench.device.prefixes)) == (alive, keys))
    assert value(engine.submit("b", bench.x()).result(10)) == 3.0


def test_what_only_the_old_plan_needed_is_given_back(make_bench: Any, until: Any) -> None:
    bench = make_bench("a", "b")
    engine = bench.engine([1, 2], plan_cores=[2, 1])
    engine.apply(bench.plan([2, 2], [1, 1]))

    until(lambda: set(bench.device.prefixes) == {"a/2", "b/2"} and bench.world.alive == 2)
    assert engine.changes[-1].drained_s is not None


def test_a_plan_that_comes_back_loads_nothing_again(make_bench: Any, until: Any) -> None:
    bench = make_bench("a")
    engine = bench.engine([1], keep_idle=2)
    engine.apply(bench.plan([2]))
    until(lambda: engine.changes[-1].drained_s is not None)
    until(lambda: len(engine._loader._idle) == 1)
    bench.world.loaded.clear()
    engine.apply(bench.plan([1]))

    assert bench.world.loaded == []
    assert value(engine.submit("a", bench.x()).result(10)) == 3.0
    assert set(bench.device.prefixes) == {"a/1", "a/2"}
    engine.close()
    assert bench.world.alive == 0


def test_no_more_than_so_many_idle_pieces_are_kept(make_bench: Any, until: Any) -> None:
    bench = make_bench("a")
    engine = bench.engine([0], keep_idle=1)
    for place in (1, 2, 0):
        engine.apply(bench.plan([place]))

    until(lambda: len(bench.device.prefixes) == 1 and bench.world.alive == 2)
    assert engine.placement.places == (0,)


def test_a_change_of_workers_loads_only_the_difference(make_bench: Any, until: Any) -> None:
    bench = make_bench("a")
    engine = bench.engine([1])
    plan = bench.plan([1])

    def with_workers(workers: int) -> Any:
        share = dataclasses.replace(plan.shares[0], workers=workers, threads=1)
        return dataclasses.replace(plan, shares=(share,))

    engine.apply(with_workers(2))
    bench.world.loaded.clear()
    engine.apply(with_workers(4))

    assert bench.world.loaded == ["a:1-3x1"] * 2
    engine.apply(with_workers(1))
    until(lambda: bench.world.alive == 1)
    assert value(engine.submit("a", bench.x()).result(10)) == 3.0


def test_requests_end_under_the_plan_they_came_in(make_bench: Any, until: Any) -> None:
    bench = make_bench("a")
    engine = bench.engine([0])
    door = bench.shut("a:0-3")
    old = [engine.submit("a", bench.x()) for _ in range(3)]
    until(lambda: engine.snapshot().tenants[0].running)
    change = engine.apply(bench.plan([2]), reason="test")
    new = engine.submit("a", bench.x())

    assert new.result(10).plan == change.number == 1
    assert change.drained_s is None
    assert engine.changes[-1].reason == "test"
    door.set()
    assert [t.result(10).plan for t in old] == [0, 0, 0]
    until(lambda: engine.changes[-1].drained_s is not None)


def test_close_drains_what_it_can_and_drops_the_rest(make_bench: Any) -> None:
    bench = make_bench("a")
    engine = bench.engine([0])
    door = bench.shut("a:")
    tickets = [engine.submit("a", bench.x()) for _ in range(4)]
    closer = threading.Thread(target=engine.close, kwargs={"drain_s": 0.02})
    closer.start()
    outcomes = [t.result(10).outcome for t in tickets]
    door.set()
    closer.join(10)

    assert outcomes == ["dropped"] * 4
    after = engine.submit("a", bench.x()).result(0)
    assert (after.outcome, after.reason) == ("refused", "the engine is closing")
    with pytest.raises(ConfigError, match="closed"):
        engine.apply(bench.plan([1]))


def test_close_lets_requests_end_that_still_can(make_bench: Any) -> None:
    bench = make_bench("a")
    engine = bench.engine([1])
    tickets = [engine.submit("a", bench.x()) for _ in range(20)]
    engine.close(drain_s=10)

    assert all(t.result(0).outcome == "answered" for t in tickets)


def test_everybody_is_told_exactly_once_and_drain_waits_for_it(make_bench: Any) -> None:
    bench = make_bench("a", "b")
    engine = bench.engine([1, 0])
    told: list[int] = []

    def done(answer: Any) -> None:
        told.append(answer.number)
        if answer.number == 3:
            raise RuntimeError("its sender's mistake")

    for _ in range(10):
        engine.submit("a", bench.x(), on_done=done)
        engine.submit("b", bench.x(), on_done=done)
    assert engine.drain(10)

    assert sorted(told) == list(range(20))


def test_eight_threads_submit_and_nothing_is_lost(make_bench: Any) -> None:
    bench = make_bench("a", "b", "c")
    engine = bench.engine([1, 3, 0], admission=False, max_waiting=10_000)
    found: list[Any] = []

    def send(thread: int) -> None:
        name = "abc"[thread % 3]
        tickets = [engine.submit(name, bench.x(thread)) for _ in range(50)]
        found.extend((thread, t.result(20)) for t in tickets)

    threads = [threading.Thread(target=send, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert len(found) == 400
    assert all(value(answer) == thread + 3 for thread, answer in found)
    assert sorted(a.number for _, a in found) == list(range(400))
    now = engine.snapshot()
    assert sum(t.answered for t in now.tenants) == 400
    assert all(t.waiting == t.running == 0 for t in now.tenants)


def test_a_hundred_changes_of_plan_under_constant_load_lose_nothing(make_bench: Any) -> None:
    bench = make_bench("a", "b")
    engine = bench.engine([1, 1], max_waiting=100_000)
    plans = [bench.plan(p, k) for p, k in (([0, 2], [2, 1]), ([3, 1], [0, 2]), ([1, 1], [1, 1]))]
    outcomes: list[str] = []
    stop = threading.Event()

    def send(name: str) -> None:
        while not stop.is_set():
            tickets = [engine.submit(name, bench.x()) for _ in range(4)]
            outcomes.extend(t.result(20).outcome for t in tickets)

    senders = [threading.Thread(target=send, args=(n,)) for n in "ab"]
    for sender in senders:
        sender.start()
    for k in range(100):
        engine.apply(plans[k % 3], reason=str(k))
    stop.set()
    for sender in senders:
        sender.join(20)

    assert len(outcomes) > 200
    assert set(outcomes) == {"answered"}
    changes = engine.changes
    assert [c.number for c in changes] == list(range(101))
    assert all(c.began_s <= c.routed_s <= (c.drained_s or c.routed_s) for c in changes)


def test_the_snapshot_counts_what_happened(make_bench: Any) -> None:
    bench = make_bench("a", deadline_s={"a": 5.0})
    engine = bench.engine([1])
    for _ in range(5):
        engine.submit("a", bench.x()).result(10)
    now = engine.snapshot()
    tenant = now.tenants[0]

    assert (tenant.answered, tenant.refused, tenant.failed, tenant.late) == (5, 0, 0, 0)
    assert tenant.response_s > 0
    assert tenant.p95_s >= tenant.response_s * 0.5
    assert tenant.longest_wait_s >= 0
    assert 0 <= tenant.cpu_busy <= 1
    assert 0 <= now.accelerator_busy <= 1
    assert (now.plan, now.lost) == (0, "")


def test_bad_requests_are_refused_with_what_was_expected(make_bench: Any) -> None:
    bench = make_bench("lobby")
    engine = bench.engine([1])
    with pytest.raises(ConfigError, match="did you mean 'lobby'"):
        engine.submit("loby", bench.x())
    for bad in (np.zeros((1, 5), np.float32), np.zeros((1, 4)), [[0.0] * 4]):
        with pytest.raises(ShapeError, match=r"expected an array of float32 \(1, 4\)"):
            engine.submit("lobby", bad)
    for deadline_s in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="deadline"):
            engine.submit("lobby", bench.x(), deadline_s=deadline_s)


def test_plans_that_cannot_be_carried_out_are_refused_before_anything_is_loaded(
    make_bench: Any,
) -> None:
    bench = make_bench("a", "b")
    engine = bench.engine([1, 1])
    good = bench.plan([1, 1])
    share = good.shares[0]
    bad = {
        "for tenants|is for": dataclasses.replace(good, shares=good.shares[1:]),
        "its places are 0 to 3": dataclasses.replace(
            good, shares=(dataclasses.replace(share, place=4), good.shares[1])
        ),
        "no core to run it": dataclasses.replace(
            good, shares=(dataclasses.replace(share, workers=0, cores=0), good.shares[1])
        ),
    }
    bench.world.loaded.clear()
    for message, plan in bad.items():
        with pytest.raises(ConfigError, match=message):
            engine.apply(plan)

    assert not bench.world.loaded
    with pytest.raises(ConfigError, match="the engine has none"):
        TenantEngine(bench.tenants(), good, load=bench.world.load)
    odd = dataclasses.replace(bench.tenants()[0], profile=_short_profile())
    with pytest.raises(ConfigError, match="its profile 0 to 1"):
        TenantEngine([odd, bench.tenants()[1]], good, device=bench.device)
    with pytest.raises(ConfigError, match="two tenants are called 'a'"):
        TenantEngine([bench.tenants()[0]] * 2, good, device=bench.device)
    with pytest.raises(ConfigError, match="at least one tenant"):
        TenantEngine([], good)


def _short_profile() -> Any:
    from edgewise.profiles.partition import PartitionProfile

    return PartitionProfile(
        model_id="short",
        cuts=("x", "y"),
        depth_ratio=np.array([0.0, 1.0]),
        prefix_bytes=np.array([0.0, 1.0]),
        boundary_bytes=np.array([1.0, 1.0]),
        accelerator_s=np.array([0.0, 1.0]),
        cpu_s=np.array([[1.0], [0.0]]),
    )


def test_rules_and_numbers_out_of_range_are_refused(make_bench: Any) -> None:
    bench = make_bench("a")
    for rule in (QueueRule(burst=0), QueueRule(threshold=0), QueueRule(timeout_s=-1)):
        with pytest.raises(ConfigError, match="burst"):
            bench.engine([1], queue=rule)
    with pytest.raises(ConfigError, match="did you mean 'fcfs'"):
        bench.engine([1], queue=QueueRule(discipline="fcf"))  # type: ignore[arg-type]
    for options in ({"max_waiting": 0}, {"cores": 0}):
        with pytest.raises(ConfigError, match="at least one"):
            bench.engine([1], **options)


def test_a_request_sent_late_counts_from_when_it_was_due(make_bench: Any) -> None:
    bench = make_bench("a")
    engine = bench.engine([0])
    answer = engine.submit("a", bench.x(), due_s=engine.clock.now_s() - 2.0).result(10)

    assert 2.0 <= answer.response_s < 12.0


def test_tenants_are_records_that_the_engine_leaves_alone(make_bench: Any) -> None:
    bench = make_bench("a")
    tenant = bench.tenants()[0]
    assert isinstance(tenant, TenantModel)
    x = bench.x(1)
    x.flags.writeable = False
    assert value(bench.engine([1]).submit("a", x).result(10)) == 4.0
