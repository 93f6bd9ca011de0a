"""Gates let tokens leave within the router's depth, and only a token that leaves has a head run."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from edgewise.errors import ConfigError
from edgewise.model.decoding import Gate
from edgewise.predict.state_costs import StateCosts
from edgewise.runtime.generation import Token
from edgewise.runtime.generation.baselines import make_baseline

# Chances of 0.88, and of nearly 1 and 0.
LIKELY, SURE, NEVER = 2.0, 9.0, -9.0


def gated(fakes: Any, gates: dict[int, float], **options: Any) -> Any:
    """A session with gates that say the same of every state."""
    session = fakes.session(**options)
    weight = np.zeros(4, dtype=np.float32)
    session.decoder.exits = dataclasses.replace(
        session.decoder.exits,
        gates={k: Gate(layer=k, weight=weight, bias=bias) for k, bias in gates.items()},
    )
    return session


def tokens_of(session: Any, *, threshold: float = 0.9, **options: Any) -> list[Token]:
    stepper = make_baseline("edgewise+gate", threshold=threshold)
    return list(session.generate("a", stepper=stepper, **({"max_tokens": 4} | options)))


@pytest.mark.parametrize(
    ("gates", "budget_s", "layer", "reason"),
    [
        pytest.param({1: SURE}, None, 1, "the gate says with 1.00", id="sure at once"),
        pytest.param({1: NEVER, 2: SURE}, None, 2, "the gate says", id="sure at the second"),
        pytest.param({3: SURE}, None, 3, "the gate says", id="only one exit has a gate"),
        pytest.param({1: NEVER}, None, 4, "the best exit fitted", id="never sure"),
        pytest.param({3: SURE}, 0.026, 2, "did not fit the time left", id="time first"),
        pytest.param({1: SURE}, 0.036, 1, "the gate says", id="sooner than time asks"),
        pytest.param({1: NEVER}, 0.010, 1, "did not fit", id="below the floor"),
    ],
)
def test_a_token_leaves_at_the_first_gate_that_is_sure_and_never_later_than_time_allows(
    fakes: Any, gates: dict[int, float], budget_s: float | None, layer: int, reason: str
) -> None:
    tokens = tokens_of(gated(fakes, gates), tpot_budget_s=budget_s)[1:]

    assert [t.exit_layer for t in tokens] == [layer] * 3
    assert all(reason in t.reason for t in tokens)
    assert all(t.feasible is (budget_s != 0.010) for t in tokens)


@pytest.mark.parametrize(("threshold", "layer"), [(0.0, 1), (0.88, 1), (0.89, 4), (1.0, 4)])
def test_a_gate_is_sure_from_the_threshold_on(fakes: Any, threshold: float, layer: int) -> None:
    # 1 / (1 + exp(-2)) = 0.8808
    tokens = tokens_of(gated(fakes, {1: LIKELY}), threshold=threshold)

    assert [t.exit_layer for t in tokens] == [layer] * 4


def test_a_head_runs_only_where_the_token_leaves(fakes: Any) -> None:
    session = gated(fakes, {1: NEVER, 2: SURE})
    tokens_of(session, max_tokens=1)

    assert [unit for unit, _ in fakes.decoder_of(session).ran] == [
        "layers:0-1",
        "layers:1-2",
        "head",
        "fill:2",
    ]


def test_the_router_learns_what_such_tokens_took_filling_included(fakes: Any) -> None:
    session = gated(fakes, {2: SURE})
    tokens = tokens_of(session, max_tokens=20, tpot_budget_s=0.05)

    assert [t.predicted_s for t in tokens] == pytest.approx([0.025] * 20)
    assert [t.observed_s for t in tokens] == pytest.approx([0.025] * 20)
    assert session.policy().expected_s(1.0) == pytest.approx(1.0)


def test_predictions_follow_the_state_of_the_device(fakes: Any) -> None:
    session = gated(fakes, {1: NEVER})
    table = session.costs.propagate
    session.reprice(StateCosts(at_s=0.0, stage_s=2 * table.stage_s, head_s=2 * table.head_s))
    fakes.decoder_of(session).slower = lambda _: 2.0
    tokens = tokens_of(session, tpot_budget_s=0.052)[1:]

    assert [t.exit_layer for t in tokens] == [2] * 3
    assert [t.predicted_s for t in tokens] == pytest.approx([0.050] * 3)
    assert session.policy().expected_s(1.0) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("gates", "threshold", "head", "said"),
    [
        ({}, 0.9, "affine", "no gate was fitted for an exit after 1, 2, 3 layers"),
        ({4: SURE}, 0.9, "affine", "no gate was fitted"),
        ({1: SURE}, 1.1, "affine", "threshold from 0 to 1"),
        ({1: SURE}, float("nan"), "affine", "threshold from 0 to 1"),
        ({1: SURE}, 0.9, "raw", "fitted for affine heads"),
    ],
    ids=["none", "at full depth alone", "above 1", "no number", "raw heads"],
)
def test_gates_that_cannot_be_asked_are_refused_before_anything_runs(
    fakes: Any, gates: dict[int, float], threshold: float, head: str, said: str
) -> None:
    session = gated(fakes, gates, head=head)
    with pytest.raises(ConfigError, match=said):
        tokens_of(session, threshold=threshold)
    assert fakes.decoder_of(session).ran == []
