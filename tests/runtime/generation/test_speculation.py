"""Speculation changes when tokens come, never which: greedy exactly, sampled in distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import scipy.stats

from edgewise.backends.decoder import DecoderProgram, load_decoder
from edgewise.errors import BackendError, ConfigError
from edgewise.model.decoding import KvCache
from edgewise.runtime.generation.speculation import (
    GREEDY,
    Cycle,
    Drawing,
    probe,
    speculate,
    verify,
)
from edgewise.scores import softmax

Float32 = npt.NDArray[np.float32]
Load = Callable[..., tuple[DecoderProgram, list[int], list[int]]]
DEPTH, COUNT = 4, 10


@pytest.fixture(scope="module")
def load(language: Any) -> Load:
    """``load(family, seed)``: a program with every exit, a prompt, and what transformers says."""

    @cache
    def make(family: str = "llama", seed: int = 0) -> tuple[DecoderProgram, list[int], list[int]]:
        source = language.transformers_model(
            family, layers=DEPTH, seed=seed, tie_word_embeddings=False
        )
        # Later layers that change little, so that some drafts hold and some do not.
        for layer in source.model.layers[1:]:
            for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
                weight.data *= 0.3
        prompt = [int(t) for t in np.random.default_rng(seed).integers(0, 160, 9)]
        program = load_decoder(
            language.language_model(source), "torch:cpu", exit_layers=range(1, DEPTH)
        )
        return program, prompt, language.generated(source, prompt, COUNT)

    return make


def begun(program: DecoderProgram, prompt: list[int], capacity: int = 64) -> KvCache:
    """A cache that holds all but the last token of a prompt."""
    cells = program.new_cache(capacity)
    states = program.embed(prompt[:-1])
    program.run_layers(states, cells, start=0, stop=len(program.exit_layers), first=0)
    cells.length = len(prompt) - 1
    return cells


def generate(
    program: DecoderProgram, prompt: list[int], count: int = COUNT, **knobs: Any
) -> tuple[list[int], list[Cycle], KvCache]:
    cells = begun(program, prompt)
    text, cycles = list(prompt), []
    while len(text) < len(prompt) + count:
        cycles.append(speculate(program, cells, text[-1], kind="raw", **knobs))
        text += cycles[-1].tokens
        assert cells.length == len(text) - 1
    return text[len(prompt) :][:count], cycles, cells


@pytest.mark.parametrize(
    ("family", "recompute"),
    [
        pytest.param("llama", False, id="llama"),
        pytest.param("qwen3", False, id="qwen3"),
        pytest.param("olmo2", False, id="olmo2"),
        pytest.param("llama", True, id="llama, recomputed"),
    ],
)
def test_greedy_text_is_that_of_full_depth_for_every_exit_and_number_of_drafts(
    load: Load, *, family: str, recompute: bool
) -> None:
    accepted = drafted = 0
    for seed in range(2):
        program, prompt, expected = load(family, seed)
        for position in range(1, DEPTH):
            for drafts in (0, 1, 2, 4):
                found, cycles, _ = generate(
                    program, prompt, position=position, drafts=drafts, recompute=recompute
                )
                accepted += sum(c.accepted for c in cycles)
                drafted += sum(c.drafted for c in cycles)

                assert found == expected

    assert 0 < accepted < drafted  # both ways were taken


@pytest.mark.parametrize("sure", [0.2, 0.9])
def test_drafting_only_while_the_exit_is_sure_gives_the_same_text(load: Load, sure: float) -> None:
    program, prompt, expected = load()
    found, cycles, _ = generate(program, prompt, position=2, drafts=4, sure=sure)

    assert found == expected
    assert any(c.drafted < 4 for c in cycles)


def test_drafts_from_elsewhere_give_the_text_of_full_depth_right_or_wrong(load: Load) -> None:
    program, prompt, expected = load()
    text, cells, accepted = list(prompt), begun(program, prompt), []
    for turn in range(4):
        right = expected[len(text) - len(prompt) :][:turn]
        cycle = verify(program, cells, text[-1], [*right, (text[-1] + 1) % 160, 3])
        text += cycle.tokens
        accepted.append(cycle.accepted)
        assert cells.length == len(text) - 1
        assert cells.present[:, : cells.length].all()
        assert not cells.present[:, cells.length :].any()

    assert text[len(prompt) :][:COUNT] == expected[: len(text) - len(prompt)]
    assert accepted == [0, 1, 2, 3]
    alone = verify(program, begun(program, prompt), prompt[-1], [])
    assert alone == Cycle(tokens=(expected[0],), drafted=0, accepted=0)


def test_drafts_from_elsewhere_end_with_the_text_and_with_the_cache(load: Load) -> None:
    program, prompt, expected = load()
    cells = begun(program, prompt, capacity=len(prompt) + 1)
    cycle = verify(program, cells, prompt[-1], expected[:3])
    assert (cycle.drafted, list(cycle.tokens)) == (1, expected[:2])

    stop = expected[1]
    cycle = verify(program, begun(program, prompt), prompt[-1], expected[:5], stop_ids={stop})
    end = expected.index(stop) + 1
    assert list(cycle.tokens) == expected[:end]
    assert cycle.drafted == end
    full = begun(program, prompt, capacity=len(prompt) - 1)
    with pytest.raises(ConfigError, match="full"):
        verify(program, full, prompt[-1], expected[:1])


def test_an_exit_asked_in_passing_says_what_it_would_have_drafted(load: Load) -> None:
    program, prompt, expected = load()
    cells, text, agreed = begun(program, prompt), list(prompt), []
    while len(text) < len(prompt) + COUNT:
        other = begun(program, text, capacity=64)
        drafted = speculate(program, other, text[-1], position=2, drafts=1, kind="raw")
        cycle, held = probe(program, cells, text[-1], position=2, kind="raw")
        text += cycle.tokens
        agreed.append(held)
        assert held == drafted.accepted
        assert cells.length == len(text) - 1

    assert text[len(prompt) :] == expected
    assert 0 < sum(agreed) < COUNT  # both answers were given


def test_cells_are_those_of_one_pass_over_the_whole_text(load: Load) -> None:
    program, prompt, _ = load()
    found, cycles, cells = generate(program, prompt, position=2, drafts=3)
    assert any(c.accepted < c.drafted for c in cycles)  # something was cropped
    text = (prompt + found)[: cells.length + 1]
    whole = begun(program, text)
    kept = min(cells.length, whole.length)

    assert cells.present[:, : cells.length].all()
    assert not cells.present[:, cells.length :].any()
    for ours, theirs in ((cells.keys, whole.keys), (cells.values, whole.values)):
        np.testing.assert_allclose(ours[:, :, :kept], theirs[:, :, :kept], rtol=0, atol=1e-4)


class Counting:
    """Lends a program and counts rows by layer, and rows of heads."""

    def __init__(self, program: DecoderProgram, fail_at: int = -1) -> None:
        self.program, self.fail_at, self.calls = program, fail_at, 0
        self.rows: Counter[int] = Counter()
        self.heads: Counter[int] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.program, name)

    def _call(self) -> None:
        self.calls += 1
        if self.calls - 1 == self.fail_at:
            raise BackendError("broken on purpose")

    def run_layers(self, hidden: Float32, cells: KvCache, **where: int) -> Float32:
        self._call()
        span = self.program.layers_at(where["start"]), self.program.layers_at(where["stop"])
        self.rows.update({layer: len(hidden) for layer in range(*span)})
        return self.program.run_layers(hidden, cells, **where)

    def logits(self, hidden: Float32, **which: Any) -> Float32:
        self._call()
        self.heads[which["position"]] += len(hidden)
        return self.program.logits(hidden, **which)


@pytest.mark.parametrize(("recompute", "early"), [(False, 4), (True, 8)])
def test_early_layers_run_once_for_each_token_unless_asked_to_run_again(
    load: Load, *, recompute: bool, early: int
) -> None:
    program, prompt, _ = load()
    counting: Any = Counting(program)
    cycle = speculate(
        counting,
        begun(program, prompt),
        prompt[-1],
        position=2,
        drafts=3,
        kind="raw",
        recompute=recompute,
    )

    assert cycle.drafted == 3
    assert counting.rows == {0: early, 1: early, 2: 4, 3: 4}
    assert counting.heads == {2: 3, 4: 4}


def test_whatever_fails_leaves_the_cache_as_it_was(load: Load) -> None:
    program, prompt, expected = load()
    calls: Any = Counting(program)
    speculate(calls, begun(program, prompt), prompt[-1], position=2, drafts=3, kind="raw")
    cells = begun(program, prompt)
    for call in range(calls.calls):
        broken: Any = Counting(program, fail_at=call)
        with pytest.raises(BackendError, match="on purpose"):
            speculate(broken, cells, prompt[-1], position=2, drafts=3, kind="raw")

        assert cells.length == len(prompt) - 1
        assert not cells.present[:, cells.length :].any()
    after = speculate(program, cells, prompt[-1], position=2, drafts=3, kind="raw")
    assert list(after.tokens) == expected[: len(after.tokens)]


def test_a_token_that_ends_the_answer_is_the_last_and_nothing_behind_it_stays(load: Load) -> None:
    program, prompt, expected = load()
    stop = expected[3]
    end = expected.index(stop)
    cells = begun(program, prompt)
    text = list(prompt)
    while text[-1] != stop:
        text += speculate(
            program, cells, text[-1], position=3, drafts=4, kind="raw", stop_ids={stop}
        ).tokens

    assert text[len(prompt) :] == expected[: end + 1]
    assert cells.length == len(text) - 1
    assert not cells.present[:, cells.length :].any()


def test_drafts_are_as_many_as_the_cache_has_room_for(load: Load) -> None:
    program, prompt, expected = load()
    cells = begun(program, prompt, capacity=len(prompt) + 1)
    cycle = speculate(program, cells, prompt[-1], position=2, drafts=4, kind="raw")

    assert cycle.drafted == 1
    assert list(cycle.tokens) == expected[: len(cycle.tokens)]
    full = begun(program, prompt, capacity=len(prompt) - 1)
    with pytest.raises(ConfigError, match="full"):
        speculate(program, full, prompt[-1], position=2, drafts=4, kind="raw")


@pytest.mark.parametrize(("position", "drafts"), [(0, 2), (DEPTH, 2), (2, -1)])
def test_an_exit_that_cannot_draft_is_refused(load: Load, position: int, drafts: int) -> None:
    program, prompt, _ = load()
    with pytest.raises(ConfigError, match="expected at least 0 drafts"):
        speculate(program, begun(program, prompt), prompt[-1], position=position, drafts=drafts)


class Chain:
    """A model whose next token hangs on the last alone: two tables of logits, exit and depth."""

    exits = None
    exit_layers = (1, 2)

    def __init__(self, exit_logits: Float32, full_logits: Float32) -> None:
        self._tables = {1: exit_logits, 2: full_logits}
        self._eye = np.eye(len(full_logits), dtype=np.float32)

    def layers_at(self, position: int) -> int:
        return position

    def embed(self, tokens: list[int]) -> Float32:
        return np.asarray(self._eye[tokens])

    def run_layers(self, hidden: Float32, cells: KvCache, **_: int) -> Float32:  # noqa: ARG002
        return hidden

    def logits(self, hidden: Float32, *, position: int, kind: str = "raw") -> Float32:  # noqa: ARG002
        return np.asarray(self._tables[position][hidden.argmax(axis=1)])


def test_an_exit_asked_in_passing_when_sampling_says_how_likely_its_draft_would_have_held() -> None:
    rng = np.random.default_rng(5)
    early, full = (rng.normal(0, 1.5, (6, 6)).astype(np.float32) for _ in range(2))
    chain: Any = Chain(early, full)
    drawing = Drawing.at_temperature(0.9, np.random.default_rng(6))
    cells = KvCache(layers=2, kv_heads=1, head_dim=1, capacity=8192)
    _, chance = probe(chain, cells, 0, position=1, drawing=drawing)
    cycles = [speculate(chain, cells, 0, position=1, drafts=1, drawing=drawing) for _ in range(900)]

    # Four standard errors of a share of 900.
    assert np.mean([c.accepted for c in cycles]) == pytest.approx(chance, abs=4 * 0.5 / 30)


@pytest.mark.parametrize("columns", [[0, 2], [3], [0, 1, 2, 3]], ids=["two", "one", "all"])
def test_a_short_list_drafts_without_bending_the_distribution(columns: list[int]) -> None:
    rng = np.random.default_rng(12)
    full = rng.normal(0, 1.5, (4, 4)).astype(np.float32)
    early = np.full_like(full, -np.inf)
    early[:, columns] = (full + rng.normal(0, 0.5, full.shape))[:, columns]
    chain: Any = Chain(early, full)
    drawing = Drawing.at_temperature(0.8, rng)

    def cycle(cells: KvCache, token: int) -> Cycle:
        return speculate(chain, cells, token, position=1, drafts=2, drawing=drawing)

    assert _pvalue(cycle, full, temperature=0.8) > 1e-4


@pytest.mark.parametrize("drafts", [[1], [2, 2], [0, 3, 1]], ids=["one", "two", "three"])
def test_drafts_that_were_not_drawn_do_not_bend_the_distribution(drafts: list[int]) -> None:
    rng = np.random.default_rng(13)
    full = rng.normal(0, 1.5, (4, 4)).astype(np.float32)
    chain: Any = Chain(full, full)
    drawing = Drawing.at_temperature(0.8, rng)

    def cycle(cells: KvCache, token: int) -> Cycle:
        return verify(chain, cells, token, drafts, drawing=drawing)

    assert _pvalue(cycle, full, temperature=0.8) > 1e-4


def _pvalue(
    cycle: Callable[[KvCache, int], Cycle],
    full: Float32,
    *,
    temperature: float,
    texts: int = 1200,
) -> float:
    """How likely texts of three tokens are if they are drawn at full depth."""
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(texts):
        cells = KvCache(layers=2, kv_heads=1, head_dim=1, capacity=16)
        text = [0]
        while len(text) < 4:
            text += cycle(cells, text[-1]).tokens
        counts[tuple(text[1:4])] += 1
    p = softmax(full, temperature=temperature)
    joint = p[0][:, None, None] * p[:, :, None] * p[None, :, :]
    found = np.array([counts[tuple(i)] for i in np.ndindex(joint.shape)], dtype=float)
    expected = joint.ravel() * texts
    rare = expected < 5  # too few for the test's approximation: judged together
    if rare.any():
        found = np.append(found[~rare], found[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    return float(scipy.stats.chisquare(found, expected).pvalue)


@pytest.mark.parametrize(
    ("likeness", "drafts"),
    [(0.0, 3), (0.7, 1), (0.7, 3), (1.0, 3)],
    ids=["unlike", "alike, one draft", "alike", "equal"],
)
def test_sampled_text_is_distributed_as_if_drawn_at_full_depth(
    likeness: float, drafts: int
) -> None:
    rng = np.random.default_rng(11)
    size, temperature = 4, 0.8
    full = rng.normal(0, 1.5, (size, size)).astype(np.float32)
    other = rng.normal(0, 1.5, (size, size)).astype(np.float32)
    early = (likeness * full + (1 - likeness) * other).astype(np.float32)
    chain: Any = Chain(early, full)
    drawing = Drawing.at_temperature(temperature, rng)

    def cycle(cells: KvCache, token: int) -> Cycle:
        return speculate(chain, cells, token, position=1, drafts=drafts, drawing=drawing)

    # Of four cases with a fixed seed, none should be among the rarest in ten thousand.
    assert _pvalue(cycle, full, temperature=temperature) > 1e-4


def test_the_test_of_distribution_would_find_drafts_that_are_always_taken() -> None:
    rng = np.random.default_rng(2)
    p = softmax(rng.normal(0, 1.5, 16))
    q = softmax(rng.normal(0, 1.5, 16))
    found = rng.multinomial(3000, q)

    assert scipy.stats.chisquare(found, p * 3000).pvalue < 1e-12


def test_equal_distributions_accept_every_draft() -> None:
    table = np.random.default_rng(0).normal(0, 1, (5, 5)).astype(np.float32)
    chain: Any = Chain(table, table)
    drawing = Drawing.at_temperature(1.0, np.random.default_rng(1))
    cells = KvCache(layers=2, kv_heads=1, head_dim=1, capacity=512)
    cycles = [speculate(chain, cells, 0, position=1, drafts=4, drawing=drawing) for _ in range(60)]

    assert all(c.accepted == 4 for c in cycles)


def test_sampling_without_chance_and_with_a_choice_of_drafts_is_refused() -> None:
    with pytest.raises(ConfigError, match="random generator"):
        Drawing(softmax)
    with pytest.raises(ConfigError, match="temperature"):
        Drawing.at_temperature(0.0, np.random.default_rng(0))
    chain: Any = Chain(np.eye(3, dtype=np.float32), np.eye(3, dtype=np.float32))
    cells = KvCache(layers=2, kv_heads=1, head_dim=1, capacity=8)
    drawing = Drawing.at_temperature(1.0, np.random.default_rng(0))
    with pytest.raises(ConfigError, match="greedy"):
        speculate(chain, cells, 0, position=1, drafts=2, drawing=drawing, sure=0.5)


def test_a_draw_never_gives_a_token_without_a_chance() -> None:
    drawing = Drawing.at_temperature(1.0, np.random.default_rng(0))
    weights = np.array([0.0, 0.3, 0.0, 0.7, 0.0])
    drawn = Counter(drawing.draw(weights) for _ in range(500))

    assert set(drawn) == {1, 3}
    assert GREEDY.choose(np.array([0.1, 2.0, 0.3], dtype=np.float32)) == 1
