from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgewise.bench.language_widths import (
    choose,
    exit_figures,
    find_texts,
    read_texts,
    split_texts,
    width_figures,
)
from edgewise.errors import ConfigError
from edgewise.model.decoding import AffineExit, LanguageExits


class Letters:
    """A tokenizer of one token for each letter."""

    stop_ids: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        return [ord(c) % 128 for c in text]

    def decode(self, ids: Any) -> str:
        return "".join(chr(i) for i in ids)


def exits_of(model: Any, *, layer: int = 2, agreement: float = 0.25) -> LanguageExits:
    """One that answers as the raw head does."""
    width = model.architecture.hidden_size
    same = AffineExit(
        layer=layer,
        weight=np.eye(width, dtype=np.float32),
        bias=np.zeros(width, dtype=np.float32),
        agreement=agreement,
    )
    scores = [{"text": "a.txt", "exits": [{"layer": layer, "agreement": agreement}]}]
    return LanguageExits(
        model=model.name,
        digest=model.digest,
        affine={layer: same},
        shortlist=np.arange(160, dtype=np.int64),
        notes={"scores": scores},
    )


@pytest.fixture
def windows() -> dict[str, list[Any]]:
    rng = np.random.default_rng(0)
    return {"a.txt": [rng.integers(0, 160, 24) for _ in range(2)]}


def test_texts_are_those_that_the_environment_names(tmp_path: Path) -> None:
    named = f"{tmp_path / 'a'}:{tmp_path / 'b'}"
    assert find_texts({"EDGEWISE_TEXTS": named}) == [tmp_path / "a", tmp_path / "b"]


def test_the_last_tenth_of_the_windows_is_held_out(language: Any, tmp_path: Path) -> None:
    model = dataclasses.replace(language.tiny(), tokenizer=Letters())
    path = tmp_path / "a.txt"
    path.write_text("abcdefgh" * 21)  # 21 windows of 8, whose last tenth is 3

    fit, held_out = split_texts(read_texts([path], model), window=8)
    assert (len(fit["a.txt"]), len(held_out["a.txt"])) == (18, 3)
    assert len(choose(held_out, 2)["a.txt"]) == 2


def test_without_a_text_the_reason_is_given(language: Any) -> None:
    with pytest.raises(ConfigError, match="no text") as caught:
        read_texts([], language.tiny())
    assert "EDGEWISE_TEXTS" in str(caught.value.help)


def test_full_precision_agrees_with_itself_and_few_bits_nearly(
    language: Any, windows: dict[str, list[Any]]
) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    found = width_figures(
        language.tiny(),
        windows,
        threads=1,
        widths=(("torch-eager:cpu", "fp32"), ("onnxruntime:CPU", "int8")),
    )

    full, eager, int8 = found["rows"]
    assert full["agreement, a.txt"] == eager["agreement, a.txt"] == 1.0
    assert eager["perplexity, a.txt"] == pytest.approx(full["perplexity, a.txt"], rel=1e-3)
    assert 0.5 < int8["agreement, a.txt"] <= 1.0
    assert found["tokens"] == {"a.txt": 48}


def test_an_exit_that_maps_to_itself_agrees_as_often_as_the_raw_head(
    language: Any, windows: dict[str, list[Any]]
) -> None:
    model = language.tiny()

    (row,) = exit_figures(model, exits_of(model), windows, layers=(2, 3), threads=1)["rows"]
    assert row["affine"] == row["raw"] == row["shortlist"]
    assert row["affine_as_fitted"] == 0.25

    # By the library: states after two layers and at the end, same norm and head.
    source = language.transformers_model()
    norm, head = source.model.norm, source.lm_head
    agrees = []
    for window in windows["a.txt"]:
        told = language.reference(source, [int(t) for t in window])
        import torch

        with torch.no_grad():
            early = head(norm(torch.from_numpy(told.states[2]))).argmax(-1).numpy()
        agrees.append(early == told.logits.argmax(1))
    assert row["raw"] == pytest.approx(np.concatenate(agrees).mean(), abs=1e-9)


def test_layers_without_a_fitted_exit_are_refused(
    language: Any, windows: dict[str, list[Any]]
) -> None:
    model = language.tiny()
    with pytest.raises(ConfigError, match="after 2 layers only"):
        exit_figures(model, exits_of(model), windows, layers=(3,), threads=1)
