from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from edgewise.dispatch.learned.rows import Rows
from edgewise.dispatch.learned.transfer import (
    LEVELS,
    Case,
    HeldOut,
    Transfer,
    case_of,
    learn_transfer,
    leave_one_model_out,
    only,
    probe,
    probed,
    without,
    work,
)
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


def test_where_the_single_backend_varies_a_probe_is_asked_for(rows: Rows, known: Transfer) -> None:
    here = only(rows, _MIDDLE)
    same = [dataclasses.replace(t, static_gain=0.0) for t in known.trials]
    one = [dataclasses.replace(same[0], static_gain=-0.05), *same[1:]]

    assert not dataclasses.replace(known, trials=tuple(same)).advise(here).probe
    advice = dataclasses.replace(known, trials=tuple(one)).advise(here)
    assert advice.probe
    assert "loses 5.0%" in advice.reason


def test_probes_are_the_fewest_groups_with_that_share_of_the_work(rows: Rows) -> None:
    here = only(rows, "model64")
    part = work(here)
    chosen = probed(here, share=0.8)

    assert part[chosen].sum() >= 0.8 > part[chosen[:-1]].sum()
    assert part.sum() == pytest.approx(1.0)
    assert sorted(probed(here, share=1.0)) == list(range(len(part)))


def test_a_probe_of_all_shapes_is_the_exact_plan_and_one_of_few_loses_to_no_single_backend(
    rows: Rows, cases: dict[str, Case]
) -> None:
    here, case = only(rows, _MIDDLE), cases[_MIDDLE]
    every = probe(here, case, objective="latency", share=1.0)
    few = probe(here, case, objective="latency", share=0.8)

    exact = decide(case.problem, method="viterbi").totals.latency_s
    assert case.value(every.backend, "latency") == pytest.approx(exact)
    assert few.measured < every.measured
    single = case.value(case.single(few.single), "latency")
    assert exact <= case.value(few.backend, "latency") <= single


def test_gains_are_over_the_best_single_backend(cases: dict[str, Case]) -> None:
    case = cases["model64"]
    values = [case.value(case.single(b), "edp") for b in range(3)]

    assert case.gain(case.single(int(np.argmin(values))), "edp") == 0.0
    assert case.gain(case.single(int(np.argmax(values))), "edp") == pytest.approx(
        1 - max(values) / min(values)
    )


def test_the_guarded_selector_loses_little_on_each_model_held_out(
    held: tuple[HeldOut, ...], cases: dict[str, Case]
) -> None:
    assert [row.model for row in held] == list(cases)
    for row in held:
        # What it may lose is what the single backend for the rest loses.
        assert row.guarded_gain >= min(row.static_gain, 0.0) - 0.01
        assert 0 <= row.advice.learned_share <= 1
        if row.advice.learned_share == 0 and not row.advice.probe:
            assert row.guarded_gain == row.static_gain


def test_too_few_models_are_refused(rows: Rows, cases: dict[str, Case]) -> None:
    two = without(without(without(rows, "model64"), "model96"), _MIDDLE)

    with pytest.raises(ProfileError, match="at least 3 models"):
        learn(two, cases)
