"""How much to draft: closed forms against simulation and brute force."""

from __future__ import annotations

import itertools

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from edgewise.errors import ConfigError
from edgewise.runtime.generation.drafting import (
    Acceptance,
    DraftCosts,
    best_drafts,
    break_even_acceptance,
    expected_speed_up,
    expected_tokens,
    speed_up_of_counts,
)

COSTS = DraftCosts(early_s=4.0, draft_head_s=2.0, verify_s=tuple(10.0 + 0.5 * m for m in range(8)))
chances = st.floats(0.0, 1.0)


def accepted_in(rng: np.random.Generator, chance: float, drafts: int, cycles: int) -> list[int]:
    """Simulated cycles: drafts hold until one does not."""
    holds = rng.random((cycles, drafts)) < chance
    return [int(n) for n in np.logical_and.accumulate(holds, axis=1).sum(axis=1)]


@pytest.mark.parametrize("drafts", [1, 3, 6])
@pytest.mark.parametrize("chance", [0.3, 0.7, 0.95])
def test_a_cycle_yields_and_costs_what_simulated_cycles_do(chance: float, drafts: int) -> None:
    accepted = accepted_in(np.random.default_rng(7), chance, drafts, 20_000)

    # Four standard errors of a mean of 20,000 values between 0 and d.
    error = 4 * drafts / 2 / 20_000**0.5
    assert np.mean(accepted) + 1 == pytest.approx(expected_tokens(chance, drafts), abs=error)
    expected = expected_speed_up(chance, drafts, COSTS)
    ratio = COSTS.cycle_s(0) / COSTS.cycle_s(drafts)
    assert speed_up_of_counts(accepted, drafts, COSTS) == pytest.approx(expected, abs=error * ratio)


@hypothesis.given(chance=st.floats(0.0, 0.999), drafts=st.integers(0, 12))
def test_the_sum_is_the_closed_form(chance: float, drafts: int) -> None:
    closed = (1 - chance ** (drafts + 1)) / (1 - chance)

    assert expected_tokens(chance, drafts) == pytest.approx(closed, rel=1e-9)


def test_sure_drafts_all_hold_and_hopeless_ones_never() -> None:
    assert expected_tokens(1.0, 5) == 6.0
    assert expected_tokens(0.0, 5) == 1.0


def test_the_published_shapes_reach_the_published_ceiling() -> None:
    # A head costs 4.32 layers of 16, drafted after 4, all read once a pass whatever the rows; there
    # the last draft's early layers run with the others, here by themselves: 4 layers more.
    head = 4.32
    costs = DraftCosts(early_s=4.0, draft_head_s=head, verify_s=(12.0 + head,) * 8)

    assert costs.cycle_s(3) == pytest.approx(3 * (4 + head) + 16 + head)
    assert expected_speed_up(1.0, 3, costs) == pytest.approx(4 * 20.32 / 45.28)


@hypothesis.given(
    chance=chances,
    early=st.floats(0.1, 5),
    head=st.floats(0, 5),
    row=st.floats(0, 3),
    left=st.floats(0, 60),
)
def test_the_best_number_of_drafts_is_the_best_of_all_that_fit(
    chance: float, early: float, head: float, row: float, left: float
) -> None:
    costs = DraftCosts(
        early_s=early, draft_head_s=head, verify_s=tuple(5 + row * m for m in range(7))
    )
    found = best_drafts(chance, costs, left_s=left)

    assert found == 0 or costs.cycle_s(found) <= left
    rates = [
        expected_tokens(chance, d) / costs.cycle_s(d)
        for d in range(7)
        if d == 0 or costs.cycle_s(d) <= left
    ]
    assert expected_tokens(chance, found) / costs.cycle_s(found) == pytest.approx(max(rates))


@hypothesis.given(early=st.floats(0.1, 5), head=st.floats(0, 2), row=st.floats(0, 1))
def test_no_number_of_drafts_pays_below_the_break_even_acceptance(
    early: float, head: float, row: float
) -> None:
    costs = DraftCosts(
        early_s=early, draft_head_s=head, verify_s=tuple(5 + row * m for m in range(7))
    )
    least = break_even_acceptance(costs)

    for drafts in range(1, 7):
        assert expected_speed_up(min(1.0, least) * 0.999, drafts, costs) < 1.0
    if least < 0.999:
        assert expected_speed_up(least * 1.001, 1, costs) > 1.0


def test_nothing_is_drafted_where_it_does_not_pay_or_fit_or_is_not_wanted() -> None:
    assert best_drafts(0.05, COSTS) == 0
    assert best_drafts(0.95, COSTS) > 2
    assert best_drafts(0.95, COSTS, left_s=COSTS.cycle_s(2)) == 2
    assert best_drafts(0.95, COSTS, left_s=COSTS.cycle_s(1) - 0.01) == 0
    assert best_drafts(0.95, COSTS, most=1) == 1


def test_acceptance_finds_the_chance_though_drafts_behind_a_refusal_are_not_seen() -> None:
    rng = np.random.default_rng(3)
    learnt = Acceptance(0.2, memory=0.998)
    for accepted in accepted_in(rng, 0.75, 4, 3000):
        learnt.observe(accepted=accepted, drafted=4)

    # About 1300 drafts are remembered: a standard error of 0.012, and the prior pulls by 0.003.
    assert learnt.chance == pytest.approx(0.75, abs=0.05)


def test_acceptance_of_which_nothing_is_known_is_not_guessed() -> None:
    learnt = Acceptance(None)
    assert learnt.chance is None
    assert learnt.hopeful == 1.0
    for i in range(40):
        learnt.observe(accepted=i % 4 == 0, drafted=1)

    assert learnt.chance == pytest.approx(0.25, abs=0.05)
    # Two dozen drafts are remembered: a standard error of 0.08, and half a draft more.
    assert learnt.hopeful == pytest.approx(0.34, abs=0.05)


def test_few_failures_do_not_take_all_hope() -> None:
    learnt = Acceptance(None)
    for _ in range(12):
        learnt.observe(accepted=0, drafted=1)

    assert learnt.chance == 0.0
    assert 0.05 < learnt.hopeful < 0.2


@hypothesis.given(
    ratio=st.floats(1.0, 5.0), drafts=st.integers(1, 6), early=st.floats(0, 1), head=st.floats(0, 1)
)
def test_at_the_break_even_acceptance_drafts_neither_gain_nor_lose(
    ratio: float, drafts: int, early: float, head: float
) -> None:
    costs = DraftCosts(early_s=early, draft_head_s=head, verify_s=(2.0, *[2.0 * ratio] * drafts))
    chance = break_even_acceptance(costs, drafts)

    if chance <= 1:
        assert expected_speed_up(chance, drafts, costs) == pytest.approx(1.0, rel=1e-6)
    else:
        assert expected_speed_up(1.0, drafts, costs) < 1.0


def test_acceptance_returns_to_what_was_expected_while_nothing_is_drafted() -> None:
    learnt = Acceptance(0.6)
    for _ in range(50):
        learnt.observe(accepted=0, drafted=3)
    low = learnt.chance
    for _ in range(400):
        learnt.observe(accepted=0, drafted=0)

    assert low is not None
    assert low < 0.2
    assert learnt.chance == pytest.approx(0.6, abs=0.01)


@pytest.mark.parametrize(
    ("early", "verify"), [(-1.0, (1.0,)), (1.0, ()), (float("nan"), (1.0,)), (0.0, (0.0,))]
)
def test_costs_that_cannot_be_are_refused(early: float, verify: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError):
        DraftCosts(early_s=early, draft_head_s=0.0, verify_s=verify)


@pytest.mark.parametrize(
    ("prior", "weight", "memory"),
    [c for c in itertools.product((0.5, 1.5), (8.0, 0.0), (0.9, 1.1)) if c != (0.5, 8.0, 0.9)],
)
def test_a_chance_that_cannot_be_is_refused(prior: float, weight: float, memory: float) -> None:
    with pytest.raises(ConfigError):
        Acceptance(prior, weight=weight, memory=memory)
