from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgewise.backends.null import NullContext, NullProgram
from edgewise.errors import BackendError
from edgewise.exits import LOOK, Policy, policy_names
from edgewise.runtime import Answer, Session

Float32 = npt.NDArray[np.float32]
OPTIONS: dict[str, dict[str, Any]] = {"branchynet": {"threshold": 0.5}, "fixed": {"exit_index": 1}}


def program_of(session: Session) -> NullProgram:
    assert isinstance(session.program, NullProgram)
    return session.program


def units(answer: Answer) -> list[str]:
    return [step.unit for step in answer.steps]


def stages_of(names: list[str]) -> list[int]:
    """Which stages some units ran, in order."""
    spans = [n.removeprefix("segment:").split("-") for n in names if n.startswith("segment:")]
    return [k for start, stop in spans for k in range(int(start), int(stop))]


@pytest.mark.parametrize("budget_s", [0.5, 1.5, 2.5, 3.5, 9.0])
def test_only_the_chosen_head_runs_and_no_stage_twice(
    make_session: Any, x: Float32, budget_s: float
) -> None:
    session = make_session()
    answer = session.run(x, budget_s=budget_s)
    ran = program_of(session).ran

    assert ran == units(answer)
    assert [n for n in ran if n.startswith("head:")] == [f"head:{answer.exit_index}"]
    assert stages_of(ran) == list(range(answer.exit_index + 1))


@pytest.mark.parametrize("budget_s", [1.4, 2.6, 4.26])
@pytest.mark.parametrize("name", policy_names())
def test_waiting_and_all_steps_add_up_to_the_observed_time(
    make_session: Any, x: Float32, name: str, budget_s: float
) -> None:
    session = make_session(policy=name, slower=1.25, **OPTIONS.get(name, {}))
    session.clock.sleep_s(2.0)
    answer = session.run(x, budget_s=budget_s, arrival_s=1.9)

    assert answer.wait_s == pytest.approx(0.1)
    assert answer.observed_s == pytest.approx(
        answer.wait_s + sum(step.observed_s for step in answer.steps)
    )


def test_the_answer_says_what_was_predicted_and_what_was_seen(
    make_session: Any, x: Float32
) -> None:
    session = make_session(slower=2.0)
    first = session.run(x, budget_s=100.0)
    second = session.run(x, budget_s=100.0)

    # The first prediction is the profile's; it does not know its own outcome.
    assert (first.predicted_s, first.observed_s) == (4.25, 8.5)
    assert second.predicted_s == pytest.approx(8.5)
    assert [step.predicted_s for step in second.steps] == [4.0, 0.25]


def test_time_before_the_start_counts(make_session: Any, x: Float32) -> None:
    session = make_session()
    session.clock.sleep_s(10.0)
    fresh = session.run(x, budget_s=4.5)
    session.clock.sleep_s(10.0)
    waited = session.run(x, budget_s=4.5, arrival_s=session.clock.now_s() - 2.0)

    assert (fresh.exit_index, fresh.met) == (3, True)
    assert (waited.exit_index, waited.met) == (1, True)
    assert waited.observed_s == pytest.approx(4.25)


def test_a_deadline_that_has_passed_already_is_foreseen(make_session: Any, x: Float32) -> None:
    session = make_session()
    session.clock.sleep_s(10.0)
    answer = session.run(x, budget_s=1.0, arrival_s=0.0)

    assert answer.outcome == "ran_anyway"
    assert answer.exit_index == 0


def test_a_budget_that_nothing_meets_is_run_anyway_and_says_so(
    make_session: Any, x: Float32
) -> None:
    answer = make_session().run(x, budget_s=1.0)

    assert (answer.outcome, answer.feasible, answer.met) == ("ran_anyway", False, False)
    assert answer.reason == "no exit was predicted to fit the time left; late by 250 ms"
    assert units(answer) == ["segment:0-1", "head:0"]


def test_a_budget_that_nothing_meets_is_rejected_where_asked(make_session: Any, x: Float32) -> None:
    session = make_session(on_infeasible="reject")
    answer = session.run(x, budget_s=1.0)

    assert program_of(session).ran == []
    assert (answer.outcome, answer.feasible, answer.met) == ("rejected", False, False)
    assert (answer.label, answer.logits, answer.exit_index, answer.predicted_s) == (None,) * 4
    assert answer.observed_s == 0.0


def test_the_soonest_exit_is_not_always_the_first(make_session: Any, x: Float32) -> None:
    answer = make_session([1.0, 1.0], [9.0, 0.5]).run(x, budget_s=1.0)

    assert answer.exit_index == 1
    assert answer.observed_s == 2.5


def test_a_request_that_falls_behind_says_that_nothing_fitted_any_more(
    make_session: Any, x: Float32
) -> None:
    answer = make_session(slower=3.0).run(x, budget_s=2.3)

    assert (answer.outcome, answer.feasible) == ("late", True)
    assert answer.reason.startswith("no exit fitted the time left any more; late by ")


def test_a_forecast_that_proves_wrong_in_the_good_sense_is_in_time(
    make_session: Any, x: Float32
) -> None:
    answer = make_session(slower=0.5).run(x, budget_s=1.0)

    assert (answer.outcome, answer.feasible) == ("in_time", False)


@settings(deadline=None)  # the machine may be busy
@given(
    shares=st.lists(st.floats(0, 1), min_size=8, max_size=8),
    budget_s=st.floats(1.3, 8.0),
)
def test_nothing_is_late_when_no_unit_takes_longer_than_predicted(
    make_session: Any, shares: list[float], budget_s: float
) -> None:
    session = make_session([0.5, 1.0, 1.5, 1.0], [0.5, 0.25, 0.75, 0.25])
    program = program_of(session)
    medians = program.cost_s
    program.cost_s = lambda unit: medians(unit) * shares[sum(map(ord, unit)) % 8]

    answers = [session.run(np.zeros((1, 3, 8, 8)), budget_s=budget_s) for _ in range(3)]

    assert answers[0].feasible
    assert answers[0].met


RANKED = (0.5, 0.7, 0.6, 0.9)


@pytest.fixture(scope="module")
def sessions(make_session: Any) -> dict[str, Session]:
    """One session of every policy, on a model whose exits do not improve steadily."""
    return {
        name: make_session(policy=name, accuracy=RANKED, **OPTIONS.get(name, {}))
        for name in policy_names()
    }


@settings(deadline=None, max_examples=50)
@given(costs_s=st.lists(st.floats(0.01, 3), min_size=8, max_size=8), budget_s=st.floats(0.1, 12))
def test_no_policy_beats_the_oracle_on_the_same_request(
    sessions: dict[str, Session], costs_s: list[float], budget_s: float
) -> None:
    truth = {f"head:{k}": costs_s[4 + k] for k in range(4)}

    def cost_s(unit: str) -> float:
        if unit in truth:
            return truth[unit]
        return sum(costs_s[k] for k in stages_of([unit]))

    def run(name: str) -> Answer:
        program_of(sessions[name]).cost_s = cost_s
        return sessions[name].run(np.zeros((1, 3, 8, 8)), budget_s=budget_s)

    best = run("oracle")
    for name in policy_names():
        other = run(name)
        # Sums in another order differ in the last digit.
        if other.observed_s <= budget_s * (1 - 1e-9):
            assert best.met
            assert RANKED[best.exit_index or 0] >= RANKED[other.exit_index or 0]


def test_the_oracle_takes_the_time_of_the_way_it_would_have_gone(
    make_session: Any, x: Float32
) -> None:
    session = make_session(policy="oracle", slower=2.0)
    answer = session.run(x, budget_s=5.0)

    assert answer.exit_index == 1
    assert answer.observed_s == 4.5
    assert units(answer) == ["segment:0-1", "segment:1-2", "head:1"]
    # It ran everything to know.
    assert len(program_of(session).ran) == 8


def test_the_oracle_says_when_nothing_could_have_been_in_time(
    make_session: Any, x: Float32
) -> None:
    answer = make_session(policy="oracle").run(x, budget_s=1.0)

    assert (answer.outcome, answer.feasible, answer.exit_index) == ("ran_anyway", False, 0)


def sure_from(exit_index: int) -> Any:
    """Logits that know nothing before an exit and everything from it on."""

    def logits(k: int, batch: Float32) -> Float32:
        rows = np.zeros((len(batch), 10), dtype=np.float32)
        rows[:, 7] = 50.0 if k >= exit_index else 0.0
        return rows

    return logits


@pytest.mark.parametrize("exit_index", [0, 2, 3])
def test_branchynet_runs_every_head_until_one_is_sure(
    make_session: Any, x: Float32, exit_index: int
) -> None:
    session = make_session(policy="branchynet", threshold=0.5, logits=sure_from(exit_index))
    answer = session.run(x, budget_s=0.1)

    heads = [n for n in program_of(session).ran if n.startswith("head:")]
    assert answer.exit_index == exit_index
    assert heads == [f"head:{k}" for k in range(exit_index + 1)]
    assert answer.observed_s == pytest.approx(1.25 * (exit_index + 1))
    assert (answer.label, answer.feasible, answer.outcome) == (7, None, "late")


def test_the_last_exit_answers_even_where_a_policy_only_looks(
    make_session: Any, x: Float32
) -> None:
    class Doubter(Policy):
        name = "doubter"

        def decide(self, position: int, now_s: float, start_s: float, deadline_s: float) -> int:  # noqa: ARG002
            return LOOK if position else 1

        def accept(self, exit_index: int, logits: Float32) -> bool:  # noqa: ARG002
            return False

    plain = make_session()
    session = Session(plain.program, plain.costs, policy=Doubter(), clock=plain.clock)
    answer = session.run(x, budget_s=9.0)

    assert answer.exit_index == 3
    assert units(answer)[-1] == "head:3"


def test_a_stage_that_raises_midway_leaves_no_trace(
    make_session: Any, x: Float32, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = make_session()
    expected = session.run(x, budget_s=2.5).to_json()
    run_segment = NullContext.run_segment
    broken: list[NullContext] = []

    def fail_once(self: NullContext, start: int, stop: int) -> None:
        if start > 0 and not broken:
            broken.append(self)
            raise BackendError("the accelerator went away")
        run_segment(self, start, stop)

    with monkeypatch.context() as patch:
        patch.setattr(NullContext, "run_segment", fail_once)
        with pytest.raises(BackendError, match="went away"):
            session.run(x + 1, budget_s=3.5)
        after = [session.run(x, budget_s=2.5).to_json() for _ in range(3)]

    assert broken
    for found in after:
        assert found["reason"] == expected["reason"]
        assert found["exit_index"] == expected["exit_index"]
        assert found["observed_s"] == pytest.approx(expected["observed_s"])
    assert broken[0] not in session.program._free[1]
