from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from edgewise.backends.decoder import load_decoder
from edgewise.bench.language_play import (
    Text,
    TextJudgement,
    Way,
    as_json,
    judge,
    play,
    play_in_turns,
    score,
    with_budget,
)
from edgewise.errors import ShapeError
from edgewise.predict import CostTable
from edgewise.runtime.generation import LanguageCosts, LanguageSession
from edgewise.runtime.generation.baselines import make_baseline
from edgewise.runtime.generation.costs import RowCosts

PROMPTS = ([3, 1, 4, 1, 5], [9, 2, 6])


@pytest.fixture(scope="module")
def session(language: Any) -> LanguageSession:
    decoder = load_decoder(language.tiny(), exit_layers=(2,))
    costs = LanguageCosts.same(CostTable.from_costs([1e-3] * 2, [1e-4] * 2))
    return LanguageSession(decoder, costs, rows=RowCosts.proportional(2e-3, 1e-4))


def full_depth() -> Way:
    return Way(name="full-depth", stepper=make_baseline("full-depth"))


def test_the_reader_agrees_with_its_own_greedy_text(session: LanguageSession) -> None:
    text = play(session, PROMPTS[0], full_depth(), budget_s=None, max_tokens=6)

    found = judge(session.decoder, text)
    assert found.agreement == 1.0

    # Its loss is that of the tokens under the model, one after the other.
    ids, losses = [*text.prompt], []
    for token in text.ids:
        cache = session.decoder.new_cache(len(ids))
        state = session.decoder.run_layers(
            session.decoder.embed(ids), cache, start=0, stop=2, first=0
        )
        logits = session.decoder.logits(state[-1:], position=2)[0].astype(float)
        losses.append(
            -np.log(np.exp(logits - logits.max())[token] / np.exp(logits - logits.max()).sum())
        )
        ids.append(token)
    assert found.loss == pytest.approx(np.mean(losses), rel=1e-4)


def test_a_text_without_tokens_cannot_be_judged(session: LanguageSession) -> None:
    text = play(session, PROMPTS[0], full_depth(), budget_s=None, max_tokens=1)
    empty = dataclasses.replace(
        text, tokens=(), summary=dataclasses.replace(text.summary, token_ids=())
    )

    with pytest.raises(ShapeError):
        judge(session.decoder, empty)


def test_texts_stand_in_the_order_of_prompts(session: LanguageSession) -> None:
    played = play_in_turns(
        session, PROMPTS, [full_depth(), Way(name="edgewise")], budgets_s=(None, 1.0), max_tokens=3
    )

    assert set(played) == {(n, b) for n in ("full-depth", "edgewise") for b in (None, 1.0)}
    for texts in played.values():
        assert [t.prompt for t in texts] == [tuple(p) for p in PROMPTS]


def test_a_budget_is_applied_afterwards_to_what_knew_none(session: LanguageSession) -> None:
    text = play(session, PROMPTS[0], full_depth(), budget_s=None, max_tokens=5)
    middle = sorted(t.observed_s for t in text.tokens[1:])[2]

    found = with_budget(text, middle)
    assert [t.met for t in found.tokens[1:]] == [t.observed_s <= middle for t in text.tokens[1:]]
    assert found.tokens[0].met is None
    assert found.summary.tpot_budget_s == middle


def test_a_row_counts_tokens_depths_and_deadlines(session: LanguageSession) -> None:
    texts = [
        with_budget(play(session, p, full_depth(), budget_s=None, max_tokens=4), 1e6)
        for p in PROMPTS
    ]
    judged = [TextJudgement(agreement=1.0, loss=0.0)] * 2

    row = score(
        texts, [t.ids for t in texts], name="full", decoder=session.decoder, depth=4, judged=judged
    )
    assert (row.texts, row.tokens, row.dsr, row.depths) == (2, 8, 1.0, {4: 8})
    assert (row.relative_accuracy, row.identical, row.first_divergence) == (1.0, 1.0, None)
    assert row.perplexity == 1.0
    assert row.mean_depth_ratio == 1.0
    assert row.dsr_low is not None
    assert 0.5 < row.dsr_low < 1.0  # six tokens in time prove little
    assert as_json(row)["name"] == "full"


def test_without_a_budget_no_share_is_in_time(session: LanguageSession) -> None:
    text: Text = play(session, PROMPTS[0], full_depth(), budget_s=None, max_tokens=2)

    row = score([text], [text.ids], name="full", decoder=session.decoder, depth=4)
    assert (row.dsr, row.dsr_low, row.dsr_high) == (None, None, None)
