from __future__ import annotations

import importlib.util
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgewise.errors import ModelError
from edgewise.frontends.language import load_language_model
from edgewise.frontends.language.gguf_file import QUANTISATIONS, GgufFile

FAMILIES = ("llama", "qwen2", "qwen3", "olmo2")
gguf = pytest.importorskip("gguf", reason="gguf is not installed")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gguf_file_is_the_model_it_was_made_of(
    family: str,
    write_gguf: Callable[..., Path],
    made: Callable[..., Any],
    weights_of: Any,
    tmp_path: Path,
) -> None:
    tied = family != "qwen2"
    model = load_language_model(write_gguf(tmp_path / "tiny.gguf", family, tied=tied))
    theirs = weights_of(made(family, tied=tied))

    assert model.name == "tiny"
    assert model.architecture.model_type == family
    assert model.architecture.tie_word_embeddings == tied
    assert all(np.array_equal(model.weights[n], w) for n, w in theirs.items())


def test_a_folder_and_a_file_of_the_same_weights_have_one_digest(
    write_gguf: Callable[..., Path], saved: Callable[..., Path], tmp_path: Path
) -> None:
    file = load_language_model(write_gguf(tmp_path / "tiny.gguf", "qwen3"))
    folder = load_language_model(saved("qwen3"))

    # The file holds the epsilon as float32, which is another number.
    assert np.float32(folder.architecture.rms_norm_eps) == np.float32(
        file.architecture.rms_norm_eps
    )
    assert (file.digest == folder.digest) == (
        file.architecture.rms_norm_eps == folder.architecture.rms_norm_eps
    )


@pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="transformers wants accelerate for GGUF"
)
@pytest.mark.parametrize(("family", "quantisation"), [("llama", "Q4_1"), ("qwen2", "Q8_0")])
def test_quantised_weights_are_the_ones_transformers_loads(
    family: str,
    quantisation: str,
    *,
    write_gguf: Callable[..., Path],
    transformers: Any,
    weights_of: Any,
    tmp_path: Path,
) -> None:
    import torch

    path = write_gguf(tmp_path / "tiny.gguf", family, quantisation)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    )
    model = load_language_model(path)

    for name, weight in weights_of(theirs).items():
        np.testing.assert_allclose(model.weights[name], weight, rtol=1e-6, atol=1e-7, err_msg=name)


def test_every_quantisation_that_is_named_can_be_read() -> None:
    for name in QUANTISATIONS:
        kind = gguf.GGMLQuantizationType[name]
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        packed = np.zeros((2, block_bytes), dtype=np.uint8)

        assert gguf.quants.dequantize(packed, kind).shape == (2, block)


def test_the_header_says_what_the_packages_own_reader_says(
    write_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", quantisation="Q4_1")
    reader = gguf.GGUFReader(path)
    theirs = {n: f.contents() for n, f in reader.fields.items() if not n.startswith("GGUF.")}

    assert GgufFile(path).metadata == theirs


@pytest.mark.parametrize("kept", [0, 3, 20, 200, 4000, 0.9, 0.9999])
def test_a_truncated_file_is_refused(
    kept: float, write_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    data = path.read_bytes()
    path.write_bytes(data[: kept if isinstance(kept, int) else int(kept * len(data))])

    with pytest.raises(ModelError, match=r"GGUF|truncated"):
        load_language_model(path)


def _set(key: str, value: int) -> Callable[[Any], None]:
    return lambda writer: writer.add_uint32(key, value)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        pytest.param(_set("llama.attention.key_length", 6), "differ in width", id="other keys"),
        pytest.param(_set("llama.attention.sliding_window", 64), "sliding", id="a window"),
        pytest.param(
            lambda w: w.add_string("llama.rope.scaling.type", "yarn"), "'yarn'", id="scaled angles"
        ),
        pytest.param(
            lambda w: w.add_tensor("rope_freqs.weight", np.ones(4, dtype=np.float32)),
            "'scaled'",
            id="Llama 3's angles",
        ),
        pytest.param(
            lambda w: w.add_tensor("blk.0.ffn_gate_inp.weight", np.ones(4, dtype=np.float32)),
            "does not have",
            id="a mixture of experts",
        ),
        pytest.param(
            lambda w: w.add_tensor("other.weight", np.ones(4, dtype=np.int32)),
            "quantised as I32",
            id="whole numbers",
        ),
    ],
)
def test_a_variant_that_is_not_supported_is_refused(
    extra: Callable[[Any], None], said: str, write_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", extra=extra)

    with pytest.raises(ModelError, match=said):
        load_language_model(path)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        pytest.param(b"GGUF\x03", b"GGUF\x09", "version 9", id="a later version"),
        pytest.param(b"GGUF\x03", b"TGUF\x03", "no GGUF file", id="another kind of file"),
        pytest.param(b"\x05\x00\x00\x00\x00\x00\x00\x00llama", None, "'gemma' is not", id="gemma"),
        pytest.param(b"token_embd.weight", b"token_embx.weight", "token_embd", id="no embedding"),
        pytest.param(
            b"attention.head_count_kv", b"attention.head_count_kx", "k_proj", id="no heads"
        ),
        pytest.param(b"layer_norm_rms_epsilon", b"layer_norm_rms_epsilox", "epsilon", id="no eps"),
    ],
)
def test_a_tampered_header_is_refused(
    old: bytes, new: bytes | None, said: str, write_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new or b"\x05\x00\x00\x00\x00\x00\x00\x00gemma", 1))

    with pytest.raises(ModelError, match=said):
        load_language_model(path)


@pytest.mark.parametrize("name", ["blk.0.ffn_norm.weight", "output_norm.weight"])
def test_weights_said_to_be_of_another_kind_are_refused_for_the_gap_they_leave(
    name: str, write_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    data = path.read_bytes()
    info = name.encode() + struct.pack("<IQ", 1, 32)
    at = data.index(info) + len(info)
    half = gguf.GGMLQuantizationType.F16.value
    path.write_bytes(data[:at] + struct.pack("<I", half) + data[at + 4 :])

    with pytest.raises(ModelError, match=r"was expected at|tensors end at"):
        load_language_model(path)


def test_an_unknown_quantisation_is_refused_with_those_that_are_known(
    write_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    data = path.read_bytes()
    info = b"output_norm.weight" + struct.pack("<IQ", 1, 32)
    at = data.index(info) + len(info)
    path.write_bytes(data[:at] + struct.pack("<I", 250) + data[at + 4 :])

    with pytest.raises(ModelError, match="number 250") as caught:
        load_language_model(path)
    assert caught.value.help is not None
    assert "Q4_K" in caught.value.help


def test_weights_that_are_not_numbers_are_refused(
    write_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:-4] + np.float32("inf").tobytes())

    with pytest.raises(ModelError, match="NaN or infinite"):
        load_language_model(path)


def test_any_byte_of_the_header_may_be_wrong_without_a_traceback(
    write_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    data = bytearray(path.read_bytes())
    rng = np.random.default_rng(0)
    end = data.index(b"tokenizer.ggml.tokens")
    for at in rng.integers(0, end, 150):
        changed = data.copy()
        changed[at] ^= int(rng.integers(1, 256))
        path.write_bytes(changed)
        try:
            GgufFile(path)
        except ModelError as error:
            assert error.message  # noqa: PT017 - either answer is right
