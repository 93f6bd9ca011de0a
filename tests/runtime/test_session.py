from __future__ import annotations

import json
import logging
import math
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edgewise.backends import load_program
from edgewise.backends.null import NullProgram
from edgewise.clock import VirtualClock
from edgewise.device.state import DeviceState, Quantity
from edgewise.errors import BackendError, ConfigError, DataError, ShapeError
from edgewise.frontends.outline import outline_model
from edgewise.model import StagedModel
from edgewise.predict import CostTable
from edgewise.runtime import Session

Float32 = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def real(tiny_model: StagedModel) -> Session:
    """A net that computes something; a fixed exit, so that answers do not depend on the machine."""
    program = load_program(tiny_model, "onnxruntime")
    return Session(program, CostTable.from_costs([1e-6] * 3, [1e-6] * 3), policy="full_depth")


def images(count: int) -> Float32:
    return np.random.default_rng(2).normal(size=(count, 3, 8, 8)).astype(np.float32)


def test_an_answer_is_one_json_object(make_session: Any, x: Float32) -> None:
    for budget_s in (0.1, 9.0):
        record = make_session(on_infeasible="reject").run(x, budget_s=budget_s).to_json()

        assert json.loads(json.dumps(record, allow_nan=False)) == record
        assert "logits" not in record
        assert record["budget_s"] == budget_s


def test_an_answer_of_a_real_runtime_is_json_too(real: Session) -> None:
    record = real.run(images(1), budget_s=1.0).to_json()

    assert json.loads(json.dumps(record)) == record
    assert [step["unit"] for step in record["steps"]] == ["segment:0-3", "head:2"]


def test_the_answer_names_its_class_and_how_sure_it_is(make_session: Any, x: Float32) -> None:
    def logits(_: int, batch: Float32) -> Float32:
        return np.tile(np.array([0, 3, 1] + [0] * 7, dtype=np.float32), (len(batch), 1))

    answer = make_session(logits=logits).run(x, budget_s=9.0)
    powers = np.exp([0, 3, 1] + [0] * 7)

    assert answer.label == 1
    assert answer.probability == pytest.approx(powers[1] / powers.sum())
    assert answer.class_name is None
    assert answer.logits.tolist() == [0, 3, 1] + [0] * 7


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (np.full((1, 3, 8, 8), np.nan), DataError, "NaN"),
        (np.full((1, 3, 8, 8), np.inf), DataError, "infinite"),
        (np.zeros((1, 3, 9, 8)), ShapeError, r"\[1, 3, 8, 8\], found \[1, 3, 9, 8\]"),
        (np.zeros((2, 3, 8, 8)), ShapeError, r"found \[2, 3, 8, 8\]"),
        (np.zeros((1, 8, 8, 3)), ShapeError, "expected shape"),
        (np.zeros((0, 3, 8, 8)), ShapeError, "expected shape"),
        (np.zeros(()), ShapeError, "expected shape"),
        ([], ShapeError, "expected shape"),
        (np.zeros((1, 3, 8, 8), dtype=np.int64), ShapeError, "int64"),
        (np.zeros((1, 3, 8, 8), dtype=bool), ShapeError, "bool"),
        (np.full((1, 3, 8, 8), "7"), ShapeError, "dtype <U1"),
        ([[1.0], [1.0, 2.0]], ShapeError, "not an array"),
        ("a.png", ShapeError, "dtype"),
        (None, ShapeError, "dtype object"),
        (np.full((1, 3, 8, 8), 1e300), DataError, "beyond the range"),
        (np.broadcast_to(np.float32(0), (1, 3, 200_000, 200_000)), ShapeError, "200000"),
    ],
    ids=[
        "NaN", "infinity", "too high", "two samples", "channels last", "no sample", "a number",
        "nothing", "whole numbers", "booleans", "texts", "ragged", "a path", "None",
        "beyond float32", "enormous",
    ],
)  # fmt: skip
def test_an_input_that_the_model_does_not_take_is_refused_and_nothing_runs(
    make_session: Any, x: Float32, value: Any, error: type[Exception], message: str
) -> None:
    session = make_session()
    with pytest.raises(error, match=message):
        session.run(value, budget_s=1.5)

    assert session.program.ran == []
    assert session.run(x, budget_s=1.5).met


@pytest.mark.parametrize(
    "budget_s",
    [0, 0.0, -1.0, math.nan, math.inf, -math.inf, True, "15", "15 ms", None, np.zeros(2)],
    ids=str,
)
def test_a_budget_that_is_no_time_is_refused_and_nothing_runs(
    make_session: Any, x: Float32, budget_s: Any
) -> None:
    session = make_session()
    with pytest.raises(ConfigError, match="budget") as caught:
        session.run(x, budget_s=budget_s)

    assert "budget_s=0.015" in str(caught.value.help)
    assert session.program.ran == []


@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 3, 8, 8)], ids=["sample", "batch of one"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "uint8"])
def test_one_sample_may_come_without_its_batch_axis(
    make_session: Any, shape: tuple[int, ...], dtype: str
) -> None:
    assert make_session().run(np.zeros(shape, dtype=dtype), budget_s=9.0).exit_index == 3


def test_the_callers_array_is_never_written_to(real: Session) -> None:
    given = images(1)
    before = given.copy()
    real.run(given, budget_s=1.0)

    assert (given == before).all()


def test_an_answers_logits_survive_the_next_request(real: Session) -> None:
    first = real.run(images(2)[:1], budget_s=1.0)
    kept = np.array(first.logits)
    real.run(images(2)[1:], budget_s=1.0)

    assert first.logits is not None
    assert (first.logits == kept).all()


@pytest.mark.parametrize("arrival_s", [10.1, math.inf, math.nan, -math.inf], ids=str)
def test_an_arrival_that_is_not_in_the_past_is_refused(
    make_session: Any, x: Float32, arrival_s: float
) -> None:
    session = make_session()
    session.clock.sleep_s(10.0)

    with pytest.raises(ConfigError, match="expected an arrival in the past") as caught:
        session.run(x, budget_s=1.0, arrival_s=arrival_s)
    assert "session.clock.now_s()" in str(caught.value.help)


def test_an_unknown_policy_is_told_with_the_nearest_names(make_session: Any) -> None:
    with pytest.raises(ConfigError, match="unknown policy 'edgewize'") as caught:
        make_session(policy="edgewize")
    assert "'edgewise'" in str(caught.value.help)


def test_a_policy_made_elsewhere_may_be_passed(make_session: Any, x: Float32) -> None:
    plain = make_session(policy="fixed", exit_index=2)
    session = Session(plain.program, plain.costs, policy=plain.policy, clock=plain.clock)

    assert session.policy is plain.policy
    assert session.run(x, budget_s=9.0).exit_index == 2


@pytest.mark.parametrize("name", ["fixed", "full_depth", "edgewise"])
def test_eight_threads_on_one_session_answer_as_one_thread_does(
    tiny_model: StagedModel, name: str
) -> None:
    program = load_program(tiny_model, "onnxruntime")
    # Costs of nearly nothing: every policy goes to its end, and only sharing could change answers.
    session = Session(program, CostTable.from_costs([1e-9] * 3, [1e-9] * 3), policy=name)
    given = images(16)
    expected = [session.run(x, budget_s=60.0) for x in given]
    found: dict[int, list[Any]] = {}

    def work(thread: int) -> None:
        order = np.random.default_rng(thread).permutation(len(given))
        found[thread] = [(n, session.run(given[n], budget_s=60.0)) for n in order]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(found) == 8
    for n, answer in (pair for pairs in found.values() for pair in pairs):
        assert answer.exit_index == expected[n].exit_index
        assert (answer.logits == expected[n].logits).all()


def test_threads_with_different_depths_do_not_disturb_each_other(tiny_model: StagedModel) -> None:
    program = load_program(tiny_model, "onnxruntime")
    costs = CostTable.from_costs([1e-6] * 3, [1e-6] * 3)
    sessions = [Session(program, costs, policy="fixed", exit_index=n % 3) for n in range(8)]
    given = images(8)
    expected = [s.run(x, budget_s=60.0).logits for s, x in zip(sessions, given, strict=True)]
    wrong = []

    def work(n: int) -> None:
        for _ in range(20):
            answer = sessions[n].run(given[n], budget_s=60.0)
            if answer.exit_index != n % 3 or not np.array_equal(answer.logits, expected[n]):  # type: ignore[arg-type]
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []


def test_a_real_stage_that_fails_once_leaves_no_trace(tiny_model: StagedModel) -> None:
    program = load_program(tiny_model, "onnxruntime")
    session = Session(program, CostTable.from_costs([1e-6] * 3, [1e-6] * 3), policy="branchynet",
                      threshold=0.0)  # fmt: skip
    given = images(2)
    expected = session.run(given[0], budget_s=60.0)
    (context,) = program._free[1]
    run_segment = context.run_segment

    def fail_midway(start: int, stop: int) -> None:
        if start == 1:
            raise BackendError("out of memory")
        run_segment(start, stop)

    context.run_segment = fail_midway  # type: ignore[method-assign]
    with pytest.raises(BackendError, match="out of memory"):
        session.run(given[1], budget_s=60.0)
    after = session.run(given[0], budget_s=60.0)

    assert context not in program._free[1]
    assert after.exit_index == expected.exit_index
    assert after.logits is not None
    assert (after.logits == expected.logits).all()


def test_warming_up_runs_every_unit_and_tells_its_time(make_session: Any) -> None:
    session = make_session()
    spent_s = session.warm_up(rounds=2)
    ran = session.program.ran

    assert {f"segment:{i}-{j}" for i, j in session.program.segments} <= set(ran)
    assert ran.count("head:3") == 2
    assert spent_s == session.clock.now_s()


def test_warming_up_for_batches_makes_every_padded_size(make_session: Any) -> None:
    session = make_session()
    session.warm_up(rounds=1, max_batch=5)

    assert sorted(session.program._free) == [1, 2, 4, 8]


def test_a_session_without_a_clock_uses_the_machines(make_session: Any) -> None:
    plain = make_session()
    session = Session(plain.program, plain.costs)

    assert not isinstance(session.clock, VirtualClock)
    assert session.clock.now_s() <= session.clock.now_s()


def noisy_costs(seconds: float, rounds: int) -> CostTable:
    """One stage and one head, with a profile of some rounds behind them."""
    rng = np.random.default_rng(0)
    return CostTable(
        backend="null",
        stage_s=np.array([seconds]),
        head_s=np.array([seconds / 10]),
        segment_s={(0, 1): seconds},
        samples=np.array([seconds, seconds / 10]) * rng.lognormal(0.0, 0.02, (rounds, 2)),
        medians=np.array([seconds, seconds / 10]),
    )


def play(session: Session, requests: int) -> None:
    x = np.zeros((1, 3, 8, 8), dtype=np.float32)
    for _ in range(requests):
        session.run(x, budget_s=10.0)


@pytest.mark.parametrize(("slower", "rings"), [(1.0, False), (2.0, True)])
def test_a_profile_that_is_lastingly_wrong_rings_an_alarm(
    slower: float, *, rings: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    clock, rng = VirtualClock(), np.random.default_rng(1)
    median_s = {"segment:0-1": 0.1, "head:0": 0.01}
    program = NullProgram(
        outline_model(1),
        clock=clock,
        cost_s=lambda unit: slower * median_s[unit] * float(rng.lognormal(0.0, 0.02)),
    )
    session = Session(program, noisy_costs(0.1, 40), clock=clock)
    play(session, 200)
    assert (session.alarm is not None) == rings
    if session.alarm is not None:
        assert session.alarm.ratio == pytest.approx(2.0, rel=0.1)
        assert len([r for r in caplog.records if "edgewise profile" in r.message]) == 1


def test_without_a_profile_behind_the_costs_nothing_is_called_drift() -> None:
    clock = VirtualClock()
    program = NullProgram(outline_model(1), clock=clock, cost_s=lambda _: 9.0)
    session = Session(program, noisy_costs(0.1, 3), clock=clock)
    play(session, 50)
    assert session.alarm is None


def test_closing_a_session_stops_what_watches_the_device_for_it() -> None:
    class Watcher:
        stopped = False

        def latest(self) -> DeviceState:
            return DeviceState(at_s=0.0, quantities={"cpu.quota_ratio": Quantity.ok(0.5)})

        def stop(self) -> None:
            self.stopped = True

    watcher, clock = Watcher(), VirtualClock()
    program = NullProgram(outline_model(1), clock=clock, cost_s=lambda _: 0.01)
    with Session(program, noisy_costs(0.01, 3), clock=clock, source=watcher) as session:
        answer = session.run(np.zeros((1, 3, 8, 8), dtype=np.float32), budget_s=1.0)
        assert answer.state == {"cpu.quota_ratio": 0.5}
        assert answer.to_json()["state"] == {"cpu.quota_ratio": 0.5}
    assert watcher.stopped
