from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections import Counter
from typing import Any

import pytest

from edgewise.errors import BackendError, ConfigError, Infeasible
from edgewise.runtime.generation import Token

# With the fake's costs a token takes 15, 25, 35 and 44 ms at its four exits.
NEEDS_S = (0.015, 0.025, 0.035, 0.044)


def layers(tokens: list[Token]) -> list[int]:
    return [t.exit_layer for t in tokens]


@pytest.mark.parametrize(
    ("budget_s", "layer"),
    [(0.016, 1), (0.026, 2), (0.036, 3), (0.045, 4), (9.0, 4), (None, 4)],
)
def test_each_token_goes_as_deep_as_its_budget_allows(
    fakes: Any, budget_s: float | None, layer: int
) -> None:
    generation = fakes.session().generate("ab", tpot_budget_s=budget_s, max_tokens=5)
    tokens = list(generation)

    assert layers(tokens) == [4, *[layer] * 4]
    assert [t.observed_s for t in tokens[1:]] == pytest.approx([NEEDS_S[layer - 1]] * 4)
    assert generation.summary.dsr == (None if budget_s is None else 1.0)
    assert generation.summary.depth_histogram == Counter([4, *[layer] * 4])


def test_the_first_token_has_what_the_prompt_leaves_of_its_own_budget(fakes: Any) -> None:
    session = fakes.session()
    # Three tokens of the prompt take 60 ms in one pass; 26 ms are left.
    generation = session.generate("abcd", ttft_budget_s=0.086, tpot_budget_s=0.05, max_tokens=2)
    first, second = generation

    assert fakes.decoder_of(session).ran[0] == ("layers:0-4", 3)
    assert (first.exit_layer, first.met, first.budget_s) == (2, True, pytest.approx(0.086))
    assert generation.summary.ttft_s == pytest.approx(0.085)
    assert generation.summary.ttft_met
    assert second.exit_layer == 4


def test_time_that_was_saved_buys_depth_within_the_window(fakes: Any) -> None:
    strict = fakes.session().generate("a", tpot_budget_s=0.030, max_tokens=9, window="strict")
    carried = fakes.session().generate("a", tpot_budget_s=0.030, max_tokens=9, window=4)
    depths = layers(list(carried))[1:]

    assert layers(list(strict))[1:] == [2] * 8
    assert max(depths) > 2
    assert carried.summary.dsr == 1.0
    spent_s = [NEEDS_S[k - 1] for k in depths]
    assert all(sum(spent_s[i : i + 4]) <= 4 * 0.030 + 1e-9 for i in range(len(spent_s)))


def test_what_a_token_takes_beside_its_units_is_left_for_it(
    fakes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = fakes.session()
    policy, learn = session.policy(), session.policy().observe

    def slowly(*args: Any, **more: Any) -> None:
        learn(*args, **more)
        session.clock.sleep_s(0.003)

    monkeypatch.setattr(policy, "observe", slowly)
    # Full depth takes 44 ms and fits alone; with what learning takes it does not.
    generation = session.generate("a", tpot_budget_s=0.0455, max_tokens=12)
    before_s = generation.summary.floor_s
    tokens = list(generation)

    assert generation.summary.floor_s == pytest.approx(before_s + 0.003)
    assert layers(tokens)[3:] == [3] * 9
    assert [t.met for t in tokens[3:]] == [True] * 9


def test_a_disturbance_is_answered_by_leaving_earlier(fakes: Any) -> None:
    session = fakes.session()
    generation = session.generate("a", tpot_budget_s=0.045, max_tokens=40)
    tokens = [next(generation) for _ in range(6)]
    fakes.decoder_of(session).slower = lambda _: 2.0
    disturbed = list(generation)

    assert layers(tokens)[1:] == [4] * 5
    assert set(layers(disturbed)[4:]) <= {1, 2}
    assert [t.met for t in disturbed[4:]] == [True] * len(disturbed[4:])
    late = generation.summary.late
    assert len(late) == sum(t.met is False for t in disturbed)
    assert all("was predicted" in each.cause for each in late)


def test_a_budget_below_the_floor_runs_and_says_so_with_each_token(fakes: Any) -> None:
    generation = fakes.session().generate("ab", tpot_budget_s=0.010, max_tokens=4)
    tokens = list(generation)[1:]

    assert layers(tokens) == [1, 1, 1]
    assert [(t.feasible, t.met) for t in tokens] == [(False, False)] * 3
    assert all("below the floor" in str(t.cause) for t in tokens)
    assert generation.summary.floor_s == pytest.approx(0.015)
    assert generation.summary.dsr == 0.0


@pytest.mark.parametrize(
    ("budgets", "floor_s"),
    [({"tpot_budget_s": 0.010}, 0.015), ({"ttft_budget_s": 0.030}, 0.055)],
    ids=["per token", "first token"],
)
def test_a_budget_below_the_floor_is_refused_on_request_with_the_floor(
    fakes: Any, budgets: dict[str, float], floor_s: float
) -> None:
    session = fakes.session()

    with pytest.raises(Infeasible, match="soonest exit") as caught:
        session.generate("ab", on_infeasible="raise", **budgets)
    assert caught.value.closest == pytest.approx(floor_s)
    assert fakes.decoder_of(session).ran == []


def test_costs_grow_with_the_text_and_so_do_predictions(fakes: Any) -> None:
    # After 50 tokens everything takes half as long again.
    session = fakes.session(growth_ratio=0.01)
    decoder = fakes.decoder_of(session)
    decoder.slower = lambda _: 1.0 + 0.01 * decoder.answered
    generation = session.generate("a", tpot_budget_s=0.046, max_tokens=90)
    depths = layers(list(generation))[1:]
    # Each need, and the 20 µs that a decision is allowed for, times the growth.
    best = [
        max(k for k, s in enumerate(NEEDS_S, 1) if (s + 20e-6) * (1 + 0.01 * n) <= 0.046)
        for n in range(1, 90)
    ]

    assert depths == best
    assert (depths[0], depths[-1]) == (4, 1)
    assert generation.summary.dsr == 1.0


@pytest.mark.parametrize(("kv", "heads"), [("propagate", 1), ("mask", 0), ("defer", 0)], ids=str)
def test_a_kv_policy_is_priced_where_it_costs(fakes: Any, kv: Any, heads: int) -> None:
    session = fakes.session()
    tokens = list(session.generate("a", tpot_budget_s=0.0161, max_tokens=4, kv=kv))
    fills = [unit for unit, _ in fakes.decoder_of(session).ran if unit.startswith("fill")]

    assert layers(tokens)[1:] == [1, 1, 1]
    assert len(fills) == 3 * heads
    if kv != "defer":
        spent_s = fakes.LAYER_S + fakes.HEAD_S + heads * fakes.FILL_S
        assert [t.observed_s for t in tokens[1:]] == pytest.approx([spent_s] * 3)
        assert tokens[1].predicted_s == pytest.approx(spent_s)


def test_what_is_owed_is_in_the_estimate_and_capped(fakes: Any) -> None:
    session = fakes.session()
    generation = session.generate("a", tpot_budget_s=0.070, max_tokens=40, kv="defer")
    decoder = fakes.decoder_of(session)
    next(generation)
    # Ten tokens in a hurry leave early; more than eight are never owed.
    tokens = [next(generation)]
    decoder.slower = lambda _: 3.0
    tokens += [next(generation) for _ in range(14)]
    decoder.slower = lambda _: 1.0
    rows = [rows for unit, rows in decoder.ran if unit.startswith("layers")]

    assert any(t.exit_layer < 4 for t in tokens)
    assert max(rows) <= 9


def test_ragged_prompts_each_keep_their_budget_where_that_is_possible(fakes: Any) -> None:
    session = fakes.session()
    generation = session.generate_batch(
        ["a", "a longer prompt", "b" * 60],
        tpot_budget_s=[0.100, 0.120, 0.300],
        max_tokens=[12, 9, 5],
    )
    tokens = list(generation)
    summaries = generation.summaries

    assert [s.tokens for s in summaries] == [12, 9, 5]
    assert [s.dsr for s in summaries] == [1.0, 1.0, 1.0], [s.late for s in summaries]
    assert {t.stream for t in tokens[:12]} == {0, 1}  # the long prompt comes last


def test_nobody_waits_for_ever_for_others_deadlines(fakes: Any) -> None:
    session = fakes.session()
    # The first text's deadlines leave no room for a row of the second's prompt.
    generation = session.generate_batch(["a", "b" * 20], tpot_budget_s=[0.045, None], max_tokens=90)
    order = [token.stream for token in generation]

    assert order.index(1) < 90


def test_a_long_prompt_is_read_in_pieces_between_others_tokens(fakes: Any) -> None:
    session = fakes.session(context=400)
    generation = session.generate_batch(
        ["a", "b" * 300], tpot_budget_s=[0.200, None], max_tokens=[30, 2]
    )
    list(generation)
    chunks = [rows for unit, rows in fakes.decoder_of(session).ran if rows > 1]

    assert sum(chunks) == 299
    assert len(chunks) > 4
    assert generation.summaries[0].dsr == 1.0


def test_equal_texts_get_equal_depth(fakes: Any) -> None:
    session = fakes.session()
    generation = session.generate_batch(["a", "b"], tpot_budget_s=0.054, max_tokens=12)
    by_stream: dict[int, list[int]] = {0: [], 1: []}
    for token in generation:
        by_stream[token.stream].append(token.exit_layer)

    assert by_stream[0][2:] == by_stream[1][2:] == [2] * 10
    assert [s.dsr for s in generation.summaries] == [1.0, 1.0]


def test_time_during_which_nobody_reads_counts_for_no_deadline(fakes: Any) -> None:
    session = fakes.session()
    generation = session.generate("a", tpot_budget_s=0.045, max_tokens=5)
    tokens = []
    for token in generation:
        tokens.append(token)
        session.clock.sleep_s(10.0)

    assert layers(tokens) == [4] * 5
    assert generation.summary.dsr == 1.0
    assert generation.summary.tpot_s == pytest.approx(0.044)


def test_words_end_at_a_stop_string_across_tokens(fakes: Any) -> None:
    generation = fakes.session(b"one<end>two").generate("a", stop=["<end>"])
    text = "".join(t.text for t in generation)

    assert text == generation.summary.text == "one"
    assert generation.summary.finish == "stop_text"


@pytest.mark.parametrize(
    ("answers", "options", "finish", "text"),
    [
        ([104, 105, 256], {}, "stop_token", "hi"),
        ([104], {"max_tokens": 3}, "length", "hhh"),
        ([104], {}, "context", "h" * 9),
        ([0xF0, 0x9F], {"max_tokens": 2}, "length", "\N{REPLACEMENT CHARACTER}"),
    ],
    ids=["its own end", "enough tokens", "a full context", "half a character"],
)
def test_a_text_says_why_it_ended(
    fakes: Any, answers: list[int], options: dict[str, Any], finish: str, text: str
) -> None:
    generation = fakes.session(answers, context=16).generate("12345678", **options)
    tokens = list(generation)

    assert (tokens[-1].finish, generation.summary.finish) == (finish, finish)
    assert generation.summary.text == text
    assert [t.finish for t in tokens[:-1]] == [None] * (len(tokens) - 1)


def cache_of(generation: Any) -> weakref.ref[Any]:
    return weakref.ref(generation._streams[0]._text.cache)


def test_a_reader_that_goes_away_leaves_nothing(fakes: Any) -> None:
    session = fakes.session()
    generation = session.generate("a", max_tokens=50)
    cache = cache_of(generation)
    with generation:
        next(generation)
    gc.collect()

    assert cache() is None
    assert generation.summary.finish == "closed"
    assert list(generation) == []

    forgotten = session.generate("a")
    cache = cache_of(forgotten)
    next(forgotten)
    del forgotten
    gc.collect()
    assert cache() is None


def test_an_error_ends_the_text_and_changes_no_other(fakes: Any) -> None:
    session = fakes.session()
    decoder = fakes.decoder_of(session)
    generation, other = session.generate("a", max_tokens=9), session.generate("b", max_tokens=3)
    next(generation)
    cache = cache_of(generation)
    decoder.fails_at = "layers:2-3"
    with pytest.raises(BackendError, match="out of luck"):
        next(generation)
    decoder.fails_at = None
    gc.collect()

    assert cache() is None
    assert generation.summary.finish == "error"
    assert list(generation) == []
    assert layers(list(other)) == [4, 4, 4]


def test_async_readers_get_the_same_tokens(fakes: Any) -> None:
    async def read() -> list[str]:
        generation = fakes.session(b"hello").generate("a", max_tokens=5)
        return [token.text async for token in generation]

    assert asyncio.run(read()) == list("hello")


def test_a_cancelled_reader_ends_the_text(fakes: Any) -> None:
    session = fakes.session()
    decoder = fakes.decoder_of(session)
    started, go_on = threading.Event(), threading.Event()

    def wait(_: str) -> float:
        started.set()
        go_on.wait(10)
        return 1.0

    decoder.slower = wait

    async def read() -> Any:
        generation = session.generate("a", max_tokens=50)
        task = asyncio.create_task(generation.__anext__())
        await asyncio.to_thread(started.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        return generation

    generation = asyncio.run(read())  # joins the other thread

    assert generation.summary.finish == "closed"
    assert generation._streams[0]._text is None


@pytest.mark.parametrize(
    ("prompt", "options", "said"),
    [
        ("", {}, "empty"),
        ([], {}, "empty"),
        ("x" * 200, {}, "reads at most 128"),
        ([1, 300], {}, "token ids of 0 to 299"),
        ("a", {"tpot_budget_s": 0.0}, "budget"),
        ("a", {"tpot_budget_s": [0.1, 0.2]}, "expected 1 time-per-token budgets"),
        ("a", {"max_tokens": 0}, "at least one token"),
        ("a", {"temperature": -1.0}, "temperature"),
        ("a", {"top_p": 0.0}, "top-p"),
        ("a", {"kv": "forget"}, "unknown KV policy"),
        ("a", {"window": 0}, "window"),
        ("a", {"stop": [""]}, "stop strings"),
        ("a", {"stop": [1]}, "stop strings"),
        (None, {}, "expected a prompt"),
        ([1.5], {}, "expected token ids"),
        ("a", {"tpot_budget_s": "50 ms"}, "budget in seconds"),
        ("a", {"temperature": "hot"}, "number as temperature"),
        ("a", {"top_p": None}, "number as top-p"),
        ("a", {"seed": -1}, "seed"),
        ("a", {"seed": 1.5}, "seed"),
        ("a", {"on_infeasible": "perhaps"}, "unknown outcome"),
    ],
    ids=str,
)
def test_bad_requests_are_refused_before_anything_runs(
    fakes: Any, prompt: Any, options: dict[str, Any], said: str
) -> None:
    session = fakes.session()

    with pytest.raises(ConfigError, match=said):
        session.generate(prompt, **options)
    assert fakes.decoder_of(session).ran == []


def test_the_same_seed_draws_the_same_tokens(fakes: Any) -> None:
    def draw(seed: int) -> tuple[int, ...]:
        generation = fakes.session().generate(
            "a", temperature=4.0, top_p=0.9, seed=seed, max_tokens=12
        )
        list(generation)
        ids: tuple[int, ...] = generation.summary.token_ids
        return ids

    assert draw(1) == draw(1) != draw(2)


def test_policies_of_requests_decide_for_tokens_as_well(fakes: Any) -> None:
    tokens = list(
        fakes.session(policy="fixed", exit_index=2).generate("a", tpot_budget_s=1.0, max_tokens=3)
    )

    assert layers(tokens) == [3, 3, 3]
    assert tokens[0].reason == "exit 2 was asked for"


def test_exact_drafts_as_much_as_the_budget_allows_and_answers_at_full_depth(fakes: Any) -> None:
    session = fakes.session(exit_layers=(1,))
    decoder = fakes.decoder_of(session)
    free = list(session.generate("a", max_tokens=30, exact=True))
    drafted = max(rows for _, rows in decoder.ran)
    decoder.ran.clear()
    # A token at full depth takes 44 ms; with one draft to verify 67 ms.
    budgets = {"ttft_budget_s": 0.046, "tpot_budget_s": 0.046}
    tight = list(session.generate("a", max_tokens=9, exact=True, **budgets))

    assert drafted > 1
    assert layers(free) == [4] * 30
    assert sum(t.observed_s for t in free) < 30 * NEEDS_S[-1]
    assert {rows for _, rows in decoder.ran} == {1}
    assert [t.met for t in tight[1:]] == [True] * 8
    assert [t.predicted_s for t in tight[1:]] == pytest.approx([NEEDS_S[-1]] * 8)
