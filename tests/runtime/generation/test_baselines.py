"""Each way to the next token goes as deep as its rule says, at the fake's costs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from edgewise.backends.decoder.base import load_decoder
from edgewise.errors import BackendError, ConfigError
from edgewise.exits.shift import ShiftPredictor
from edgewise.predict import CostTable
from edgewise.runtime.generation import LanguageCosts, LanguageSession
from edgewise.runtime.generation.baselines import BASELINES, make_baseline
from edgewise.runtime.generation.baselines.confident import (
    cosine,
    decaying_threshold,
    probability_gap,
)


def predictor(bias: float, *, scheduled: tuple[int, ...] = (2,)) -> ShiftPredictor:
    """Proposes to leave always, or never, whatever it sees."""
    layers = (2, 3)
    return ShiftPredictor(
        first=dict.fromkeys(layers, np.zeros((12, 1), dtype=np.float32)),
        first_bias=dict.fromkeys(layers, np.zeros(1, dtype=np.float32)),
        second=dict.fromkeys(layers, np.zeros(1, dtype=np.float32)),
        second_bias=dict.fromkeys(layers, bias),
        draft_layer=1,
        scheduled=scheduled,
    )


ALWAYS, NEVER = predictor(9.0), predictor(-9.0)


# The fake answers with one token, at a probability of 0.964. A layer takes 10 ms, a head 4, filling
# 1; at its exits a token takes 15, 25, 35 and 44 ms.
@pytest.mark.parametrize(
    ("name", "options", "budget_s", "layer"),
    [
        pytest.param("full-depth", {}, 0.020, 4, id="full depth, late"),
        pytest.param("fixed-exit", {"layer": 2}, None, 2, id="fixed exit"),
        pytest.param("fixed-exit", {"layer": 4}, None, 4, id="fixed exit, the last"),
        pytest.param("layer-wise", {"threshold": 0.9}, None, 1, id="layer-wise, sure at once"),
        pytest.param("layer-wise", {"threshold": 0.99}, None, 4, id="layer-wise, never sure"),
        # Heads are tried at 14, 28 and 42 ms.
        pytest.param("layer-wise", {"threshold": 0.99}, 0.030, 3, id="layer-wise, time is up"),
        pytest.param("calm", {"threshold": 0.9}, None, 1, id="CALM, sure at once"),
        pytest.param("calm", {"threshold": 0.99}, None, 4, id="CALM, never sure"),
        pytest.param("calm", {"measure": "hidden"}, None, 2, id="CALM, states in line"),
        pytest.param("layerskip", {"layer": 1, "drafts": 3}, 0.020, 4, id="LayerSkip"),
        pytest.param("specee", {"predictor": ALWAYS}, None, 2, id="SpecEE, always proposes"),
        pytest.param("specee", {"predictor": NEVER}, None, 4, id="SpecEE, never proposes"),
        pytest.param("speculation", {}, 0.020, 4, id="speculation, late"),
        pytest.param("edgewise", {}, 0.036, 3, id="edgewise"),
        pytest.param("edgewise+speculation", {}, 0.036, 3, id="speculation does not fit"),
        pytest.param("edgewise+speculation", {}, 0.060, 4, id="speculation fits"),
        pytest.param("edgewise+psf", {"predictor": ALWAYS}, 9.0, 2, id="PSF, always proposes"),
        # The candidates' head costs 4 ms, so that the third exit fits no longer.
        pytest.param("edgewise+psf", {"predictor": NEVER}, 0.036, 2, id="PSF, never proposes"),
        pytest.param("edgewise+psf", {"predictor": NEVER}, 0.016, 1, id="PSF, no time"),
    ],
)
def test_tokens_go_as_deep_as_the_rule_says(
    fakes: Any, name: str, options: dict[str, Any], budget_s: float | None, layer: int
) -> None:
    generation = fakes.session().generate(
        "ab", tpot_budget_s=budget_s, max_tokens=12, stepper=make_baseline(name, **options)
    )
    tokens = list(generation)

    assert [t.id for t in tokens] == [97] * 12
    # The first has no budget here, and more may have come along with it.
    assert {t.exit_layer for t in tokens[-2:]} == {layer}


@pytest.mark.parametrize(
    ("name", "options", "units"),
    [
        pytest.param(
            "layer-wise",
            {"threshold": 0.99},
            [
                "layers:0-1",
                "head",
                "layers:1-2",
                "head",
                "layers:2-3",
                "head",
                "layers:3-4",
                "head",
            ],
            id="every head",
        ),
        pytest.param(
            "calm",
            {"measure": "hidden"},
            ["layers:0-1", "layers:1-2", "head", "fill:2"],
            id="a head only where it leaves",
        ),
        pytest.param(
            "specee",
            {"predictor": ALWAYS},
            ["layers:0-1", "head", "layers:1-2", "head", "fill:2"],
            id="the candidates' head and the answer's",
        ),
        pytest.param(
            "specee",
            {"predictor": NEVER},
            ["layers:0-1", "head", "layers:1-2", "layers:2-3", "layers:3-4", "head"],
            id="no head where nothing is proposed",
        ),
    ],
)
def test_only_what_the_rule_needs_is_run(
    fakes: Any, name: str, options: dict[str, Any], units: list[str]
) -> None:
    session = fakes.session()
    list(session.generate("a", max_tokens=1, stepper=make_baseline(name, **options)))

    assert [unit for unit, _ in fakes.decoder_of(session).ran] == units


def test_an_answer_that_is_no_candidate_does_not_end_a_token(fakes: Any) -> None:
    # At the draft exit 97 leads and 0, 1 and 2 tie behind it or their like; then 250, and at the
    # end 98.
    session = fakes.session([97, 250, 98])
    generation = session.generate(
        "a", max_tokens=1, stepper=make_baseline("specee", predictor=ALWAYS)
    )

    assert [(t.id, t.exit_layer) for t in generation] == [(98, 4)]


def test_verifying_from_the_start_costs_the_early_layers_again(fakes: Any) -> None:
    def spent_s(name: str, **options: Any) -> float:
        session = fakes.session(exit_layers=(2,))
        list(session.generate("a", max_tokens=30, stepper=make_baseline(name, **options)))
        return float(fakes.decoder_of(session).clock.now_s())

    assert spent_s("speculation") < spent_s("layerskip", layer=2, drafts=4)


def test_what_fails_on_the_way_leaves_the_text_as_it_was(fakes: Any) -> None:
    session = fakes.session()
    fakes.decoder_of(session).fails_at = "fill:2"
    texts: list[Any] = []

    def make(inputs: Any) -> Any:
        texts.append(inputs.text)
        return make_baseline("calm", measure="hidden")(inputs)

    with pytest.raises(BackendError):
        list(session.generate("abc", max_tokens=3, stepper=make))

    assert texts[0].length == 2
    assert not texts[0].cache.present[:, 2:].any()


@pytest.fixture(scope="module")
def tiny(language: Any) -> Callable[[], tuple[Any, LanguageSession]]:
    @functools.cache
    def make() -> tuple[Any, LanguageSession]:
        source = language.transformers_model("llama", tie_word_embeddings=False)
        decoder = load_decoder(language.language_model(source), exit_layers=(1, 2, 3))
        costs = LanguageCosts.same(CostTable.from_costs([1e-3] * 4, [1e-3] * 4))
        return source, LanguageSession(decoder, costs, head="raw")

    return make


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("full-depth", {}),
        ("layer-wise", {"threshold": 1.0}),
        ("calm", {"threshold": 1.0, "decay": 0.0}),
        ("layerskip", {"layer": 2, "drafts": 3}),
        ("specee", {"predictor": NEVER}),
        ("speculation", {}),
        ("edgewise", {}),
        ("edgewise+speculation", {}),
        ("edgewise+psf", {"predictor": NEVER}),
    ],
)
def test_whoever_runs_at_full_depth_says_what_transformers_says(
    language: Any, tiny: Any, name: str, options: dict[str, Any]
) -> None:
    source, session = tiny()
    prompt = [5, 17, 3, 99, 42, 7]
    found = session.generate(prompt, max_tokens=16, stepper=make_baseline(name, **options))

    assert [t.id for t in found] == language.generated(source, prompt, 16)


def test_confidence_by_hand() -> None:
    logits = np.log(np.array([0.1, 0.6, 0.3], dtype=np.float32))

    assert probability_gap(logits) == pytest.approx(0.3, abs=1e-6)
    assert cosine(np.array([[3.0, 4.0]]), np.array([[4.0, 3.0]])) == pytest.approx(0.96)
    assert cosine(np.zeros((1, 2)), np.ones((1, 2))) == 0.0


def test_the_threshold_falls_from_strict_to_nine_tenths() -> None:
    values = [decaying_threshold(0.5, t, decay=4.0, tokens=10) for t in range(200)]

    assert values[0] == pytest.approx(0.55)
    assert values[-1] == pytest.approx(0.45)
    assert values == sorted(values, reverse=True)
    assert decaying_threshold(1.0, 0, decay=4.0, tokens=10) == 1.0


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fixed-exit", {"layer": 7}),
        ("fixed-exit", {}),
        ("layer-wise", {"threshold": 1.5}),
        ("calm", {"measure": "entropy"}),
        ("calm", {"tokens": 0}),
        ("layerskip", {"layer": 4}),
        ("layerskip", {"layer": 1, "drafts": 99}),
        ("specee", {}),
        ("specee", {"predictor": ALWAYS, "threshold": -1.0}),
        ("edgewise+speculation", {"margin_ratio": 1.5}),
        ("full-depth", {"depth": 3}),
    ],
)
def test_options_that_cannot_be_are_refused(fakes: Any, name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        fakes.session().generate("a", stepper=make_baseline(name, **options))


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        make_baseline("edgewize")

    assert "edgewise" in str(caught.value.help)
    assert set(BASELINES) >= {"full-depth", "edgewise", "edgewise+speculation", "edgewise+psf"}
