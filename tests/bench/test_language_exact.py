"""Exact mode beside full depth: what is told of it is what a tiny model does."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from edgewise.backends.decoder.base import load_decoder
from edgewise.bench.language_exact import (
    ExactSettings,
    as_json,
    held_out_prompts,
    run_exact,
)
from edgewise.errors import ConfigError, DataError
from edgewise.predict import CostTable
from edgewise.runtime.generation import LanguageCosts, LanguageSession
from edgewise.runtime.generation.speculation import speculate
from edgewise.runtime.generation.stepping import Decoded, StepperInputs, VerifyStepper
from edgewise.training.language_text import TokenText

PROMPTS = [[5, 17, 3, 99, 42, 7], [8, 9, 8, 9, 8]]
SETTINGS = ExactSettings(max_tokens=16, drafts=(1, 3), turns=3)


@pytest.fixture(scope="module")
def session(language: Any) -> LanguageSession:
    source = language.transformers_model("llama", tie_word_embeddings=False)
    for layer in source.model.layers[1:]:  # so that some drafts hold and some do not
        for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
            weight.data *= 0.3
    decoder = load_decoder(language.language_model(source), exit_layers=(1, 3))
    costs = LanguageCosts.same(CostTable.from_costs([1e-3] * 3, [1e-3] * 3))
    return LanguageSession(decoder, costs, head="raw")


@pytest.fixture(scope="module")
def result(session: LanguageSession) -> Any:
    return run_exact(session, PROMPTS, settings=SETTINGS)


def test_tokens_are_full_depths_and_every_way_to_draft_has_a_row(result: Any) -> None:
    assert (result.texts, result.tokens, result.tokens_equal) == (2, 32, 1.0)
    assert result.differences == ()
    ways = [(row.layer, row.head, row.drafts) for row in result.rows]
    assert ways == [
        (layer, head, drafts)
        for layer, head in ((None, None), (1, "raw"), (3, "raw"))
        for drafts in (1, 3)
    ]
    assert set(as_json(result)) >= {"tokens_equal", "speed_up", "rows"}


def test_a_speed_up_is_what_cycles_yield_over_what_they_take(result: Any) -> None:
    for row in result.rows:
        assert row.speed_up.value == pytest.approx(row.tokens_per_cycle / row.cycle_ratio)
        assert row.speed_up.low <= row.speed_up.high
        assert 1 <= row.tokens_per_cycle <= row.drafts + 1
        if row.drafts == 1:
            assert row.break_even == pytest.approx(max(0.0, row.cycle_ratio - 1))


def test_what_was_read_off_the_texts_is_what_cycles_do(
    session: LanguageSession, result: Any
) -> None:
    decoder, last = session.decoder, len(session.decoder.exit_layers)
    for row in result.rows:
        if row.layer is None:
            continue
        position = decoder.exit_layers.index(row.layer) + 1
        accepted = []
        for prompt in PROMPTS:
            cache = decoder.new_cache(64)
            states = decoder.embed(prompt[:-1])
            decoder.run_layers(states, cache, start=0, stop=last, first=0)
            cache.length = len(prompt) - 1
            text = list(prompt)
            while len(text) < len(prompt) + SETTINGS.max_tokens:
                left = len(prompt) + SETTINGS.max_tokens - len(text)
                cycle = speculate(
                    decoder, cache, text[-1], position=position, drafts=row.drafts, kind="raw"
                )
                accepted.append(min(cycle.accepted, left))
                text += cycle.tokens

        assert row.tokens_per_cycle == pytest.approx(np.mean(accepted) + 1)


class _Wrong:
    """Says another token in the third place."""

    def __init__(self, inputs: StepperInputs) -> None:
        self._inner, self._count = VerifyStepper(inputs, drafts=0, layers=[1], heads=["raw"]), 0

    def step(self, token: int, *, since_s: float, due_s: float) -> list[Decoded]:
        import dataclasses

        self._count += 1
        (found,) = self._inner.step(token, since_s=since_s, due_s=due_s)
        return [dataclasses.replace(found, token=(found.token + (self._count == 3)) % 160)]


def test_a_way_that_is_not_exact_is_found_out(session: LanguageSession) -> None:
    result = run_exact(session, PROMPTS[:1], settings=SETTINGS, stepper=_Wrong)

    assert result.tokens_equal < 1
    (difference,) = result.differences
    assert (difference.text, difference.index) == (0, 2)
    assert difference.gap > 0.001  # no tie


def test_prompts_are_of_the_last_tenth_of_each_text_in_turn() -> None:
    texts = [
        TokenText(name="a", tokens=np.arange(1000)),
        TokenText(name="b", tokens=np.arange(5000, 7000)),
    ]
    prompts = held_out_prompts(texts, count=20, shortest=10, longest=20)

    assert len(prompts) == 20
    assert all(10 <= len(p) <= 20 for p in prompts)
    for i, prompt in enumerate(prompts):
        low, high = ((900, 1000), (6800, 7000))[i % 2]
        assert low <= prompt[0] < prompt[-1] < high
    assert prompts == held_out_prompts(texts, count=20, shortest=10, longest=20)
    with pytest.raises(DataError, match="last tenth"):
        held_out_prompts([TokenText(name="c", tokens=np.arange(100))])


def test_nothing_to_play_or_to_draft_with_is_refused(language: Any) -> None:
    decoder = load_decoder(language.tiny())
    costs = LanguageCosts.same(CostTable.from_costs([1e-3], [1e-3]))
    with pytest.raises(ConfigError, match="exits that may draft"):
        run_exact(LanguageSession(decoder, costs), PROMPTS)
    with pytest.raises(ConfigError, match="at least one"):
        ExactSettings(drafts=(0,))


def test_no_acceptance_will_do_where_cycles_take_more_than_they_could_yield(result: Any) -> None:
    for row in result.rows:
        if row.cycle_ratio > row.drafts + 1:
            assert row.break_even > 1 or math.isinf(row.break_even)
