"""Who drafts: by what is known, seen in passing and measured, and never at a loss for long."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from edgewise.backends.decoder.base import HeadKind
from edgewise.errors import ConfigError
from edgewise.model.decoding import AffineExit, LanguageExits
from edgewise.runtime.generation.drafters import (
    Drafter,
    Drafters,
    DraftMemory,
    Repeats,
    draft_agreement,
    draft_costs,
    draft_head_s,
    draft_heads,
    exit_drafters,
)
from edgewise.runtime.generation.drafting import DraftCosts
from edgewise.runtime.generation.speculation import Cycle

# After 3 of 30 layers; a head of 8 layers of which drafts read a sixth.
SHALLOW = DraftCosts(
    early_s=3.0, draft_head_s=1.5, verify_s=tuple(35.0 * (1 + 0.05 * m) for m in range(8))
)
WHOLE = DraftCosts(
    early_s=0.0, draft_head_s=0.0, verify_s=tuple(38.0 * (1 + 0.05 * m) for m in range(8))
)


def drafter(memory: DraftMemory, prior: float | None, *, position: int = 1) -> Drafter:
    key: tuple[int, HeadKind] = (position, "shortlist")
    return Drafter(key, costs=SHALLOW, learnt=memory.of(key, prior), plain=memory.of(None))


def choice(*exits: Drafter, repeats: dict[int, Drafter] | None = None) -> Drafters:
    plain = DraftMemory().of(None)
    return Drafters(exits, repeats or {}, plain=plain, whole=WHOLE, ask=True)


def follow(drafters: Drafters, rng: np.random.Generator, chance: float, cycles: int) -> list[str]:
    """Plan and learn while drafts hold with a chance and cycles cost what was predicted."""
    done = []
    for _ in range(cycles):
        plan = drafters.plan(Repeats([1, 2, 3]), np.inf)
        accepted = int(np.logical_and.accumulate(rng.random(plan.drafts) < chance).sum())
        cycle = Cycle(tokens=(9,) * (accepted + 1), drafted=plan.drafts, accepted=accepted)
        held = None if plan.asked is None else float(rng.random() < chance)
        took_s = drafters.expected_s(plan, plan.drafts)
        drafters.learn(plan, cycle, held=held, took_s=took_s)
        done.append("draft" if plan.drafts else "plain" if held is None else "ask")
    return done


def test_a_shallow_exit_drafts_from_the_first_token_where_it_is_known_to_pay() -> None:
    plan = choice(drafter(DraftMemory(), 0.35)).plan(Repeats([1]), np.inf)

    assert plan.drafts == 1
    assert plan.drafter is not None
    assert plan.drafter.best()[1] == pytest.approx(1.35 * 38 / (6 + 1.5 + 35 * 1.05))


def test_an_exit_of_unknown_agreement_is_asked_before_it_drafts() -> None:
    done = follow(choice(drafter(DraftMemory(), None)), np.random.default_rng(0), 0.9, 60)

    assert done[0] == "plain"
    assert 8 <= done.count("ask") <= 10  # as many as an estimate needs, then it drafts
    assert done.index("draft") > max(i for i, d in enumerate(done) if d == "ask")
    assert set(done[-20:]) == {"draft"}


def test_an_exit_that_turns_out_bad_is_asked_rarely_and_drafts_again_when_it_is_good() -> None:
    memory, rng = DraftMemory(), np.random.default_rng(1)
    drafters = choice(drafter(memory, 0.5))
    bad = follow(drafters, rng, 0.0, 400)
    good = follow(drafters, rng, 0.9, 1000)

    assert "draft" not in bad[60:]
    assert bad[60:].count("ask") <= 0.02 * 340 * 38 / 1.5  # the share of time that may go into it
    assert "draft" not in good[:1]
    assert good[-100:].count("draft") > 90


def test_a_drafter_whose_cycles_take_longer_than_predicted_stops_and_is_tried_again() -> None:
    memory = DraftMemory()
    one = drafter(memory, 0.4)
    drafters = choice(one)
    done: list[int] = []
    for _ in range(200):
        plan = drafters.plan(Repeats([1]), np.inf)
        accepted = len(done) % 5 in {0, 1} and plan.drafts > 0
        cycle = Cycle(tokens=(9,) * (accepted + 1), drafted=plan.drafts, accepted=int(accepted))
        took_s = (1.5 if plan.drafts else 1.0) * one.predicted.cycle_s(plan.drafts)
        held = None if plan.asked is None else 0.4
        drafters.learn(plan, cycle, held=held, took_s=took_s)
        done.append(plan.drafts)

    drafting = [i for i, d in enumerate(done) if d]
    assert len(drafting) < 20
    assert drafting[-1] > 60


def test_a_machine_that_is_slower_for_all_alike_changes_no_choice() -> None:
    memory = DraftMemory()
    one = drafter(memory, 0.4)
    for _ in range(5):
        memory.of(None).observe_pace(0, 2.0)
        one.took(1, 2.0 * SHALLOW.cycle_s(1))

    fresh = drafter(DraftMemory(), 0.4)
    assert one.best()[0] == fresh.best()[0]
    assert one.best()[1] == pytest.approx(fresh.best()[1])


def test_what_one_text_taught_the_next_one_knows() -> None:
    memory, rng = DraftMemory(), np.random.default_rng(2)
    follow(choice(drafter(memory, None)), rng, 0.9, 80)

    assert choice(drafter(memory, None)).plan(Repeats([1]), np.inf).drafts > 0


def test_no_more_is_drafted_than_there_is_time_for() -> None:
    one = drafter(DraftMemory(), 0.9)
    free, _ = one.best()

    assert free > 2
    assert one.best(SHALLOW.cycle_s(2))[0] == 2
    assert one.best(SHALLOW.cycle_s(0))[0] == 0


def test_a_text_that_repeats_itself_is_found_to_be_worth_drafting_without_a_single_draft() -> None:
    memory = DraftMemory()
    repeats = {
        n: Drafter(n, costs=WHOLE, learnt=memory.of(n), plain=memory.of(None)) for n in (1, 2, 3)
    }
    drafters = choice(repeats=repeats)
    text = Repeats([1, 2, 3, 4])
    drafted = []
    while len(text.tokens) < 60:
        plan = drafters.plan(text, np.inf)
        tokens = [t % 4 + 1 for t in range(len(text.tokens), len(text.tokens) + plan.drafts + 1)]
        cycle = Cycle(tokens=tuple(tokens), drafted=plan.drafts, accepted=plan.drafts)
        assert list(plan.proposed[: plan.drafts]) == tokens[:-1]
        took_s = drafters.expected_s(plan, plan.drafts)
        drafters.learn(plan, cycle, held=None, took_s=took_s)
        text.add(tokens)
        drafted.append(plan.drafts)

    assert drafted[:8] == [0] * 8
    assert drafted[-2:] == [7, 7]


def test_proposals_are_what_followed_the_longest_suffix_last() -> None:
    rng = np.random.default_rng(4)
    for _ in range(50):
        held = [int(t) for t in rng.integers(0, 4, 25)]
        match, proposed = Repeats(held).propose(3)
        found = [
            (n, (held[i + n :] * 3)[:3])
            for n in (3, 2, 1)
            for i in range(len(held) - n - 1, -1, -1)
            if held[i : i + n] == held[-n:]
        ]

        assert (match, proposed) == (found[0] if found else (0, []))


def test_only_exits_that_may_pay_are_kept_unless_they_are_asked_for(fakes: Any) -> None:
    session = fakes.session()
    decoder, table = session.decoder, session.costs.table("verify")
    same: dict[str, Any] = {"measured": "affine", "heads": ("affine",)}

    hopeless = dataclasses.replace(decoder.exits.affine[3], agreement=0.5)
    affine = {**decoder.exits.affine, 3: hopeless}
    decoder.exits = dataclasses.replace(decoder.exits, affine=affine)
    # A cycle of one draft at layer 3 takes 81.5 ms beside 44: 0.85 would be needed.
    kept = exit_drafters(decoder, table, session.rows, DraftMemory(), layers=(1, 2, 3), **same)
    assert [k.key for k in kept] == [(1, "affine"), (2, "affine")]
    asked = exit_drafters(
        decoder, table, session.rows, DraftMemory(), layers=(3,), drafts=2, **same
    )
    assert [k.best() for k in asked] == [(2, np.inf)]
    with pytest.raises(ConfigError, match=r"expected exits of \[1, 2, 3\]"):
        exit_drafters(decoder, table, session.rows, DraftMemory(), layers=(4,), **same)


def test_a_head_that_was_not_measured_costs_by_the_weights_it_reads(fakes: Any) -> None:
    session = fakes.session()
    decoder, table = session.decoder, session.costs.table("verify")
    exits = decoder.exits
    decoder.exits = LanguageExits(
        model="fake",
        digest=exits.digest,
        affine=exits.affine,
        shortlist=np.arange(26),
        notes={"scores": [{"exits": [{"layer": 1, "shortlist_agreement": 0.25}]}]},
    )

    head_s = {
        kind: draft_head_s(decoder, table, 1, kind, measured="affine")
        for kind in ("raw", "affine", "shortlist")
    }
    assert head_s["affine"] == table.head_s[0]
    assert head_s["raw"] == pytest.approx(table.head_s[-1])
    assert head_s["shortlist"] == pytest.approx(table.head_s[-1] * (26 + 4) / 300)
    assert draft_heads(decoder, "affine") == ("shortlist", "affine")
    assert draft_heads(decoder, "shortlist") == ("shortlist", "affine")
    assert draft_heads(decoder, "raw") == ("shortlist", "raw")
    assert draft_agreement(decoder, 1, "shortlist") == 0.25
    assert draft_agreement(decoder, 1, "affine") == 0.6
    assert draft_agreement(decoder, 2, "shortlist") is None
    assert draft_agreement(decoder, 1, "raw") is None


def test_drafts_from_elsewhere_cost_rows_of_all_layers_and_nothing_else(fakes: Any) -> None:
    session = fakes.session()
    costs = draft_costs(session.costs.table("verify"), session.rows, 0, head_s=0.0)

    assert costs.cycle_s(0) == pytest.approx(0.044)
    assert costs.cycle_s(3) == pytest.approx(0.044 * 1.75)


def test_an_exit_without_a_score_is_unknown() -> None:
    exit_ = AffineExit(layer=1, weight=np.eye(2, dtype=np.float32), bias=np.zeros(2, np.float32))

    assert exit_.agreement is None
    assert DraftMemory().chance((1, "shortlist")) is None
    assert drafter(DraftMemory(), None).best() == (0, 1.0)
