from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgewise.backends.decoder.base import DecoderProgram, load_decoder
from edgewise.bench.language_play import Way, play
from edgewise.bench.simulated_decoder import (
    DecoderWork,
    SimulatedDecoder,
    call_name,
    choose_exits,
    of_rows,
    play_recorded,
    profiled_costs,
    retime,
    stands_for,
)
from edgewise.device.simulated import (
    SimulatedClock,
    SimulatedDevice,
    StepTrace,
    down_up,
    load_device,
    load_work,
    static_max,
)
from edgewise.errors import BackendError, ConfigError
from edgewise.model.decoding import AffineExit, LanguageExits
from edgewise.runtime.generation.baselines import make_baseline
from edgewise.runtime.generation.session import LanguageSession

ORIN = load_device("jetson-orin-nano")
LLAMA = load_work("llama-3.2-1b")
PLACES = (4, 8, 12, 16)
WORK = DecoderWork.of(LLAMA, PLACES, short_share=0.25)
TOP = np.array([[1.0, 1.0, 1.0, 0.0, 0.0]])
PROMPT = [3, 1, 4, 1, 5, 9]


@pytest.fixture(scope="module")
def decoder(language: Any) -> DecoderProgram:
    model = language.tiny(layers=4)
    rng = np.random.default_rng(0)
    width = model.architecture.hidden_size
    affine = {
        k: AffineExit(
            layer=k,
            weight=(np.eye(width) + 0.1 * rng.standard_normal((width, width))).astype(np.float32),
            bias=np.zeros(width, dtype=np.float32),
            agreement=k / 5,
        )
        for k in (1, 2, 3)
    }
    exits = LanguageExits(
        model=model.name, digest=model.digest, affine=affine, shortlist=np.arange(40)
    )
    return load_decoder(model, "torch:cpu", exit_layers=(1, 2, 3), exits=exits)


def opened(
    decoder: DecoderProgram, trace: StepTrace | None = None, *, seed: int = 0
) -> tuple[SimulatedDecoder, SimulatedDevice, SimulatedClock]:
    clock = SimulatedClock()
    device = SimulatedDevice(ORIN, trace or static_max(ORIN.clocks), WORK.calls, seed=seed)
    return SimulatedDecoder(decoder, device, clock), device, clock


def session(decoder: SimulatedDecoder, clock: SimulatedClock, **options: Any) -> LanguageSession:
    costs, rows = profiled_costs(ORIN, WORK, head="affine")
    return LanguageSession(decoder, costs, rows=rows, clock=clock, **options)


def test_exits_of_one_place_or_none_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"for \[1, 1, 16\]"):
        stands_for((1, 2, 30), layers=16)
    with pytest.raises(ConfigError, match="expected exits"):
        stands_for((1, 60), layers=16)


def test_chosen_exits_can_always_be_told_apart() -> None:
    chosen = choose_exits(range(1, 40), depth=40, layers=16)

    assert stands_for(chosen, layers=16) == tuple(range(1, 17))


def test_grouped_work_is_the_models_own() -> None:
    whole = [*LLAMA[:16], LLAMA[-1]]

    assert WORK.full_depth_s(ORIN, TOP)[0] == pytest.approx(ORIN.costs_s(whole, TOP).sum())
    assert len(WORK.of_token("affine", fills=True)) == 2 * len(PLACES)


def test_work_that_leaves_layers_out_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected 16 layers"):
        DecoderWork.of(LLAMA, (4, 8))


def test_a_short_list_is_cheaper_and_a_map_dearer_than_the_head() -> None:
    short, raw, mapped = (
        ORIN.costs_s(WORK.of_token(head, fills=False)[4:5], TOP)[0, 0]
        for head in ("shortlist", "raw", "affine")
    )

    assert short < raw < mapped


def test_rows_in_one_pass_cost_more_arithmetic_and_no_more_traffic() -> None:
    one, many = (ORIN.costs_s([of_rows(WORK.head, r)], TOP)[0, 0] for r in (1, 256))
    launch, arithmetic, traffic = ORIN.top_terms_s([WORK.head])[0]

    assert many - one == pytest.approx(255 * arithmetic)
    assert many >= launch + max(256 * arithmetic, traffic)


def test_rows_between_known_numbers_are_priced_as_the_next() -> None:
    assert call_name("head", 9) == call_name("head", 16)
    with pytest.raises(ConfigError, match="at most 256 rows"):
        call_name("head", 257)


def test_it_computes_what_the_decoder_computes(decoder: DecoderProgram) -> None:
    simulated, _, _ = opened(decoder)
    found = []
    for each in (decoder, simulated):
        cache = each.new_cache(8)
        state = each.run_layers(each.embed(PROMPT), cache, start=0, stop=2, first=0)
        each.fill(state, cache, start=2, first=0)
        found.append(
            [
                state,
                cache.keys.copy(),
                *(each.logits(state, position=2, kind=k) for k in ("raw", "affine", "shortlist")),
            ]
        )

    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_clock_moves_by_what_the_device_says(decoder: DecoderProgram) -> None:
    simulated, device, clock = opened(decoder, down_up(ORIN.clocks))
    cache = simulated.new_cache(4)
    state = simulated.run_layers(simulated.embed([1]), cache, start=0, stop=2, first=0)
    simulated.logits(state, position=2)
    simulated.fill(state, cache, start=2, first=0)

    at_s = 0.0
    for unit in ("stage:0", "stage:1", "mapped_head", "fill:1"):
        at_s += device.cost_s(call_name(unit, 1), at_s, request=0)
    assert clock.now_s() == pytest.approx(at_s, rel=1e-12)
    assert [name for name, _ in simulated.calls] == [
        call_name(unit, 1) for unit in ("stage:0", "stage:1", "mapped_head", "fill:1")
    ]


def test_a_look_at_a_state_takes_time(decoder: DecoderProgram) -> None:
    simulated, _, clock = opened(decoder)

    simulated.normed(simulated.embed([1])[0])

    assert 0 < clock.now_s() < WORK.full_depth_s(ORIN, TOP)[0] / 10


def test_a_map_is_needed_before_a_short_list(language: Any) -> None:
    model = language.tiny(layers=4)
    exits = LanguageExits(model=model.name, digest=model.digest, affine={}, shortlist=np.arange(4))
    bare = load_decoder(model, "torch:cpu", exit_layers=(1, 2, 3), exits=exits)
    simulated, _, _ = opened(bare)
    state = simulated.embed([1])

    with pytest.raises(BackendError, match="fitted map before a short list"):
        simulated.logits(state, position=1, kind="shortlist")


def test_predicted_costs_are_what_tokens_take_without_noise(decoder: DecoderProgram) -> None:
    simulated, _, clock = opened(decoder)
    way = Way(name="full", stepper=make_baseline("full-depth"))
    text = play(session(simulated, clock), PROMPT, way, budget_s=0.1, max_tokens=12)

    whole_s = WORK.full_depth_s(ORIN, TOP)[0]
    later = [t.observed_s for t in text.tokens if t.index]
    assert np.median(later) == pytest.approx(whole_s, rel=0.02)  # noise has a sigma of 0.9 %
    assert all(t.predicted_s == pytest.approx(whole_s, rel=0.02) for t in text.tokens)


@pytest.mark.parametrize("name", ["full-depth", "calm", "layerskip"])
def test_a_recorded_text_is_timed_as_if_it_were_played(decoder: DecoderProgram, name: str) -> None:
    options = {"layer": 2, "drafts": 2} if name == "layerskip" else {}
    way = Way(name=name, stepper=make_baseline(name, **options))
    dvfs = down_up(ORIN.clocks)
    simulated, _, clock = opened(decoder)
    recorded = play_recorded(session(simulated, clock), simulated, PROMPT, way, max_tokens=10)
    elsewhere, device, clock = opened(decoder, dvfs, seed=3)
    played = play(session(elsewhere, clock), PROMPT, way, budget_s=0.1, max_tokens=10)
    again = retime(recorded, device, SimulatedClock(), budget_s=0.1)

    assert again.ids == played.ids
    assert [t.observed_s for t in again.tokens] == pytest.approx(
        [t.observed_s for t in played.tokens]
    )
    assert [t.met for t in again.tokens[1:]] == [t.met for t in played.tokens[1:]]
