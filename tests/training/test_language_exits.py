"""The whole job on tiny models: exits that can be stopped, resumed and trusted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("torch", reason="torch is not installed")

from edgewise.backends.decoder import load_decoder
from edgewise.errors import ConfigError, DataError, EdgeError
from edgewise.model.decoding import LanguageExits
from edgewise.model.language import LanguageModel
from edgewise.training.language_exits import (
    FitExitsSettings,
    FittedExits,
    _choose,
    check_affine_layers,
    default_exit_layers,
    fit_language_exits,
    short_list,
)
from edgewise.training.language_text import TokenText
from edgewise.training.progress import Progress
from edgewise.training.work import WorkDirectory, write_file

SETTINGS = FitExitsSettings(
    layers=(1, 3), tokens=640, held_out_tokens=96, window=32, shortlist=40, save_every=3
)


def _text(seed: int, *, count: int = 1200, name: str = "a") -> TokenText:
    tokens = np.random.default_rng(seed).integers(0, 160, count)
    return TokenText(name=name, tokens=tokens)


@pytest.fixture(scope="module")
def model(language: Any) -> LanguageModel:
    found: LanguageModel = language.tiny()
    return found


@pytest.fixture(scope="module")
def fit(
    model: LanguageModel, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., FittedExits]:
    def run(*texts: TokenText, work: WorkDirectory | None = None, **options: Any) -> FittedExits:
        return fit_language_exits(
            options.pop("model", model),
            texts or (_text(1),),
            settings=replace(SETTINGS, **options.pop("settings", {})),
            work=work or WorkDirectory(tmp_path_factory.mktemp("work")),
            held_out=options.pop("held_out", (_text(2),)),
            **options,
        )

    return run


@pytest.fixture(scope="module")
def fitted(fit: Callable[..., FittedExits]) -> FittedExits:
    return fit()


def _arrays(exits: LanguageExits) -> dict[str, npt.NDArray[Any]]:
    found: dict[str, npt.NDArray[Any]] = {"shortlist": np.asarray(exits.shortlist)}
    for k, e in exits.affine.items():
        found |= {f"{k}.weight": e.weight, f"{k}.bias": e.bias}
        found[f"{k}.temperature"] = np.asarray(e.temperature)
    for k, g in exits.gates.items():
        found |= {f"{k}.gate": g.weight, f"{k}.gate bias": np.asarray(g.bias)}
    return found


def _assert_same(one: LanguageExits, other: LanguageExits) -> None:
    ours, theirs = _arrays(one), _arrays(other)
    assert list(ours) == list(theirs)
    for name, array in ours.items():
        np.testing.assert_array_equal(theirs[name], array, err_msg=name)


class Stopped(Exception):
    """As good as kill -9: nobody catches it."""


@pytest.mark.parametrize("after", [1, 4, 8, 12, 14], ids=lambda n: f"after {n} writes")
def test_a_job_that_is_killed_goes_on_to_the_same_bits(
    fit: Callable[..., FittedExits], fitted: FittedExits, tmp_path: Path, after: int
) -> None:
    left = [after]

    def write(path: Path, data: bytes) -> None:
        left[0] -= 1
        if left[0] < 0:
            path.with_name(f"{path.name}.part").write_bytes(data[: len(data) // 2])
            raise Stopped
        write_file(path, data)

    try:
        first: FittedExits | None = fit(work=WorkDirectory(tmp_path, write=write))
    except Stopped:
        first = None
    progress: list[Progress] = []

    again = fit(work=WorkDirectory(tmp_path), on_progress=progress.append)

    assert (first is None) == (after < 14), "the job has 14 writes"
    _assert_same(again.exits, fitted.exits)
    assert again.scores == fitted.scores
    assert after < 3 or progress[0].done > 0


def test_a_job_that_is_interrupted_at_any_window_goes_on_to_the_same_bits(
    fit: Callable[..., FittedExits], fitted: FittedExits, tmp_path: Path
) -> None:
    for stop in (4, 19, 24):
        calls = [0]

        def interrupt(_: Progress, calls: list[int] = calls, stop: int = stop) -> None:
            calls[0] += 1
            if calls[0] == stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fit(work=WorkDirectory(tmp_path / str(stop)), on_progress=interrupt)
        _assert_same(fit(work=WorkDirectory(tmp_path / str(stop))).exits, fitted.exits)


def test_held_out_text_changes_the_scores_and_nothing_else(
    fit: Callable[..., FittedExits], fitted: FittedExits
) -> None:
    other = fit(held_out=(_text(9),))

    _assert_same(other.exits, fitted.exits)
    assert other.scores != fitted.scores


def test_without_other_text_the_last_tenth_is_held_out(fit: Callable[..., FittedExits]) -> None:
    text = _text(1, count=32 * 20)
    changed = text.tokens.copy()
    changed[32 * 18 :] = _text(8, count=64).tokens

    one = fit(text, held_out=())
    other = fit(TokenText(name="a", tokens=changed), held_out=())

    _assert_same(one.exits, other.exits)
    assert one.scores[0].tokens == 64
    assert one.scores != other.scores


def test_the_scores_are_what_the_fitted_exits_answer(
    model: LanguageModel, fitted: FittedExits
) -> None:
    program = load_decoder(model, exit_layers=(1, 3), exits=fitted.exits)
    agree: dict[int, list[bool]] = {1: [], 2: []}
    gate: list[float] = []
    windows = _text(2).tokens[: 37 * 32].reshape(37, 32)
    for window in [windows[i * 37 // 3] for i in range(3)]:
        cache, state = program.new_cache(32), program.embed(window)
        kept = []
        for position in range(3):
            state = program.run_layers(state, cache, start=position, stop=position + 1, first=0)
            kept.append(state)
        answers = program.logits(kept[2], position=3).argmax(axis=1)
        for position in (1, 2):
            logits = program.logits(kept[position - 1], position=position)
            agree[position] += (logits.argmax(axis=1) == answers).tolist()
        gate += [program.gate(row[None], position=1) or 0.0 for row in kept[0]]

    first, second = fitted.scores[0].exits

    assert first.agreement == pytest.approx(np.mean(agree[1]))
    assert second.agreement == pytest.approx(np.mean(agree[2]))
    assert first.gate is not None
    assert first.gate.above[0].share == pytest.approx(np.mean(np.array(gate) > 0.5))
    assert fitted.exits.affine[1].agreement == first.agreement


def test_layers_that_do_nothing_are_skipped_without_loss(
    language: Any, fit: Callable[..., FittedExits]
) -> None:
    source = language.transformers_model()
    for layer in source.model.layers[2:]:
        for matrix in (layer.self_attn.o_proj, layer.mlp.down_proj):
            matrix.weight.data.zero_()
    idle = language.language_model(source)

    fitted = fit(model=idle, settings={"layers": (1, 2)})

    first, second = fitted.scores[0].exits
    assert second.agreement == 1.0
    assert first.agreement < 0.9
    np.testing.assert_allclose(
        fitted.exits.affine[2].weight, np.eye(idle.architecture.hidden_size), atol=0.02
    )


def test_several_texts_are_scored_together_and_each(fit: Callable[..., FittedExits]) -> None:
    fitted = fit(held_out=(_text(2, name="b"), _text(3, name="c")), settings={"layers": (2,)})

    both, one, other = fitted.scores
    assert [s.text for s in fitted.scores] == ["all", "b", "c"]
    assert both.tokens == one.tokens + other.tokens
    weighted = sum(s.tokens * s.exits[0].agreement for s in (one, other)) / both.tokens
    assert both.exits[0].agreement == pytest.approx(weighted)


def test_text_that_was_fitted_on_is_not_scored_on(fit: Callable[..., FittedExits]) -> None:
    text = _text(1)
    part = TokenText(name="part", tokens=text.tokens[100:400])
    mixed = TokenText(name="mixed", tokens=np.concatenate([part.tokens, _text(2).tokens[:40]]))

    with pytest.raises(DataError, match="all of the held-out text is in the text to fit on"):
        fit(text, held_out=(part,))

    assert fit(text, held_out=(mixed,)).scores[0].tokens == 32


def test_too_little_text_is_used_and_told(fit: Callable[..., FittedExits]) -> None:
    fitted = fit(_text(1, count=200))

    assert fitted.asked_tokens == 640
    assert fitted.fit_tokens + fitted.calibration_tokens == 192
    assert "a: 160 tokens, 32 more" in fitted.exits.fitted_on


def test_calibration_does_not_grow_with_the_text() -> None:
    settings = replace(SETTINGS, tokens=1600, window=2)

    windows = _choose([_text(1, count=1600)], [_text(2)], settings, vocabulary=160)

    assert len(windows.fit) + len(windows.calibrate) == 800
    assert 50 < len(windows.calibrate) <= 64


def test_less_than_two_windows_are_refused(fit: Callable[..., FittedExits]) -> None:
    with pytest.raises(DataError, match="found 40 tokens and 1200 held out"):
        fit(_text(1, count=40))


@pytest.mark.parametrize("layers", [(0,), (-1,), (4,), (1, 1), ()], ids=str)
def test_layers_that_are_no_early_exits_are_refused(
    fit: Callable[..., FittedExits], layers: tuple[int, ...]
) -> None:
    with pytest.raises(ConfigError, match="exits after 1 to 3 layers"):
        fit(settings={"layers": layers})


def test_work_of_other_settings_is_not_mixed_in(
    fit: Callable[..., FittedExits], tmp_path: Path
) -> None:
    fit(work=WorkDirectory(tmp_path), settings={"layers": (2,)})

    with pytest.raises(ConfigError, match="ridge was"):
        fit(work=WorkDirectory(tmp_path), settings={"layers": (2,), "ridge": 0.5})


def test_a_full_disk_says_what_is_kept(fit: Callable[..., FittedExits], tmp_path: Path) -> None:
    def full(path: Path, _: bytes) -> None:
        if path.suffix == ".safetensors":
            raise OSError(28, "No space left on device")
        write_file(path, _)

    with pytest.raises(EdgeError, match="the disk is full"):
        fit(work=WorkDirectory(tmp_path, write=full))


def test_the_short_list_is_the_most_frequent_tokens_and_those_that_end_an_answer(
    model: LanguageModel,
) -> None:
    class Ends:
        stop_ids = frozenset({5})

    counts = np.array([3, 9, 0, 9, 1, 0])
    ending = replace(model, tokenizer=Ends())  # type: ignore[arg-type]

    assert np.asarray(short_list(counts, model, size=4)).tolist() == [1, 3, 0, 4]
    assert np.asarray(short_list(counts, ending, size=4)).tolist() == [1, 3, 0, 5]
    assert short_list(counts, model, size=0) is None
    assert short_list(counts, model, size=6) is None


def test_the_short_list_counts_fitted_text_only(fitted: FittedExits) -> None:
    counts = np.bincount(_text(1).tokens[: 37 * 32], minlength=160)

    assert fitted.exits.shortlist is not None
    assert set(fitted.exits.shortlist) == set(np.argsort(-counts, kind="stable")[:40])


def test_default_exits_are_later_layers() -> None:
    assert default_exit_layers(30) == (6, 12, 18, 24, 27, 29)
    assert default_exit_layers(1) == ()
    check_affine_layers(default_exit_layers(16), depth=16)


@pytest.mark.parametrize(
    "wrong", [{"tokens": 0}, {"window": 1}, {"ridge": 0.0}, {"shortlist": -1}], ids=str
)
def test_settings_without_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected tokens"):
        FitExitsSettings(layers=(1,), **wrong)
