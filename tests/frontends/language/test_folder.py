from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgewise.device.memory import Memory
from edgewise.errors import ConfigError, ModelError
from edgewise.frontends.language import load_language_model
from edgewise.frontends.language.folder import check_fits

FAMILIES = ("llama", "qwen2", "qwen3", "olmo2")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False], ids=["tied head", "own head"])
def test_every_weight_of_a_folder_is_the_one_transformers_saved(
    family: str,
    tied: bool,  # noqa: FBT001
    saved: Callable[..., Path],
    made: Callable[..., Any],
    weights_of: Any,
) -> None:
    model = load_language_model(saved(family, tied=tied))
    theirs = weights_of(made(family, tied=tied))

    assert model.architecture.model_type == family
    assert model.context_length == 128
    assert set(model.weights) == set(theirs)
    assert all(np.array_equal(model.weights[n], w) for n, w in theirs.items())
    assert all(w.dtype == np.float32 and not w.flags.writeable for w in model.weights.values())
    head, embedding = model.weights["lm_head.weight"], model.weights["model.embed_tokens.weight"]
    assert (head is embedding) == tied


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_becomes_the_very_float32_torch_makes(
    dtype: str, saved: Callable[..., Path], made: Callable[..., Any]
) -> None:
    import torch

    model = load_language_model(saved("qwen3", dtype))
    rounded = {
        n: w.to(getattr(torch, dtype)).float().numpy()
        for n, w in made("qwen3").float().state_dict().items()
    }

    assert all(np.array_equal(model.weights[n], w) for n, w in rounded.items())


def test_a_sharded_folder_reads_as_the_whole_one(saved: Callable[..., Path]) -> None:
    sharded = saved("llama", shard="20KB")

    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert load_language_model(sharded).digest == load_language_model(saved("llama")).digest


def test_weights_in_float32_stay_in_their_file(saved: Callable[..., Path]) -> None:
    weight = load_language_model(saved("llama")).weights["model.norm.weight"]

    assert not weight.flags.owndata


def test_the_digest_tells_weights_and_sizes_apart(
    saved: Callable[..., Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(saved("llama"), tmp_path / "other name")
    same = load_language_model(folder).digest
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    other = load_language_model(folder).digest

    assert same == load_language_model(saved("llama")).digest
    assert len({same, other, load_language_model(saved("llama", tied=False)).digest}) == 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param({"model_type": "gpt2"}, "'gpt2' is not supported", id="another family"),
        pytest.param({"model_type": "modernbert"}, "not supported", id="an encoder"),
        pytest.param({"hidden_act": "gelu"}, "hidden_act", id="another activation"),
        pytest.param(
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}},
            "rotary angles of type 'llama3'",
            id="scaled angles",
        ),
        pytest.param(
            {"rope_scaling": {"type": "linear"}, "rope_parameters": None}, "linear", id="old"
        ),
        pytest.param({"layer_types": ["sliding_attention"]}, "sliding window", id="a window"),
        pytest.param({"rms_norm_eps": "small"}, "wrong type", id="a text for a number"),
        pytest.param({"rms_norm_eps": -1.0}, "rms_norm_eps", id="a negative epsilon"),
        pytest.param({"rope_parameters": [1]}, "wrong type", id="a list for an object"),
        pytest.param({"num_hidden_layers": 10**12}, "depth", id="absurdly deep"),
        pytest.param({"num_hidden_layers": 3}, "is missing", id="deeper than its weights"),
        pytest.param({"num_hidden_layers": 1}, "does not have", id="shallower than its weights"),
        pytest.param({"intermediate_size": 65}, "expected", id="another width"),
        pytest.param({"num_key_value_heads": 3}, "3 of keys", id="heads that share unevenly"),
        pytest.param({"max_position_embeddings": None}, "max_position", id="no context length"),
        pytest.param({"vocab_size": 8}, "tokens", id="fewer tokens than the tokenizer"),
    ],
)
def test_a_configuration_that_is_not_supported_is_refused(
    change: dict[str, Any], said: str, saved: Callable[..., Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(saved("llama"), tmp_path / "changed")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))

    with pytest.raises(ModelError, match=said):
        load_language_model(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_truncated_text_file_is_refused_by_name(
    name: str, saved: Callable[..., Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(saved("llama"), tmp_path / "cut")
    file = folder / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    with pytest.raises(ModelError, match=name):
        load_language_model(folder)


@pytest.mark.parametrize("kept", [0.0, 0.001, 0.5, 0.999])
def test_truncated_weights_are_refused(
    kept: float, saved: Callable[..., Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(saved("llama"), tmp_path / "cut")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: int(kept * file.stat().st_size)])

    with pytest.raises(ModelError, match="damaged"):
        load_language_model(folder)


def _entry(header: dict[str, Any], **facts: Any) -> None:
    header["model.norm.weight"] |= facts


@pytest.mark.parametrize(
    ("tamper", "said"),
    [
        pytest.param(lambda h: _entry(h, dtype="F8_E4M3"), "F8_E4M3", id="another type"),
        pytest.param(lambda h: _entry(h, data_offsets=[0, 10**15]), "place", id="beyond the file"),
        pytest.param(lambda h: _entry(h, shape=[-32]), "place", id="a negative size"),
        pytest.param(lambda h: _entry(h, shape=None), "nothing usable", id="no shape"),
        pytest.param(
            lambda h: h.pop("model.layers.0.mlp.up_proj.weight"), "missing", id="a weight left out"
        ),
    ],
)
def test_a_tampered_header_is_refused(
    tamper: Callable[[dict[str, Any]], Any], said: str, saved: Callable[..., Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(saved("llama"), tmp_path / "tampered")
    file = folder / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    tamper(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    with pytest.raises(ModelError, match=said):
        load_language_model(folder)


def test_weights_that_are_not_numbers_are_refused(
    saved: Callable[..., Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(saved("llama"), tmp_path / "nan")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + np.float32("nan").tobytes())

    with pytest.raises(ModelError, match="NaN"):
        load_language_model(folder)


@pytest.mark.parametrize(
    ("index", "said"),
    [
        pytest.param({"weight_map": {"a": "../../x"}}, "outside its folder", id="another folder"),
        pytest.param({"weight_map": {"a": "model.safetensors"}}, "has no 'a'", id="not there"),
        pytest.param({"weight_map": {"a": "gone.safetensors"}}, "cannot read", id="a lost shard"),
        pytest.param([], "damaged", id="no object"),
    ],
)
def test_a_bad_index_of_shards_is_refused(
    index: Any, said: str, saved: Callable[..., Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(saved("llama"), tmp_path / "index")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(ModelError, match=said):
        load_language_model(folder)


def test_what_is_no_model_says_what_would_be(tmp_path: Path, saved: Callable[..., Path]) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_language_model(tmp_path)
    with pytest.raises(ConfigError, match="did you mean 'smollm2-135m'"):
        load_language_model("smollm-135m")
    folder = shutil.copytree(saved("llama"), tmp_path / "no weights")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="safetensors"):
        load_language_model(folder)


def test_more_weights_than_memory_are_refused_before_they_are_read() -> None:
    memory = Memory(total_bytes=10**9, available_bytes=10**8, limit_bytes=None)

    check_fits(10**8, where="a model", memory=memory)
    with pytest.raises(ModelError, match="free"):
        check_fits(10**8 + 1, where="a model", memory=memory)


def test_a_file_that_cannot_be_mapped_for_want_of_memory_is_told_as_such(
    saved: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(np, "memmap", full)

    with pytest.raises(ModelError, match="does not fit into the memory"):
        load_language_model(saved("llama"))


_OUT_OF_MEMORY = """
import gc, resource, sys
from edgewise.errors import ModelError
from edgewise.frontends.language import load_language_model

def size():
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()

before = size()
resource.setrlimit(resource.RLIMIT_AS, (before + 64 * 2**20, resource.RLIM_INFINITY))
try:
    load_language_model(sys.argv[1])
except ModelError as error:
    gc.collect()
    print("refused:", "memory" in error.message, size() - before < 2**21)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits a process as Linux does")
def test_running_out_of_memory_is_a_message_and_leaves_nothing_behind(tmp_path: Path) -> None:
    from edgewise.frontends.language.weights import weight_shapes
    from edgewise.model.transformer import architecture_of

    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 2**18,
        "max_position_embeddings": 16,
        "tie_word_embeddings": True,
    }
    header, at = {}, 0
    for name, shape in weight_shapes(architecture_of(config, name="x", where="x")).items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as sink:
        sink.write(len(text).to_bytes(8, "little") + text)
        sink.truncate(8 + len(text) + at)  # 32 MiB of zeros that take no room
    (tmp_path / "config.json").write_text(json.dumps(config))

    found = subprocess.run(
        [sys.executable, "-c", _OUT_OF_MEMORY, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert found.stdout.strip() == "refused: True True", found.stderr
