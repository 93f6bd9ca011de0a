from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgewise.errors import ConfigError
from edgewise.model.transformer import (
    FAMILIES,
    architecture_names,
    architecture_of,
    load_architecture,
)

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


def test_seven_configurations_ship_and_cover_every_family() -> None:
    found = [load_architecture(name) for name in architecture_names()]

    assert len(found) == 7
    assert {a.model_type for a in found} == set(FAMILIES)


def test_a_configuration_is_read_from_a_file_a_folder_and_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")

    by_folder = load_architecture(folder)

    assert by_folder.name == "my-model"
    assert by_folder.head_dim == 16
    assert load_architecture(folder / "config.json") == by_folder
    assert load_architecture("SmolLM2-135M").hidden_size == 576


def test_what_a_file_leaves_out_is_what_transformers_puts_there() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    import transformers

    for family, name in (("llama", "Llama"), ("qwen2", "Qwen2"), ("olmo2", "Olmo2")):
        theirs = getattr(transformers, f"{name}Config")()
        ours = architecture_of(CONFIG | {"model_type": family}, name="m", where="m")

        assert ours.rms_norm_eps == theirs.rms_norm_eps
        assert ours.tie_word_embeddings == theirs.tie_word_embeddings
        assert ours.hidden_act == theirs.hidden_act


def test_an_unknown_name_is_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'qwen25' is neither") as caught:
        load_architecture("qwen25")

    assert caught.value.help == "did you mean 'qwen2.5-0.5b'?"


@pytest.mark.parametrize("field", sorted(set(CONFIG) - {"model_type", "num_key_value_heads"}))
def test_a_missing_field_is_named(field: str) -> None:
    document = {k: v for k, v in CONFIG.items() if k != field}

    with pytest.raises(ConfigError, match=rf"x\.json: the configuration has no {field}"):
        architecture_of(document, name="m", where="x.json")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param({"model_type": "gpt2"}, "model_type 'gpt2'", id="another family"),
        pytest.param({"model_type": None}, "model_type None", id="no family"),
        pytest.param({"hidden_size": 0}, "hidden_size of at least 1, found 0", id="zero"),
        pytest.param({"hidden_size": "64"}, "found '64'", id="text"),
        pytest.param({"num_hidden_layers": True}, "found True", id="a truth value"),
        pytest.param({"num_attention_heads": 3}, "no multiple", id="heads that do not divide"),
        pytest.param({"hidden_act": "relu"}, "hidden_act 'relu'", id="another activation"),
        pytest.param({"attention_bias": True}, "attention_bias = True", id="biases elsewhere"),
    ],
)
def test_a_wrong_field_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        architecture_of(CONFIG | change, name="m", where="x.json")


@pytest.mark.parametrize("text", ["{", "[1]", ""], ids=["cut off", "a list", "empty"])
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8")

    with pytest.raises(ConfigError, match=r"config\.json"):
        load_architecture(path)
