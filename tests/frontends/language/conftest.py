"""Tiny models of every family with random weights, as transformers saves them and as GGUF."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgewise.frontends.language.pull import Published

FAMILIES = ("llama", "qwen2", "qwen3", "olmo2")
SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
TEXT = "the cat sat on the mat; the dog sat on the log, 12 times or 345, isn't it? Überall: é, 日本"
TEMPLATE = (
    "{% for m in messages %}\n  {% if m['role'] not in ['user', 'assistant'] %}"
    "{{ raise_exception('who is ' + m['role'] + '?') }}{% endif %}\n"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + eos_token }}{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# What llama.cpp calls the parts of a layer.
GGUF_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    **{f"self_attn.{x}_proj.{k}": f"attn_{x}.{k}" for x in "qkv" for k in ("weight", "bias")},
}


@pytest.fixture(scope="session")
def transformers() -> Any:
    pytest.importorskip("torch", reason="torch is not installed").set_num_threads(1)
    return pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.fixture(scope="session")
def made(transformers: Any) -> Callable[..., Any]:
    """``made(family, tied=...)``: a model of transformers, random but the same each time."""
    import torch

    @functools.cache
    def make(family: str, *, tied: bool = True) -> Any:
        torch.manual_seed(7)
        config = transformers.AutoConfig.for_model(family, **SIZES, tie_word_embeddings=tied)
        if family == "qwen3":
            config.head_dim = 8
        config.eos_token_id = 2
        model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "norm" in name or "bias" in name:
                    weight.add_(0.1 * torch.randn_like(weight))
        return model

    return make


@pytest.fixture(scope="session")
def weights_of() -> Callable[[Any], dict[str, Any]]:
    """A transformers model's weights as arrays, the tied head too."""

    def arrays(model: Any) -> dict[str, Any]:
        return {n: w.float().numpy() for n, w in model.state_dict().items()}

    return arrays


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """A small byte-level tokenizer that splits as Qwen2's does, with three control tokens."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    from tokenizers import decoders, models, pre_tokenizers, trainers

    from edgewise.frontends.language.tokenizer import _split

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = _split("qwen2", Path("none"))
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZES["vocab_size"],
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([TEXT] * 3, trainer)
    return made


@pytest.fixture(scope="session")
def saved(
    made: Callable[..., Any], tokenizer: Any, transformers: Any, tmp_path_factory: Any
) -> Callable[..., Path]:
    """``saved(family, dtype=..., shard=...)``: a folder that transformers wrote."""
    import torch

    @functools.cache
    def save(family: str, dtype: str = "float32", *, tied: bool = True, shard: str = "1GB") -> Path:
        folder: Path = tmp_path_factory.mktemp(family)
        model = copy.deepcopy(made(family, tied=tied)).to(getattr(torch, dtype))
        model.save_pretrained(folder, max_shard_size=shard)
        wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
        wrapped.add_special_tokens({"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"})
        wrapped.chat_template = TEMPLATE
        wrapped.save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="session")
def write_gguf(made: Callable[..., Any], tokenizer: Any) -> Callable[..., Path]:
    """``write_gguf(path, family, quantisation)``: a GGUF file of the same model."""
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    import gguf.quants  # noqa: F811 - a part of it

    def permuted(array: Any, heads: int) -> Any:
        """As llama.cpp's converter orders a Llama's queries and keys."""
        rows = array.shape[0]
        halves = array.reshape(heads, 2, rows // heads // 2, *array.shape[1:])
        return halves.swapaxes(1, 2).reshape(array.shape)

    def write(
        path: Path,
        family: str = "llama",
        quantisation: str = "F32",
        *,
        tied: bool = True,
        extra: Any = lambda _: None,
    ) -> Path:
        model = made(family, tied=tied)
        a = model.config
        writer = gguf.GGUFWriter(path, family)
        writer.add_context_length(SIZES["max_position_embeddings"])
        writer.add_embedding_length(a.hidden_size)
        writer.add_block_count(a.num_hidden_layers)
        writer.add_feed_forward_length(a.intermediate_size)
        writer.add_head_count(a.num_attention_heads)
        writer.add_head_count_kv(a.num_key_value_heads)
        writer.add_layer_norm_rms_eps(a.rms_norm_eps)
        writer.add_rope_freq_base(10000.0)
        if family == "llama":
            writer.add_rope_dimension_count(8)
        writer.add_vocab_size(a.vocab_size)
        _add_tokenizer(writer, tokenizer)
        extra(writer)
        kind = gguf.GGMLQuantizationType[quantisation]
        for name, weight in model.state_dict().items():
            array = weight.float().numpy()
            if name == "lm_head.weight" and tied:
                continue
            if family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
                heads = a.num_attention_heads if "q_proj" in name else a.num_key_value_heads
                array = permuted(array, heads)
            theirs = _gguf_name(name, family)
            if array.ndim == 1 or kind.name == "F32":
                writer.add_tensor(theirs, np.ascontiguousarray(array))
            else:
                packed = gguf.quants.quantize(np.ascontiguousarray(array), kind)
                writer.add_tensor(theirs, packed, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture
def package(
    tmp_path: Path, write_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Published:
    """An installed package of data that must not be imported."""
    folder = tmp_path / "site" / "tiny_lm_data"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('this package was imported')\n")
    content = write_gguf(folder / "tiny.gguf", quantisation="Q4_1").read_bytes()
    monkeypatch.syspath_prepend(str(folder.parent))
    return Published(
        module="tiny_lm_data",
        file="tiny.gguf",
        sha256=hashlib.sha256(content).hexdigest(),
        size_bytes=1,
        requirement="tiny-lm-data==1",
        about="a tiny model",
        licence="none",
    )


def _gguf_name(name: str, family: str) -> str:
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in whole:
        return whole[name]
    _, _, layer, part = name.split(".", 3)
    behind = "post_attention_norm" if family == "olmo2" else "ffn_norm"
    names = GGUF_NAMES | {"post_attention_layernorm.weight": f"{behind}.weight"}
    return f"blk.{layer}.{names[part]}"


def _add_tokenizer(writer: Any, tokenizer: Any) -> None:
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if t.startswith("<|") else 1 for t in tokens])
    writer.add_token_merges([" ".join(m) for m in model["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)  # noqa: FBT003 - the package's own signature
    writer.add_chat_template(TEMPLATE)
