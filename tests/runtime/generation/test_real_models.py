"""Tiny models with random weights: what is invariant whatever exits are taken."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from edgewise.backends.decoder.base import load_decoder
from edgewise.model.decoding import KV_POLICIES, KvPolicy
from edgewise.predict import CostTable
from edgewise.runtime.generation import LanguageCosts, LanguageSession
from edgewise.runtime.generation.state import TextState

PROMPT = [5, 17, 3, 99, 42, 7]


@pytest.fixture(scope="module")
def source(language: Any) -> Any:
    return language.transformers_model("llama")


@pytest.fixture(scope="module")
def decoder(language: Any, source: Any) -> Any:
    return load_decoder(language.language_model(source), exit_layers=(1, 2, 3))


def session(decoder: Any, **options: Any) -> LanguageSession:
    costs = LanguageCosts.same(CostTable.from_costs([1e-3] * 4, [1e-3] * 4))
    return LanguageSession(decoder, costs, **options)


def go(text: TextState, token: int, position: int) -> None:
    state = text.run(text.decoder.embed([token]), start=0, stop=position)
    text.leave(state, position=position)
    text.advance()


@pytest.mark.parametrize("kv", ["propagate", "verify"], ids=["full depth", "exact"])
def test_full_depth_and_exact_say_what_transformers_says(
    language: Any, source: Any, decoder: Any, kv: KvPolicy
) -> None:
    generation = session(decoder).generate(PROMPT, max_tokens=24, kv=kv)

    assert [t.id for t in generation] == language.generated(source, PROMPT, 24)
    assert generation.summary.mean_depth == 4


@pytest.mark.parametrize("kv", KV_POLICIES)
def test_all_layers_report_one_length_after_any_exits(decoder: Any, kv: KvPolicy) -> None:
    text = TextState(decoder, 40, kv=kv, most_owed=3)
    text.prefill(PROMPT)
    for i, position in enumerate([1, 4, 2, 2, 1, 3, 1, 1, 1, 1, 2, 4]):
        go(text, 10 + i, position)
        present = text.cache.present

        assert text.length == len(PROMPT) + i + 1
        assert not present[:, text.length :].any()
        assert present[0, : text.length].all()
        if kv == "propagate":
            assert present[:, : text.length].all()
        assert text.owed <= 3


def test_a_deferred_token_is_at_full_depth_what_it_would_have_been(decoder: Any) -> None:
    deferred = TextState(decoder, 20, kv="defer")
    plain = TextState(decoder, 20)
    for text in (deferred, plain):
        text.prefill(PROMPT)
    for token, position in ((11, 1), (12, 1), (13, 4)):
        go(deferred, token, position)
    for token in (11, 12, 13):
        go(plain, token, 4)

    assert deferred.owed == 0
    assert deferred.cache.present[:, : deferred.length].all()
    # All three ran through every layer in order, so nothing was approximated.
    np.testing.assert_allclose(deferred.cache.keys, plain.cache.keys, atol=1e-5)


def test_a_masked_token_is_not_attended_to(decoder: Any) -> None:
    text = TextState(decoder, 20, kv="mask")
    text.prefill(PROMPT)
    go(text, 11, 1)

    assert text.cache.present[0, len(PROMPT)]
    assert not text.cache.present[1:, len(PROMPT)].any()


def test_what_an_unfinished_token_computed_is_forgotten(decoder: Any) -> None:
    text = TextState(decoder, 20, kv="mask")
    text.prefill(PROMPT)
    text.run(decoder.embed([11]), start=0, stop=3)
    text.drop_unfinished()
    go(text, 12, 1)

    assert text.cache.present[:, len(PROMPT)].tolist() == [True, False, False, False]


def test_threads_mixing_depths_get_what_they_get_alone(decoder: Any) -> None:
    sessions = [session(decoder, policy="fixed", exit_index=k % 4) for k in range(8)]

    def ids(k: int) -> tuple[int, ...]:
        generation = sessions[k].generate([1 + k, *PROMPT], max_tokens=12)
        list(generation)
        return generation.summary.token_ids

    alone = [ids(k) for k in range(8)]
    together: dict[int, tuple[int, ...]] = {}
    threads = [threading.Thread(target=lambda k=k: together.update({k: ids(k)})) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [together[k] for k in range(8)] == alone


def test_prompts_together_say_what_they_say_alone(decoder: Any) -> None:
    made = session(decoder)
    prompts = [PROMPT, PROMPT[:1], [*PROMPT, *PROMPT]]
    batch = made.generate_batch(prompts, max_tokens=[3, 9, 6])
    list(batch)

    for prompt, count, summary in zip(prompts, (3, 9, 6), batch.summaries, strict=True):
        alone = made.generate(prompt, max_tokens=count)
        assert tuple(t.id for t in alone) == summary.token_ids


def test_a_prompt_in_pieces_is_the_prompt(decoder: Any) -> None:
    whole, pieces = TextState(decoder, 20), TextState(decoder, 20)
    whole.prefill(PROMPT)
    pieces.prefill(PROMPT[:4])
    pieces.prefill(PROMPT[4:])

    np.testing.assert_allclose(whole.cache.keys, pieces.cache.keys, atol=1e-5)
