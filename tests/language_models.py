"""Tiny language models of every family, with random weights from transformers: for tests."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from edgewise.model.language import LanguageModel, Tokenizer
from edgewise.model.transformer import architecture_of

Float32 = npt.NDArray[np.float32]
VOCABULARY = 160
FAMILIES = ("llama", "qwen2", "qwen3", "olmo2")
_CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "olmo2": "Olmo2"}


def transformers_model(
    family: str = "llama", *, layers: int = 4, seed: int = 0, **changes: Any
) -> Any:
    """A model of the library: 4 heads on 2 of keys and values, weights far from their usual start.

    Args:
        family: One of :data:`FAMILIES`.
        layers: L.
        seed: Of its weights.
        changes: To its configuration.
    """
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32 if family in {"llama", "qwen3"} else 16,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 96,
        "tie_word_embeddings": family != "olmo2",
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "attn_implementation": "eager",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    name = _CLASSES[family]
    config = getattr(transformers, f"{name}Config")(**(sizes | changes))
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            # Norms and biases that do something; answers that are not nearly ties.
            if weight.ndim == 1:
                weight.copy_(torch.randn_like(weight) * 0.3 + ("norm" in key))
            else:
                weight.copy_(torch.randn_like(weight) * (1.0 if "embed" in key else 0.15))
    return model


def language_model(
    source: Any, *, name: str = "tiny", tokenizer: Tokenizer | None = None
) -> LanguageModel:
    """A model of the library as our record."""
    document = source.config.to_dict()
    weights: dict[str, Float32] = {}
    digest = hashlib.sha256(repr(document).encode())
    for key, tensor in source.state_dict().items():
        weights[key] = tensor.detach().numpy().copy()
        digest.update(weights[key].tobytes())
        weights[key].flags.writeable = False
    if source.config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    return LanguageModel(
        name=name,
        architecture=architecture_of(document, name=name, where=name),
        weights=weights,
        digest=digest.hexdigest(),
        context_length=source.config.max_position_embeddings,
        tokenizer=tokenizer,
    )


def tiny(family: str = "llama", *, layers: int = 4, seed: int = 0, **changes: Any) -> LanguageModel:
    """Our record of a tiny model."""
    return language_model(transformers_model(family, layers=layers, seed=seed, **changes))


@dataclasses.dataclass(frozen=True, slots=True)
class Reference:
    """What the library computes for one text.

    Attributes:
        states: After k layers, k = 0 to L: [M, H] each; none after the last norm.
        logits: [M, V].
    """

    states: list[Float32]
    logits: Float32


def reference(source: Any, tokens: list[int]) -> Reference:
    """States after every layer and answers, by the library's own forward, without a cache."""
    states: list[Float32] = []
    hooks = [
        layer.register_forward_hook(
            lambda _m, _i, out: states.append(
                (out[0] if isinstance(out, tuple) else out)[0].numpy()
            )
        )
        for layer in source.model.layers
    ]
    try:
        with torch.no_grad():
            ids = torch.tensor([tokens])
            embedded = source.model.embed_tokens(ids)[0].numpy()
            logits = source(ids, use_cache=False).logits[0].numpy()
    finally:
        for hook in hooks:
            hook.remove()
    return Reference([embedded, *states], logits)


def generated(source: Any, tokens: list[int], count: int) -> list[int]:
    """Tokens that the library's own greedy ``generate`` appends."""
    library: Any = transformers  # its types are partial
    settings = library.GenerationConfig(
        do_sample=False, max_new_tokens=count, min_new_tokens=count, pad_token_id=0
    )
    with torch.no_grad():
        ids = torch.tensor([tokens])
        found = source.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=settings
        )
    return [int(t) for t in found[0, len(tokens) :]]
