"""Which weights a decoder of each family has, whether they are all there, and their digest."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from edgewise.errors import ConfigError, ModelError
from edgewise.model.transformer import Architecture, architecture_of

Float32 = npt.NDArray[np.float32]
Shape = tuple[int, ...]

FAMILIES = ("llama", "qwen2", "qwen3", "olmo2")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_MAX_LAYERS = 1000
SUPPORTED = f"supported families: {', '.join(FAMILIES)} (SmolLM2 and TinyLlama are llama)"


def decoder_architecture(config: Any, *, name: str, where: str) -> tuple[Architecture, int]:
    """Sizes and context length of a decoder from its configuration, as transformers writes it.

    Args:
        config: The configuration.
        name: What to call the model.
        where: The file, for messages.

    Raises:
        ModelError: A family, or a variant of attention or rotary angles, that is not supported; a
            field is missing or wrong.
    """
    if isinstance(config, Mapping) and config.get("model_type") not in FAMILIES:
        raise ModelError(
            f"{where}: model_type {config.get('model_type')!r} is not supported", help=SUPPORTED
        )
    try:
        architecture = architecture_of(config, name=name, where=where)
        _refuse_variants(config, architecture, where)
    except ConfigError as error:
        raise ModelError(error.message, help=error.help) from error
    except (TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{where}: a field has the wrong type: {error}") from error
    context = config.get("max_position_embeddings")
    if isinstance(context, bool) or not isinstance(context, int) or context < 1:
        raise ModelError(f"{where}: expected max_position_embeddings above 0, found {context!r}")
    return architecture, context


def weight_shapes(a: Architecture) -> dict[str, Shape]:
    """Every weight of a model by the name transformers gives it; without a tied head.

    Source:
        The modules of transformers 5.24: ``modeling_llama.py``, ``modeling_qwen2.py``,
        ``modeling_qwen3.py``, ``modeling_olmo2.py``.
    """
    hidden, inner = a.hidden_size, a.intermediate_size
    queries, keys = a.num_attention_heads * a.head_dim, a.num_key_value_heads * a.head_dim
    layer: dict[str, Shape] = {
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "post_attention_layernorm.weight": (hidden,),
    }
    if a.model_type == "olmo2":
        layer |= {
            "post_feedforward_layernorm.weight": (hidden,),
            "self_attn.q_norm.weight": (queries,),
            "self_attn.k_norm.weight": (keys,),
        }
    else:
        layer["input_layernorm.weight"] = (hidden,)
    if a.model_type == "qwen2":
        layer |= {
            "self_attn.q_proj.bias": (queries,),
            "self_attn.k_proj.bias": (keys,),
            "self_attn.v_proj.bias": (keys,),
        }
    if a.model_type == "qwen3":
        layer |= {
            "self_attn.q_norm.weight": (a.head_dim,),
            "self_attn.k_norm.weight": (a.head_dim,),
        }
    shapes: dict[str, Shape] = {EMBEDDING: (a.vocab_size, hidden), "model.norm.weight": (hidden,)}
    shapes |= {
        f"model.layers.{n}.{role}": shape
        for n in range(a.num_hidden_layers)
        for role, shape in layer.items()
    }
    if not a.tie_word_embeddings:
        shapes[HEAD] = (a.vocab_size, hidden)
    return shapes


def check_shapes(found: Mapping[str, Shape], a: Architecture, *, where: str) -> None:
    """Refuse weights that are not exactly those of the architecture; a tied head may be there too.

    Raises:
        ModelError: One is missing, has another shape, or is not known to the family.
    """
    expected = weight_shapes(a)
    for name, shape in expected.items():
        if name not in found:
            raise ModelError(f"{where}: the weight {name!r} of {list(shape)} is missing")
        if found[name] != shape:
            raise ModelError(
                f"{where}: expected {name!r} of {list(shape)}, found {list(found[name])}"
            )
    # Angles that can be computed: older releases of transformers saved them.
    others = [n for n in found if n not in expected and not n.endswith("rotary_emb.inv_freq")]
    if a.tie_word_embeddings:
        others = [n for n in others if n != HEAD]
    if others:
        raise ModelError(
            f"{where}: {len(others)} weights that a {a.model_type} model does not have, such as"
            f" {others[0]!r}",
            help=SUPPORTED,
        )


def check_finite(name: str, array: Float32, *, where: str) -> None:
    """Refuse NaN and infinities.

    Raises:
        ModelError: There are some.
    """
    wrong = array.size - int(np.count_nonzero(np.isfinite(array)))
    if wrong:
        raise ModelError(
            f"{where}: {wrong} of {array.size} values of {name!r} are NaN or infinite",
            help="copy the file again from where it came",
        )


class WeightsDigest:
    """SHA-256 over sizes and weights, the same wherever a model was read from.

    Args:
        architecture: Of the model; its name does not count.
    """

    def __init__(self, architecture: Architecture) -> None:
        sizes = dataclasses.asdict(architecture)
        del sizes["name"]
        self._hash = hashlib.sha256(json.dumps(sizes, sort_keys=True).encode())

    def add(self, name: str, array: Float32) -> None:
        """Take the next weight, in the order of their names; a tied head is none."""
        self._hash.update(f"{name} {list(array.shape)}\n".encode())
        self._hash.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def hexdigest(self) -> str:
        """Of all that was added."""
        return self._hash.hexdigest()


def weights_digest(architecture: Architecture, weights: Mapping[str, Float32]) -> str:
    """Digest of a whole model, SHA-256 in hexadecimal."""
    digest = WeightsDigest(architecture)
    for name in sorted(weight_shapes(architecture)):
        digest.add(name, weights[name])
    return digest.hexdigest()


def complete(weights: Iterable[tuple[str, Float32]], a: Architecture) -> dict[str, Float32]:
    """Gather a model's weights, read-only, the tied head beside the embedding."""
    gathered = {}
    for name, array in weights:
        array.setflags(write=False)
        gathered[name] = array
    if a.tie_word_embeddings:
        gathered[HEAD] = gathered[EMBEDDING]
    return gathered


def _refuse_variants(config: Mapping[str, Any], a: Architecture, where: str) -> None:
    """Refuse what would be computed wrongly without a word."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    layers = set(config.get("layer_types") or ()) - {"full_attention"}
    partial = config.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0))
    refused = {
        f"rotary angles of type {kind!r}": kind not in {"default", None},
        f"partial_rotary_factor {partial}": partial not in {1.0, None},
        "attention in a sliding window": bool(config.get("use_sliding_window")) or bool(layers),
        f"hidden_act {a.hidden_act!r}": a.hidden_act != "silu",
        f"{a.num_attention_heads} heads of queries on {a.num_key_value_heads} of keys": bool(
            a.num_attention_heads % a.num_key_value_heads
        ),
        f"the width {a.head_dim} of a head": a.head_dim % 2 == 1,
        f"rms_norm_eps {a.rms_norm_eps}": not 0 < a.rms_norm_eps < 1,
        f"rope_theta {a.rope_theta}": not 0 < a.rope_theta < math.inf,
        f"a depth of {a.num_hidden_layers} layers": a.num_hidden_layers > _MAX_LAYERS,
    }
    for what, present in refused.items():
        if present:
            raise ModelError(
                f"{where}: {what} is not supported",
                help="supported are silu, full attention and unscaled rotary angles",
            )
