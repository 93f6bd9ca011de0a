from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgewise.backends.decoder.base import DecoderProgram, load_decoder
from edgewise.bench.language_play import LanguageRow
from edgewise.errors import ConfigError, DataError
from edgewise.model.decoding import AffineExit, LanguageExits
from edgewise.reproduce import Setup, Verdict, run_claim
from edgewise.reproduce import _language as lm
from edgewise.reproduce import uniexit_fig6 as fig6
from edgewise.reproduce import uniexit_fig8 as fig8
from edgewise.reproduce import uniexit_fig10 as fig10
from edgewise.reproduce.uniexit_fig9 import ExitTimes
from edgewise.reproduce.uniexit_table6 import smollm2_figures
from edgewise.training.shift_predictor import ShiftSettings

QUICK = Setup(quick=True)
ROW = LanguageRow(
    name="x",
    budget_s=0.1,
    texts=1,
    tokens=100,
    dsr=0.5,
    relative_accuracy=0.2,
    agreement=0.5,
    identical=0.0,
    first_divergence=3.0,
    perplexity=5.0,
    mean_depth_ratio=0.5,
    tpot_p50_s=0.1,
    tpot_p99_s=0.2,
    depths={8: 100},
)


@pytest.fixture(scope="module")
def decoder(language: Any) -> DecoderProgram:
    """Eight layers with exits that change little, so that texts differ a little."""
    model = language.tiny(layers=8)
    width = model.architecture.hidden_size
    affine = {
        k: AffineExit(
            layer=k,
            weight=np.eye(width, dtype=np.float32),
            bias=np.zeros(width, dtype=np.float32),
            agreement=k / 9,
        )
        for k in (1, 3, 5, 7)
    }
    exits = LanguageExits(
        model=model.name, digest=model.digest, affine=affine, shortlist=np.arange(80)
    )
    return load_decoder(model, "torch:cpu", exit_layers=(1, 3, 5, 7), exits=exits)


@pytest.fixture(scope="module")
def case(decoder: DecoderProgram) -> lm.LanguageCase:
    rng = np.random.default_rng(0)
    size = decoder.model.architecture.vocab_size
    shift, note = lm.train_shift(
        decoder,
        [rng.integers(0, size, 40) for _ in range(2)],
        settings=ShiftSettings(steps=5, hidden=4),
    )
    prompts = tuple(tuple(int(t) for t in rng.integers(0, size, 5)) for _ in range(2))
    return lm.LanguageCase(
        decoder=decoder, prompts=prompts, max_tokens=12, shift=shift, notes=(note,)
    )


def player(case: lm.LanguageCase, clocks: Any = "static", budget_s: float = 0.07) -> Any:
    return lm.LanguagePlayer(
        case, lm.Board(name="jetson-orin-nano", clocks=clocks, budget_s=budget_s)
    )


def test_full_depth_of_the_stand_in_takes_what_the_paper_says(case: lm.LanguageCase) -> None:
    # The device was fitted to the paper's 70 ms.
    assert player(case).full_depth_s() == pytest.approx(0.070, rel=0.01)


def test_full_depth_on_the_trace_takes_as_long_as_its_tokens(case: lm.LanguageCase) -> None:
    assert player(case, "dvfs").mean_full_depth_s() > 1.3 * player(case).mean_full_depth_s()


def test_the_static_figure_has_every_way_and_full_depth_as_its_own_reference(
    case: lm.LanguageCase,
) -> None:
    found = fig6.reproduce(case, QUICK)

    (rows,) = found.details.values()
    assert list(rows) == list(lm.ways("static"))
    assert rows["full depth"]["row"]["relative_accuracy"] == 1.0
    assert rows["layerskip"]["row"]["relative_accuracy"] == 1.0  # verified, so the same text
    assert {f.provenance for f in found.figures} == {"simulated"}
    assert len(found.charts) == 1
    assert rows["edgewise"]["row"]["dsr"] >= rows["full depth"]["row"]["dsr"]


def test_the_dynamic_figure_names_the_papers_numbers(case: lm.LanguageCase) -> None:
    found = fig8.reproduce(case, QUICK)

    assert [f.paper for f in found.figures if f.unit == "%" and f.paper] == [97.41, 92.82]
    (rows,) = found.details.values()
    assert list(rows) == list(lm.ways("dvfs"))
    assert rows["full depth"]["row"]["dsr"] < 1.0


def test_texts_of_ways_without_a_deadline_are_computed_once(case: lm.LanguageCase) -> None:
    way = lm.ways("static")["calm"]
    first = player(case).play(way)
    known = {key: list(texts) for key, texts in case.recorded.items()}
    again = player(case, "dvfs", 0.118).play(way)

    assert {key: list(texts) for key, texts in case.recorded.items()} == known
    assert [each.text.ids for each in again] == [each.text.ids for each in first]
    assert again[0].text.tokens[-1].observed_s != first[0].text.tokens[-1].observed_s


def test_a_deadline_below_the_first_exit_is_feasible_for_no_token(case: lm.LanguageCase) -> None:
    rows = player(case, budget_s=0.001).compare([lm.ways("static")["edgewise"]])

    assert rows["edgewise"].feasible_ratio == 0.0
    assert rows["edgewise"].dsr is None
    assert rows["edgewise"].dsr_all == 0.0


def board_rows(**changes: dict[str, float]) -> dict[str, lm.BoardRow]:
    """Rivals late and inaccurate, ours in time, except for what is said."""
    kept = {"dsr": 0.99, "relative_accuracy": 0.3}
    names = {name: {"dsr": 0.6} for name in lm.ways("dvfs")}
    names |= dict.fromkeys(lm.OURS, kept) | {"uniexit": {"dsr": 0.7}}
    names |= {name.replace("_", " "): values for name, values in changes.items()}
    rows = {name: replace(ROW, **values) for name, values in names.items()}  # type: ignore[arg-type]
    return {
        name: lm.BoardRow(row=row, feasible_ratio=1.0, dsr=row.dsr) for name, row in rows.items()
    }


def held(verdicts: list[Verdict]) -> list[bool | None]:
    return [v.holds for v in verdicts]


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        pytest.param({}, [True, True, True], id="all hold"),
        pytest.param({"edgewise": {"dsr": 0.9}}, [False, True, True], id="late"),
        pytest.param(
            {"calm": {"dsr": 0.99, "relative_accuracy": 0.4}},
            [True, False, True],
            id="a rival as timely is more accurate",
        ),
        pytest.param({"specee": {"dsr": 0.8}}, [True, True, False], id="specee keeps more"),
    ],
)
def test_each_verdict_of_the_static_figure_can_fail_alone(
    changes: dict[str, dict[str, float]], wanted: list[bool]
) -> None:
    assert held(fig6.judge("board", board_rows(**changes))) == wanted


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        pytest.param({}, [True, True, True, True], id="all hold"),
        pytest.param({"edgewise": {"dsr": 0.9}}, [False, True, True, True], id="late"),
        pytest.param(
            {"layerskip": {"dsr": 1.0}}, [True, False, True, True], id="a static way is in time"
        ),
        pytest.param({"uniexit": {"dsr": 0.5}}, [True, True, False, True], id="fallback hurts"),
        pytest.param(
            {"calm": {"dsr": 0.99, "relative_accuracy": 0.4}},
            [True, True, True, False],
            id="a rival as timely is more accurate",
        ),
    ],
)
def test_each_verdict_of_the_dynamic_figure_can_fail_alone(
    changes: dict[str, dict[str, float]], wanted: list[bool]
) -> None:
    assert held(fig8.judge("board", board_rows(**changes))) == wanted


def test_ours_that_keep_too_few_win_nothing() -> None:
    rows = board_rows(**{name.replace(" ", "_"): {"dsr": 0.5} for name in lm.OURS})

    assert lm.accuracy_verdict("board", rows, least=0.98).holds is False


def test_the_exit_figure_measures_and_generates(
    decoder: DecoderProgram, case: lm.LanguageCase
) -> None:
    found = fig10.reproduce(
        decoder, case.prompts, QUICK, max_tokens=6, rounds=2, source="made-up text"
    )

    assert {f.provenance for f in found.figures} == {"simulated", "measured"}
    assert [f.paper for f in found.figures if f.paper] == [2.0]
    assert found.details["relative_accuracy"]["affine"][-1] == 1.0
    assert len(found.charts) == 3


def test_the_simulated_device_advances_as_the_papers_board_does() -> None:
    times = fig10.simulated_times()

    assert times.chosen_s[0, -1] == pytest.approx(0.070, rel=0.01)
    assert times.every_s[0, 0] == times.chosen_s[0, 0]
    assert 1.8 < times.advance()[0] < 2.5


def test_an_exit_of_full_depth_says_what_full_depth_says(
    decoder: DecoderProgram, case: lm.LanguageCase
) -> None:
    last = len(decoder.exit_layers)

    found = fig10.continue_at(decoder, case.prompts[0], last, 12)

    (played,) = [
        each.text for each in player(case).play(lm.ways("static")["full depth"])
    ]  # the first prompt only warms up
    assert len(found) == 12
    assert fig10.continue_at(decoder, case.prompts[1], last, 12) == list(played.ids)


def test_each_verdict_of_the_exit_figure_can_fail() -> None:
    slow = ExitTimes(
        every_s=np.array([[1.0, 2.0]] * 3),
        chosen_s=np.array([[1.0, 2.1]] * 3),
        fused_s=np.array([[1.0, 2.1]] * 3),
    )
    quick = replace(slow, chosen_s=np.array([[1.0, 1.0]] * 3))
    good, bad = {"affine": [0.5, 1.0], "raw": [0.1, 1.0]}, {"affine": [0.1, 1.0], "raw": [0.5, 1.0]}

    assert held(list(fig10.judge("a", "b", quick, quick, good))) == [True] * 5
    assert held(list(fig10.judge("a", "b", slow, quick, bad))) == [False, False, True, True, False]


def test_a_chosen_head_adds_nothing_and_a_short_list_little() -> None:
    figures, verdict = smollm2_figures()
    ours = {f.name: f.ours for f in figures}

    # Counted by hand: a layer is 3,538,944 weights, a head 28,311,552.
    whole = 30 * 3_538_944 + 28_311_552
    assert ours["smollm2-135m, every head: raw heads, 30 exits"] == pytest.approx(
        100 * (whole + 29 * 28_311_552) / whole, abs=0.05
    )
    assert ours["smollm2-135m, every head: heads of 8192 tokens, 10 exits"] == pytest.approx(
        100 * (whole + 9 * 576 * (576 + 8192)) / whole, abs=0.05
    )
    assert ours["smollm2-135m, chosen head alone: after 30 of 30 layers"] == 100.0
    assert verdict.holds is True


def test_a_model_without_fitted_exits_is_told_how_to_get_them(
    language: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    with pytest.raises(ConfigError, match="at least three fitted exits") as caught:
        lm.load_with_exits(language.tiny(layers=8), "tiny", QUICK)

    assert "edgewise fit-exits tiny --layers" in str(caught.value.help)


def test_a_model_that_is_not_here_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        run_claim("uniexit-fig8", Setup(models=(str(tmp_path / "none"),)))


def test_prompts_are_of_text_that_no_exit_was_fitted_on(language: Any, tmp_path: Path) -> None:
    class Letters:
        stop_ids = frozenset[int]()

        def encode(self, text: str) -> list[int]:
            return [min(ord(c), 159) for c in text]

    model = language.language_model(language.transformers_model(layers=4), tokenizer=Letters())
    path = tmp_path / "text.txt"
    path.write_text("a" * 256 * 9 + "b" * 256)
    held_in, prompts, name = lm._texts(model, str(path), count=3)

    assert prompts == (tuple([ord("b")] * 32),)
    assert {int(t) for window in held_in for t in window} == {ord("a")}
    assert name == "text.txt"
    path.write_text("a" * 300)
    with pytest.raises(ConfigError, match="at least two windows"):
        lm._texts(model, str(path), count=1)
    with pytest.raises(DataError, match="there is no file"):
        lm._texts(model, str(tmp_path / "other"), count=1)
