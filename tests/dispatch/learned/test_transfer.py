from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from edgewise.dispatch.learned.rows import Int64, Rows
from edgewise.dispatch.learned.transfer import (
    LEVELS,
    Case,
    HeldOut,
    Transfer,
    case_of,
    heaviest,
    learn_transfer,
    leave_one_model_out,
    only,
    plan_measured,
    survives_trial,
    without,
    work,
)
from edgewise.dispatch.problem import Objective
from edgewise.dispatch.search import decide
from edgewise.errors import ProfileError
from edgewise.model.transformer import Architecture
from edgewise.profiles.operators import OperatorTable

pytest.importorskip("sklearn")
_MIDDLE = "model128"


@pytest.fixture(scope="module")
def cases(models: tuple[Architecture, ...], table: OperatorTable) -> dict[str, Case]:
    return {model.name: case_of(model, table) for model in models}


def learn(rows: Rows, cases: dict[str, Case]) -> Transfer:
    return learn_transfer(
        rows, cases, objective="latency", classifiers=("extra-trees",), estimators=5
    )


@pytest.fixture(scope="module")
def known(rows: Rows, cases: dict[str, Case]) -> Transfer:
    return learn(without(rows, _MIDDLE), cases)


@pytest.fixture(scope="module")
def held(rows: Rows, cases: dict[str, Case]) -> tuple[HeldOut, ...]:
    return leave_one_model_out(
        rows, cases, objective="latency", classifiers=("extra-trees",), estimators=5
    )


def test_advice_does_not_look_at_the_costs_of_the_model_held_out(
    rows: Rows, known: Transfer, cases: dict[str, Case]
) -> None:
    here = only(rows, _MIDDLE)
    case = cases[_MIDDLE]
    free = dataclasses.replace(case.problem, op_s=np.zeros_like(case.problem.op_s), op_j=None)

    assert known.advise(here) == known.advise(
        dataclasses.replace(here, op_s=here.op_s[:, ::-1], op_j=None)
    )
    np.testing.assert_array_equal(
        known.assign(case), known.assign(dataclasses.replace(case, problem=free))
    )
    assert {t.name for t in known.trials} == set(cases) - {_MIDDLE}


def test_a_model_beyond_those_that_were_taught_keeps_one_backend(
    rows: Rows, cases: dict[str, Case]
) -> None:
    transfer = learn(without(rows, "model256"), cases)
    advice = transfer.advise(only(rows, "model256"))

    assert advice.learned_share == 0
    assert (transfer.assign(cases["model256"]) == transfer.fallback).all()
    assert len(set(transfer.assign(cases["model256"], guarded=False).tolist())) > 1


def test_a_level_at_which_some_model_loses_is_not_taken(
    known: Transfer, cases: dict[str, Case], rows: Rows
) -> None:
    assert known.level in LEVELS
    always = dataclasses.replace(known, level=None)

    assert (always.assign(cases[_MIDDLE]) == known.fallback).all()
    assert always.advise(only(rows, _MIDDLE)).learned_share == 0
    assert "do not all gain" in always.advise(only(rows, _MIDDLE)).reason


def test_the_heaviest_are_the_fewest_groups_with_that_share_of_the_work(rows: Rows) -> None:
    here = only(rows, "model64")
    part = work(here)
    chosen = heaviest(here, share=0.8)

    assert part[chosen].sum() >= 0.8 > part[chosen[:-1]].sum()
    assert part.sum() == pytest.approx(1.0)
    assert sorted(heaviest(here, share=1.0)) == list(range(len(part)))


@pytest.mark.parametrize("objective", ["latency", "energy"])
def test_a_plan_from_measured_shapes_is_exact_with_all_and_never_below_one_backend(
    rows: Rows, cases: dict[str, Case], objective: Objective
) -> None:
    here, case = only(rows, _MIDDLE), cases[_MIDDLE]
    every, few = (
        case.value(plan_measured(here, case, objective=objective, share=share), objective)
        for share in (1.0, 0.8)
    )

    exact = decide(case.problem, objective=objective, method="viterbi").totals.of(objective)
    assert every == pytest.approx(exact)
    # What is not measured is on the best single backend in both, and cancels.
    assert exact <= few <= case.value(case.single(case.best(objective)), objective)


def test_gains_are_over_the_best_single_backend(cases: dict[str, Case]) -> None:
    case = cases["model64"]
    values = [case.value(case.single(b), "edp") for b in range(3)]

    assert case.gain(case.single(int(np.argmin(values))), "edp") == 0.0
    assert case.gain(case.single(int(np.argmax(values))), "edp") == pytest.approx(
        1 - max(values) / min(values)
    )


def test_a_guarded_selector_that_always_abstains_is_the_best_single_backend(
    held: tuple[HeldOut, ...], cases: dict[str, Case]
) -> None:
    assert [row.model for row in held] == list(cases)
    abstained = [row for row in held if row.advice.learned_share == 0]

    assert abstained  # the smallest and the largest are beyond the others
    for row in abstained:
        assert row.guarded_gain == 0
        assert row.alone_gain == row.static_gain


def test_a_trial_drops_what_loses_or_hardly_gains_and_keeps_what_gains_a_lot(
    cases: dict[str, Case],
) -> None:
    case = cases["model64"]
    values = [case.value(case.single(b), "latency") for b in range(3)]
    plan = decide(case.problem, objective="latency", method="viterbi").assignment.backend
    worst, best = case.single(int(np.argmax(values))), case.single(int(np.argmin(values)))

    def kept(backend: Int64) -> int:
        found = (
            survives_trial(case, backend, "latency", rng=np.random.default_rng(seed))
            for seed in range(50)
        )
        return sum(found)

    assert case.gain(plan, "latency") > 0.2
    assert kept(worst) == 0
    assert kept(best) <= 6  # no gain: 2.3 % of trials err by two standard errors
    assert kept(plan) >= 48


def test_too_few_models_are_refused(rows: Rows, cases: dict[str, Case]) -> None:
    two = without(without(without(rows, "model64"), "model96"), _MIDDLE)

    with pytest.raises(ProfileError, match="at least 3 models"):
        learn(two, cases)
