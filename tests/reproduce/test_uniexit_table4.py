from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from edgewise.device.simulated import down_up, full_factorial, load_device
from edgewise.predict.fitting import Errors
from edgewise.predict.kinds import boosted
from edgewise.reproduce import Reproduction, Setup, run_claim, uniexit_table4
from edgewise.reproduce._predicted import ORIN, XAVIER, fit, on_trace, profiled
from edgewise.reproduce.uniexit_table4 import Scored, _verdicts, overlapping, played_errors, split


@pytest.fixture(scope="module")
def found() -> Reproduction:
    trees = boosted.fit.__kwdefaults__
    assert trees is not None
    with pytest.MonkeyPatch.context() as patch:
        # Nothing here depends on how well these two are trained.
        patch.setattr(uniexit_table4, "_QUICK_STEPS", 200)
        patch.setitem(trees, "iterations", 30)
        return run_claim("uniexit-table4", Setup(quick=True))


@pytest.mark.parametrize(("device", "steps"), [(ORIN, 42), (XAVIER, 48)])
def test_held_out_are_all_utilisations_at_the_clocks_that_the_trace_passes(
    device: str, steps: int
) -> None:
    states = full_factorial(load_device(device))

    passed = on_trace(device, states)

    assert len(set(down_up(load_device(device).clocks).rows)) == steps
    assert passed.sum() == 25 * steps


def test_no_state_of_the_trace_is_fitted_to_and_none_is_in_two_sets() -> None:
    states = full_factorial(load_device(ORIN))

    held = split(ORIN, states, seed=0)

    assert not on_trace(ORIN, states[held.known]).any()
    assert on_trace(ORIN, states[held.trace]).all()
    every = np.concatenate([held.known, held.trace, held.drawn])
    assert sorted(every.tolist()) == list(range(len(states)))


def test_a_state_that_is_read_late_makes_even_a_perfect_predictor_wrong() -> None:
    fresh, late = (
        played_errors(ORIN, "resnet50", None, period_s=period_s, seed=0, count=60)
        for period_s in (0.0, 0.010)
    )

    # Noise alone is below 1 %; the clocks move within a unit, and more within 10 ms.
    assert 0.01 < fresh.mean() < 0.04
    assert late.mean() > 1.5 * fresh.mean()


def test_overlap_makes_units_faster_and_never_faster_than_their_larger_term() -> None:
    lapped = overlapping(ORIN, "resnet50", seed=0, count=200)
    plain = profiled(ORIN, "resnet50", seed=0)
    rows = {state.tobytes(): row for row, state in enumerate(plain.states)}
    same = plain.seconds[[rows[state.tobytes()] for state in lapped.states]]

    assert (lapped.seconds < same).all()
    # Two sides of a right angle are at least their sum over the root of two.
    assert (lapped.seconds > same / np.sqrt(2)).all()


def test_the_physical_model_reaches_the_papers_errors_and_its_coverage(
    found: Reproduction,
) -> None:
    physical = [v for v in found.verdicts if v.claim.startswith("physical")]

    assert len(physical) == 3
    assert all(v.holds for v in physical)


def test_a_claim_about_errors_fails_where_they_are_too_large(found: Reproduction) -> None:
    errors = Errors(**found.details["jetson-orin-nano resnet50 physical"]["trace"]["stage"])
    worse = dataclasses.replace(errors, p95_ape_ratio=0.049)
    states = np.random.default_rng(0).uniform(0.3, 1.0, (80, 5))
    fitted = fit("physical", profiled(ORIN, "resnet50", seed=0, states=states), net="", seed=0)
    scored = Scored(fitted=fitted, trace={"stage": worse}, drawn={"stage": errors})

    bent = {(ORIN, "resnet50", kind): scored for kind in ("mlp", "physical")}

    verdicts = _verdicts(bent)
    assert [v.holds for v in verdicts if "P95" in v.claim] == [False, False]


def test_everything_is_marked_simulated_and_only_the_papers_kind_of_row_has_its_value(
    found: Reproduction,
) -> None:
    assert {f.provenance for f in found.figures} == {"simulated"}
    beside = [f for f in found.figures if f.paper is not None]
    assert beside
    assert all(", mlp" in f.name or ", physical" in f.name for f in beside)
    mape = {f.name: f for f in found.figures}["ResNet-50, Orin Nano, stage, mlp: MAPE"]
    assert (mape.unit, mape.paper) == ("%", 1.42)


def test_charts_show_every_kind_that_was_fitted(found: Reproduction) -> None:
    names = [series.name for series in found.charts[0].series]

    assert {"mlp", "physical", "lut"} <= set(names)
    assert [c.title for c in found.charts] == [
        f"{what} of {group}s"
        for what, group in itertools.product(("MAPE", "P95 APE"), ("stage", "head"))
    ]
