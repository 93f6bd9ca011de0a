"""What every exit policy promises, on every kind of staged model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from edgewise.backends.null import NullProgram
from edgewise.clock import VirtualClock
from edgewise.exits import ANSWER, LATE, LOOK, REJECT, PolicyInputs, make_policy, policy_names
from edgewise.frontends.outline import outline_model
from edgewise.model import StagedModel, Validation
from edgewise.predict import CostTable
from edgewise.runtime import Session

OPTIONS: dict[str, dict[str, Any]] = {"fixed": {"exit_index": 0}}
BUDGETS_S = (0.1, 0.7, 1.3, 2.4, 3.8, 100.0)


def model_of(num_stages: int, *, seed: int = 0) -> StagedModel:
    """A chain whose validation answers get better with depth, more or less."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 4, 60)
    logits = rng.normal(size=(num_stages, 60, 4))
    for k in range(num_stages):
        logits[k, np.arange(60), labels] += 1.0 + k
    validation = Validation(logits=logits, labels=labels)
    accuracy = dict(enumerate(validation.accuracy().tolist()))
    model = outline_model(num_stages, num_classes=4)
    return model.with_heads({}, accuracy=accuracy, validation=validation)


MODELS = {
    "one stage": (model_of(1), [1.0], [0.5]),
    "two stages": (model_of(2), [0.5, 1.0], [0.25, 0.5]),
    "eight equal stages": (model_of(8), [0.5] * 8, [0.125] * 8),
    "dear heads first": (model_of(4), [0.25, 0.5, 0.5, 1.0], [2.0, 1.0, 0.5, 0.25]),
    "free stages": (model_of(3), [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]),
}
Case = tuple[StagedModel, Sequence[float], Sequence[float]]


def session_of(case: Case, name: str) -> Session:
    model, stage_s, head_s = case

    def cost_s(unit: str) -> float:
        kind, _, place = unit.partition(":")
        if kind == "head":
            return head_s[int(place)]
        start, stop = map(int, place.split("-"))
        return sum(stage_s[start:stop])

    clock = VirtualClock()
    costs = CostTable.from_costs(list(stage_s), list(head_s), provenance="simulated")
    program = NullProgram(model, clock=clock, cost_s=cost_s)
    return Session(program, costs, policy=name, clock=clock, **OPTIONS.get(name, {}))


@pytest.mark.parametrize("case", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("name", policy_names())
def test_every_policy_answers_on_every_model_and_budget(name: str, case: Case) -> None:
    session = session_of(case, name)
    for budget_s in BUDGETS_S:
        answer = session.run(np.zeros((1, 3, 8, 8)), budget_s=budget_s)

        assert answer.exit_index in range(session.model.num_exits)
        assert answer.met == (answer.observed_s <= budget_s)
        assert answer.reason
        assert answer.policy == session.policy.name


@pytest.mark.parametrize("case", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("name", policy_names())
def test_the_same_requests_in_the_same_state_get_the_same_answers(name: str, case: Case) -> None:
    def answers() -> list[dict[str, Any]]:
        session = session_of(case, name)
        return [session.run(np.zeros((1, 3, 8, 8)), budget_s=b).to_json() for b in BUDGETS_S]

    assert answers() == answers()


@pytest.mark.parametrize("case", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("name", policy_names())
def test_a_decision_is_a_way_on_or_one_of_four_words(name: str, case: Case) -> None:
    model, stage_s, head_s = case
    num = model.num_exits
    program = NullProgram(model)
    costs = CostTable.from_costs(list(stage_s), list(head_s))
    inputs = PolicyInputs.of(model, costs, segments=program.segments)
    shared = make_policy(name, inputs, **OPTIONS.get(name, {}))
    for budget_s in (-1.0, *BUDGETS_S):
        policy = shared.begin()
        for position in range(num + 1):
            action = policy.decide(position, 0.0, 0.0, budget_s)
            if action > position:
                assert (position, action) in program.segments
            elif position == 0:
                assert action == REJECT
            else:
                assert action in {ANSWER, LATE, LOOK}


@pytest.mark.parametrize("case", MODELS.values(), ids=MODELS)
def test_the_router_is_late_only_where_the_table_in_hindsight_is_too(case: Case) -> None:
    for budget_s in BUDGETS_S:
        answer = session_of(case, "edgewise").run(np.zeros((1, 3, 8, 8)), budget_s=budget_s)
        oracle = session_of(case, "oracle").run(np.zeros((1, 3, 8, 8)), budget_s=budget_s)

        assert answer.met or not oracle.met
        assert answer.met == answer.feasible


@pytest.mark.parametrize("case", MODELS.values(), ids=MODELS)
def test_by_its_own_model_the_router_is_never_worse_than_the_static_table(case: Case) -> None:
    accuracy = [e.accuracy or 0.0 for e in case[0].exits]
    for budget_s in BUDGETS_S:
        ours = session_of(case, "edgewise").run(np.zeros((1, 3, 8, 8)), budget_s=budget_s)
        table = session_of(case, "static_table").run(np.zeros((1, 3, 8, 8)), budget_s=budget_s)

        assert (ours.met, accuracy[ours.exit_index or 0]) >= (
            table.met,
            accuracy[table.exit_index or 0],
        )
