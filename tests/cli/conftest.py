"""The tiny net of the reproduction tests, for commands that need a checkpoint and images."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest


def _reproduction_fixtures() -> Any:
    path = Path(__file__).parents[1] / "reproduce" / "conftest.py"
    spec = importlib.util.spec_from_file_location("edgewise_reproduction_fixtures", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_fixtures = _reproduction_fixtures()
tiny, checkpoint, images = _fixtures.tiny, _fixtures.checkpoint, _fixtures.images


@pytest.fixture(scope="session")
def language_folder(language: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model as a Hugging Face folder, its tokenizer of single letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    path = tmp_path_factory.mktemp("tiny")
    language.transformers_model("llama", max_position_embeddings=96).save_pretrained(path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: language.VOCABULARY]
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    return path
