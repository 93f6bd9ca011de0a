from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgewise.backends import load_program
from edgewise.errors import BackendError, ConfigError, DataError, ShapeError
from edgewise.exits import policy_names
from edgewise.model import StagedModel
from edgewise.predict import CostTable
from edgewise.runtime import Session
from edgewise.scores import normalised_entropy

Float32 = npt.NDArray[np.float32]
FREE = {2: 1.0, 4: 1.0, 8: 1.0}  # a batch costs what one sample costs


def samples(count: int) -> Float32:
    return np.zeros((count, 3, 8, 8), dtype=np.float32)


def images(count: int) -> Float32:
    return np.random.default_rng(4).normal(size=(count, 3, 8, 8)).astype(np.float32)


def test_every_sample_has_its_own_budget(make_session: Any) -> None:
    session = make_session(batch_ratio=FREE)
    answers = session.run_batch(samples(4), budgets_s=[1.5, 2.6, 4.0, 9.0])

    assert [a.exit_index for a in answers] == [0, 1, 2, 3]
    assert all(a.met for a in answers)


def test_who_is_done_leaves_and_the_others_are_regrouped(make_session: Any) -> None:
    session = make_session(batch_ratio=FREE)
    sizes = []
    context = session.program.context

    def recorded(batch: int = 1) -> Any:
        sizes.append(batch)
        return context(batch)

    session.program.context = recorded
    session.run_batch(samples(5), budgets_s=[1.6, 1.6, 1.6, 9.0, 9.0])

    # Five are padded to eight, three heads to four; then two go on.
    assert sizes[:2] == [8, 4]
    assert set(sizes[2:]) == {2}


def test_time_for_the_heads_of_others_is_part_of_the_record(make_session: Any) -> None:
    session = make_session(batch_ratio=FREE)
    session.clock.sleep_s(1.0)
    answers = session.run_batch(samples(3), budgets_s=[1.6, 3.0, 9.0], arrival_s=0.9)

    for answer in answers:
        total_s = answer.wait_s + sum(step.observed_s for step in answer.steps)
        assert answer.observed_s == pytest.approx(total_s)


def test_a_batch_that_costs_more_stops_earlier(make_session: Any) -> None:
    cheap = make_session(batch_ratio=FREE).run_batch(samples(4), budgets_s=5.0)
    dear = make_session(batch_ratio={4: 3.0}, slower=3.0).run_batch(samples(4), budgets_s=5.0)

    assert {a.exit_index for a in cheap} == {3}
    assert {a.exit_index for a in dear} == {0}
    assert {(a.predicted_s, a.observed_s, a.met) for a in dear} == {(3.75, 3.75, True)}


def test_the_scale_factor_does_not_mistake_a_batch_for_a_slow_machine(make_session: Any) -> None:
    session = make_session(policy="static_table", scale_factor=True, batch_ratio={4: 2.0})
    medians = session.program.cost_s
    session.program.cost_s = lambda unit: 2.0 * medians(unit)
    answers = session.run_batch(samples(4), budgets_s=8.6)

    assert {a.exit_index for a in answers} == {3}
    assert all(a.met for a in answers)


@settings(deadline=None)  # the machine may be busy
@given(budgets_s=st.lists(st.floats(0.5, 9.0), min_size=1, max_size=9))
def test_in_a_batch_that_costs_no_more_each_sample_ends_where_it_would_alone(
    make_session: Any, budgets_s: list[float]
) -> None:
    # Free heads: nobody waits for the head of another.
    together = make_session(head_s=[0.0] * 4, batch_ratio=FREE).run_batch(
        samples(len(budgets_s)), budgets_s=budgets_s, max_batch=8
    )
    alone = make_session(head_s=[0.0] * 4)

    for n, (answer, budget_s) in enumerate(zip(together, budgets_s, strict=True)):
        if n < 8:  # the ninth waits for the first eight
            expected = alone.run(samples(1), budget_s=budget_s)
            assert (answer.exit_index, answer.outcome) == (expected.exit_index, expected.outcome)


@pytest.mark.parametrize("count", range(1, 6))
@pytest.mark.parametrize("name", ["full_depth", "fixed", "branchynet"])
def test_logits_are_those_of_single_requests(
    tiny_model: StagedModel, name: str, count: int
) -> None:
    program = load_program(tiny_model, "onnxruntime", check=False)
    options: dict[str, Any] = {"branchynet": {"threshold": 0.9}, "fixed": {"exit_index": 1}}
    session = Session(
        program,
        CostTable.from_costs([1e-6] * 3, [1e-6] * 3),
        policy=name,
        **options.get(name, {}),
    )
    given = images(count)
    together = session.run_batch(given, budgets_s=60.0)
    alone = [session.run(x, budget_s=60.0) for x in given]

    for a, b in zip(together, alone, strict=True):
        assert a.exit_index == b.exit_index
        # Other batch sizes may sum in another order.
        np.testing.assert_allclose(a.logits, b.logits, rtol=1e-4, atol=1e-5)  # type: ignore[arg-type]


def test_in_branchynet_the_sure_leave_and_the_unsure_go_on(tiny_model: StagedModel) -> None:
    program = load_program(tiny_model, "onnxruntime", check=False)
    costs = CostTable.from_costs([1e-6] * 3, [1e-6] * 3)
    first = Session(program, costs, policy="fixed", exit_index=0)
    given = images(5)
    doubts = [normalised_entropy(first.run(x, budget_s=9.0).logits) for x in given]  # type: ignore[arg-type]
    session = Session(program, costs, policy="branchynet", threshold=float(np.median(doubts)))

    together = session.run_batch(given, budgets_s=60.0)

    assert sum(a.exit_index == 0 for a in together) == 3
    for answer, x in zip(together, given, strict=True):
        alone = session.run(x, budget_s=60.0)
        assert answer.exit_index == alone.exit_index
        assert [s.unit for s in answer.steps] == [s.unit for s in alone.steps]


def test_who_cannot_be_in_time_is_rejected_and_the_others_run(make_session: Any) -> None:
    session = make_session(on_infeasible="reject", batch_ratio=FREE)
    answers = session.run_batch(samples(3), budgets_s=[9.0, 0.5, 9.0])

    assert [a.outcome for a in answers] == ["in_time", "rejected", "in_time"]
    assert [a.exit_index for a in answers] == [3, None, 3]


def test_when_all_are_rejected_nothing_runs(make_session: Any) -> None:
    session = make_session(on_infeasible="reject")
    answers = session.run_batch(samples(2), budgets_s=0.1)

    assert [a.outcome for a in answers] == ["rejected"] * 2
    assert session.program.ran == []


def test_more_samples_than_a_batch_wait_for_their_turn(make_session: Any) -> None:
    session = make_session(policy="full_depth")
    answers = session.run_batch(samples(5), budgets_s=99.0, max_batch=2)

    assert [a.wait_s for a in answers] == [0.0, 0.0, 4.25, 4.25, 8.5]


def test_the_oracle_cannot_run_a_batch(make_session: Any) -> None:
    with pytest.raises(ConfigError, match="looks back at one request"):
        make_session(policy="oracle").run_batch(samples(2), budgets_s=1.0)


@pytest.mark.parametrize("budgets_s", [[1.0], [1.0] * 4, []], ids=["one", "four", "none"])
def test_the_number_of_budgets_must_be_that_of_the_samples(
    make_session: Any, budgets_s: list[float]
) -> None:
    with pytest.raises(ConfigError, match=f"expected 3 budgets, found {len(budgets_s)}"):
        make_session().run_batch(samples(3), budgets_s=budgets_s)


@pytest.mark.parametrize("budgets_s", [0.0, "15 ms", True, None, [1.0, -1.0], [1.0, "2"]], ids=str)
def test_each_budget_is_checked(make_session: Any, budgets_s: Any) -> None:
    session = make_session()
    with pytest.raises(ConfigError, match="budget"):
        session.run_batch(samples(2), budgets_s=budgets_s)
    assert session.program.ran == []


def test_a_batch_of_none_at_a_time_is_refused(make_session: Any) -> None:
    with pytest.raises(ConfigError, match="at least one sample, found 0"):
        make_session().run_batch(samples(2), budgets_s=1.0, max_batch=0)


def test_inputs_are_checked_as_for_single_requests(make_session: Any) -> None:
    session = make_session()
    with pytest.raises(ShapeError, match="empty"):
        session.run_batch(samples(0), budgets_s=1.0)
    with pytest.raises(DataError, match="NaN"):
        session.run_batch(samples(2) * np.nan, budgets_s=1.0)


def test_a_model_for_one_sample_says_so(make_session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    session = make_session()
    monkeypatch.setattr(type(session.model.source), "dynamic_batch", False)

    with pytest.raises(BackendError, match="exported for one sample, found a batch of 2"):
        session.run_batch(samples(2), budgets_s=9.0)


@pytest.mark.parametrize("name", [n for n in policy_names() if n != "oracle"])
def test_every_other_policy_answers_every_sample_of_a_batch(make_session: Any, name: str) -> None:
    options: dict[str, Any] = {"branchynet": {"threshold": 0.5}, "fixed": {"exit_index": 1}}
    session = make_session(policy=name, batch_ratio=FREE, **options.get(name, {}))
    answers = session.run_batch(samples(3), budgets_s=[1.0, 3.0, 9.0])

    assert len(answers) == 3
    assert all(a.label is not None and a.policy == session.policy.name for a in answers)
