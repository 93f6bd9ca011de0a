"""The predictor learns what can be learnt from shifts, and says how well it does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgewise.backends.decoder import DecoderProgram, load_decoder
from edgewise.errors import ConfigError, DataError
from edgewise.exits.shift import shift_features
from edgewise.runtime.generation.shift import Shift, candidate_logits
from edgewise.training.shift_predictor import (
    FittedShift,
    ShiftSamples,
    ShiftSettings,
    collect_shift_samples,
    fit_shift_predictor,
)

QUICK = ShiftSettings(hidden=8, steps=120)


def samples(count: int = 1000) -> ShiftSamples:
    """The best candidate is right exactly where it leads by more than 1; leads grow with depth."""
    rng = np.random.default_rng(0)
    start = rng.normal(0, 0.5, (count, 4))
    logits = np.stack([start * scale for scale in (1.0, 2.0, 4.0)]).astype(np.float32)
    top = np.sort(logits[1], axis=1)
    answer = np.where(top[:, 3] - top[:, 2] > 1.0, logits[1].argmax(axis=1), -1)
    return ShiftSamples(draft_layer=1, layers=(2, 3, 4), logits=logits, answer=answer)


@pytest.fixture(scope="module")
def fitted() -> FittedShift:
    pytest.importorskip("torch", reason="torch is not installed")
    return fit_shift_predictor(samples(), settings=QUICK)


def test_what_can_be_learnt_is_learnt(fitted: FittedShift) -> None:
    for score in fitted.scores:
        assert score.precision is not None
        # A third is right; a guess would be right as often, and this few samples leave the sharp
        # boundary blurred.
        assert score.precision > 0.8
        assert 0.5 * score.base < score.proposed < 1.3 * score.base


def test_layers_where_tokens_leave_are_scheduled(fitted: FittedShift) -> None:
    early = fitted.exits[2]

    # What shows at the first layer shows there: little is left for those behind it.
    assert fitted.predictor.scheduled[0] == 2
    assert early > 0.8 * sum(fitted.exits.values()) > 0
    assert fitted.predictor.layers == (2, 3, 4)
    assert fitted.tokens == 200


def test_the_plain_network_says_what_was_trained(fitted: FittedShift) -> None:
    given = samples()
    held = given.logits[0][-200:]
    chances = [fitted.predictor.chance(2, shift_features(row, None)[0]) for row in held]

    assert np.mean(np.array(chances) > 0.5) == pytest.approx(fitted.scores[0].proposed)


def test_the_same_seed_gives_the_same_network(fitted: FittedShift) -> None:
    again = fit_shift_predictor(samples(), settings=QUICK)

    assert (again.predictor.first[3] == fitted.predictor.first[3]).all()


@pytest.fixture(scope="module")
def program(language: Any) -> DecoderProgram:
    return load_decoder(language.tiny(layers=5), "torch:cpu", exit_layers=[1, 2, 3, 4])


def test_samples_are_the_heads_own_logits_of_the_draft_exits_best(program: DecoderProgram) -> None:
    window = np.random.default_rng(0).integers(0, 160, 24)
    found = collect_shift_samples(program, [window, window[:7]], position=1, kind="raw")
    cells = program.new_cache(24)
    states = program.embed(window)
    logits = {}
    for p in range(1, 6):
        states = program.run_layers(states, cells, start=p - 1, stop=p, first=0)
        logits[p] = program.logits(states, position=p, kind="raw")
        if p == 3:
            third = states
    chosen = np.argsort(-logits[1], axis=1)[:, :4]

    assert found.draft_layer == 1
    assert found.layers == (2, 3, 4)
    assert found.logits.shape == (3, 31, 4)
    wanted = np.take_along_axis(logits[3], chosen, axis=1)
    np.testing.assert_allclose(found.logits[1, :24], wanted, rtol=0, atol=2e-4)
    full = logits[5].argmax(axis=1)
    for i in range(24):
        assert found.answer[i] == (list(chosen[i]).index(full[i]) if full[i] in chosen[i] else -1)
    one = candidate_logits(program, third[4], chosen[4], position=3)
    np.testing.assert_allclose(one, wanted[4], rtol=0, atol=2e-4)


def test_a_token_is_watched_from_layer_to_layer(
    program: DecoderProgram, fitted: FittedShift
) -> None:
    state = np.random.default_rng(1).normal(size=64).astype(np.float32)
    candidates = np.array([3, 1, 4, 15])
    shift = Shift(program, fitted.predictor, candidates)
    first = shift.chance(state, position=2)
    second = shift.chance(2 * state + 1, position=3)

    l_2 = candidate_logits(program, state, candidates, position=2)
    l_3 = candidate_logits(program, 2 * state + 1, candidates, position=3)
    f_2, q = shift_features(l_2, None)
    assert first == fitted.predictor.chance(2, f_2)
    assert second == fitted.predictor.chance(3, shift_features(l_3, q)[0])
    assert shift.holds(4)
    assert not shift.holds(5)


def test_what_cannot_be_trained_on_is_refused(program: DecoderProgram) -> None:
    with pytest.raises(ConfigError):
        ShiftSettings(hidden=0)
    with pytest.raises(ConfigError):
        ShiftSettings(share=0.0)
    with pytest.raises(ConfigError, match="draft exit"):
        collect_shift_samples(program, [np.arange(4)], position=4)
    with pytest.raises(DataError):
        collect_shift_samples(program, [], position=1)
    with pytest.raises(DataError):
        fit_shift_predictor(samples(2))
