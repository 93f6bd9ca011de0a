from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgewise.backends.base import buddy_segments
from edgewise.backends.null import NullProgram
from edgewise.clock import VirtualClock
from edgewise.exits import ANSWER, LATE, LOOK, PolicyInputs, make_policy
from edgewise.exits.policies.edgewise_saving import EdgewiseSaving, plan_looks
from edgewise.frontends.outline import outline_model
from edgewise.model import Validation
from edgewise.predict import CostTable
from edgewise.runtime import Session

NUM = 4


def validation(seed: int = 0, *, num: int = 200, help_: float = 2.0) -> Validation:
    """Easy samples are right from the first exit on, hard ones only late."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 5, num)
    hard = rng.uniform(0, 1, num)
    logits = rng.normal(size=(NUM, num, 5))
    for k in range(NUM):
        logits[k, np.arange(num), labels] += help_ * (1.2 - hard) * (k + 3)
    return Validation(logits=logits, labels=labels)


def inputs(known: Validation, costs: CostTable, **changes: Any) -> PolicyInputs:
    return PolicyInputs(
        costs=costs,
        accuracy=tuple(known.accuracy().tolist()),
        temperatures=(1.0,) * NUM,
        validation=known,
        segments=frozenset(buddy_segments(NUM)),
        **changes,
    )


KNOWN = validation()
COSTS = CostTable.from_costs([1.0] * NUM, [0.1] * NUM)


@pytest.fixture
def saving() -> EdgewiseSaving:
    policy = make_policy("edgewise_saving", inputs(KNOWN, COSTS))
    assert isinstance(policy, EdgewiseSaving)
    return policy


def test_with_time_to_spare_it_looks_where_validation_says_that_it_pays(
    saving: EdgewiseSaving,
) -> None:
    looks = saving.looks[inputs(KNOWN, COSTS).ranked_exits()[0]]

    assert looks
    assert saving.decide(looks[0] + 1, 0.0, 0.0, 100.0) == LOOK


def test_it_does_not_look_where_the_look_would_cost_the_way(saving: EdgewiseSaving) -> None:
    position = saving.looks[-1][0] + 1
    need_s = saving.router.table.ways[position][0][0]
    head_s = saving.router.table.ways[position][-1][0]

    assert saving.decide(position, 0.0, 0.0, need_s + head_s + 1e-9) == LOOK
    # The way fits without the look only.
    assert saving.decide(position, 0.0, 0.0, need_s + head_s - 1e-9) == position + 1


def test_it_stops_at_the_next_exit_to_look_at_instead_of_running_past_it(
    saving: EdgewiseSaving,
) -> None:
    best = inputs(KNOWN, COSTS).ranked_exits()[0]
    first = saving.looks[best][0] + 1

    assert saving.decide(0, 0.0, 0.0, 100.0) <= first
    assert saving.router.decide(0, 0.0, 0.0, 100.0) == NUM


def test_without_time_it_does_as_the_router(saving: EdgewiseSaving) -> None:
    for position in range(1, NUM + 1):
        for left_s in (-1.0, 0.0, 0.05):
            wanted = saving.router.decide(position, 0.0, 0.0, left_s)
            assert saving.decide(position, 0.0, 0.0, left_s) == wanted
    assert saving.decide(NUM, 0.0, 0.0, 100.0) == ANSWER
    assert saving.decide(NUM, 0.0, 0.0, 0.0) == LATE


def test_nothing_is_looked_at_where_heads_cost_more_than_they_save() -> None:
    dear = CostTable.from_costs([0.01] * NUM, [1.0] * (NUM - 1) + [0.01])

    _, looks = plan_looks(inputs(KNOWN, dear), accuracy_loss=0.005)

    assert looks == [()] * NUM


def test_looks_lose_no_more_accuracy_than_asked_and_cost_less() -> None:
    facts = inputs(KNOWN, COSTS)
    threshold, looks = plan_looks(facts, accuracy_loss=0.01)

    for target in range(NUM):
        exits, costs_s = [], []
        for n in range(200):
            spent_s = at = 0.0
            for k in (*looks[target], target):
                spent_s += (k + 1 - at) + 0.1
                at = k + 1
                powers = np.exp(KNOWN.logits[k, n] - KNOWN.logits[k, n].max())
                if k == target or powers.max() / powers.sum() >= threshold:
                    exits.append(k)
                    costs_s.append(spent_s)
                    break
        right = KNOWN.correct[exits, np.arange(200)].mean()
        assert right >= KNOWN.accuracy()[target] - 0.01
        if looks[target]:
            assert np.mean(costs_s) < target + 1.1


def test_greedy_looks_are_as_good_as_the_best_subset_here() -> None:
    facts = inputs(KNOWN, COSTS)
    threshold, looks = plan_looks(facts, accuracy_loss=0.01)
    target = NUM - 1
    powers = np.exp(KNOWN.logits - KNOWN.logits.max(axis=2, keepdims=True))
    sure = powers.max(axis=2) / powers.sum(axis=2) >= threshold

    def mean_s(chosen: tuple[int, ...]) -> tuple[float, float]:
        costs_s, right = [], []
        for n in range(200):
            spent_s = at = 0.0
            for k in (*chosen, target):
                spent_s += (k + 1 - at) + 0.1
                at = k + 1
                if k == target or sure[k, n]:
                    costs_s.append(spent_s)
                    right.append(KNOWN.correct[k, n])
                    break
        return float(np.mean(costs_s)), float(np.mean(right))

    least = KNOWN.accuracy()[target] - 0.01
    subsets = [s for r in range(NUM) for s in itertools.combinations(range(target), r)]
    best = min(m for m, a in map(mean_s, subsets) if a >= least)

    assert mean_s(looks[target])[0] == pytest.approx(best)


def session(
    policy: str, costs: CostTable, ratios: dict[str, float], logits: np.ndarray, known: Validation
) -> Session:
    model = outline_model(NUM, num_classes=5).with_heads(
        {}, accuracy=dict(enumerate(known.accuracy().tolist())), validation=known
    )

    def cost_s(unit: str) -> float:
        kind, _, place = unit.partition(":")
        if kind == "head":
            return ratios[unit] * float(costs.head_s[int(place)])
        start, stop = map(int, place.split("-"))
        return sum(
            ratios[f"segment:{k}-{k + 1}"] * float(costs.stage_s[k]) for k in range(start, stop)
        )

    program = NullProgram(
        model, clock=VirtualClock(), cost_s=cost_s, logits=lambda k, _: logits[k][None]
    )
    return Session(program, costs, policy=policy, clock=program.clock)


COST_S = st.floats(1e-4, 1.0)
RATIO = st.floats(0.05, 1.0)


@settings(max_examples=75, deadline=None)
@given(
    stage_s=st.lists(COST_S, min_size=NUM, max_size=NUM),
    head_s=st.lists(COST_S, min_size=NUM, max_size=NUM),
    ratios=st.lists(RATIO, min_size=2 * NUM, max_size=2 * NUM),
    sizes=st.lists(st.floats(0.0, 12.0), min_size=NUM, max_size=NUM),
    budget_s=st.floats(1e-4, 9.0),
    seed=st.integers(0, 3),
)
def test_saving_never_misses_a_deadline_that_the_router_alone_meets(
    *,
    stage_s: list[float],
    head_s: list[float],
    ratios: list[float],
    sizes: list[float],
    budget_s: float,
    seed: int,
) -> None:
    """Whatever the costs and answers, as long as no unit takes longer than its bound."""
    costs = CostTable.from_costs(stage_s, head_s)
    known = validation(seed, num=40)
    units = [u for k in range(NUM) for u in (f"segment:{k}-{k + 1}", f"head:{k}")]
    took = dict(zip(units, ratios, strict=True))
    logits = np.zeros((NUM, 5), dtype=np.float32)
    logits[:, 0] = sizes
    x = np.zeros((1, 3, 8, 8), dtype=np.float32)

    plain = session("edgewise", costs, took, logits, known).run(x, budget_s=budget_s)
    saved = session("edgewise_saving", costs, took, logits, known).run(x, budget_s=budget_s)

    assert saved.met or not plain.met


def test_a_sure_answer_ends_the_request_early_and_says_so() -> None:
    ratios = {u: 1.0 for k in range(NUM) for u in (f"segment:{k}-{k + 1}", f"head:{k}")}
    sure = np.zeros((NUM, 5), dtype=np.float32)
    sure[:, 1] = 20.0
    x = np.zeros((1, 3, 8, 8), dtype=np.float32)

    plain = session("edgewise", COSTS, ratios, sure, KNOWN).run(x, budget_s=100.0)
    saved = session("edgewise_saving", COSTS, ratios, sure, KNOWN).run(x, budget_s=100.0)
    unsure = session("edgewise_saving", COSTS, ratios, 0 * sure, KNOWN).run(x, budget_s=100.0)

    assert plain.exit_index is not None
    assert saved.exit_index is not None
    assert saved.exit_index < plain.exit_index
    assert "sure" in saved.reason
    assert unsure.exit_index == plain.exit_index
    assert unsure.reason == plain.reason
