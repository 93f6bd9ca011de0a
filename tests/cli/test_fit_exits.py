"""``edgewise fit-exits`` on a tiny model in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("tokenizers", reason="tokenizers is not installed")

from edgewise.cli.fit_exits import parse_layers
from edgewise.cli.main import main
from edgewise.errors import ConfigError
from edgewise.frontends.language.exits_file import exits_path, load_exits

WORDS = [f"w{i}" for i in range(100)]


@pytest.fixture(scope="module")
def folder(language: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and its tokenizer, as transformers saves them."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    path = tmp_path_factory.mktemp("model") / "tiny"
    language.transformers_model().save_pretrained(path)
    vocabulary = {w: i for i, w in enumerate(["<unk>", "<end>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    (tmp_path / "text.txt").write_text(" ".join(rng.choice(WORDS, 900)))
    return tmp_path / "text.txt"


def _run(folder: Path, text: Path, *more: str) -> int:
    options = ["--window", "32", "--tokens", "320", "--held-out-tokens", "64"]
    return main(["fit-exits", str(folder), "--text", str(text), *options, *more])


def test_exits_are_saved_where_generate_looks_and_shown_as_a_table(
    folder: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from edgewise.frontends.language import load_language_model

    assert _run(folder, text, "--shortlist", "20") == 0

    digest = load_language_model(folder).digest
    exits = load_exits(exits_path(digest), digest=digest)
    out = capsys.readouterr().out
    assert list(exits.affine) == [1, 2, 3]
    assert exits.shortlist is not None
    assert len(exits.shortlist) == 20
    assert "text.txt: 256 tokens, 64 more" in exits.fitted_on
    assert "64 tokens, full depth's perplexity" in out
    assert "the whole head decides" in out
    assert not exits_path(digest).with_name(f"{exits_path(digest).name}.work").exists()


def test_json_is_one_object_and_says_what_was_scored(
    folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "exits"

    assert (
        _run(folder, text, "--layers", "all", "--shortlist", "0", "--out", str(out), "--json") == 0
    )

    told = json.loads(capsys.readouterr().out)
    assert told["file"] == str(out)
    assert [e["layer"] for e in told["scores"][0]["exits"]] == [1, 2, 3]
    assert told["scores"][0]["coverage"] is None
    assert told["asked_tokens"] == 320
    assert load_exits(out, digest=told["digest"]).notes["scores"] == told["scores"]


@pytest.mark.parametrize("layers", ["0", "-1", "4", "1,1", "two", ""], ids=repr)
def test_exits_that_are_none_are_a_mistake_of_the_caller(
    folder: Path, text: Path, layers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(folder, text, "--layers", layers) == 2
    assert "error: expected" in capsys.readouterr().err


def test_text_that_is_not_utf8_is_a_mistake_of_the_caller(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")

    assert _run(folder, tmp_path / "latin.txt") == 2
    assert "byte 0xe9 at byte 3" in capsys.readouterr().err


def test_a_folder_in_the_way_is_told_before_the_work(
    folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(folder, text, "--out", str(tmp_path)) == 2
    assert "is a folder" in capsys.readouterr().err


def test_layers_are_numbers_each_once() -> None:
    assert parse_layers(None, depth=30) == (6, 12, 18, 24, 27, 29)
    with pytest.raises(ConfigError, match="as 12,24 or all"):
        parse_layers("12;24", depth=30)
