"""What one layer of each family is made of: weights by role, and where its norms stand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from edgewise.errors import ModelError
from edgewise.model.language import LanguageModel

Float32 = npt.NDArray[np.float32]
QkNorm = Literal["none", "head", "width"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How a family's layer differs from a Llama layer; biases show by their weights.

    Attributes:
        norms_first: Norms stand before attention and MLP; else behind them, before the sum.
        qk_norm: Queries and keys are normed by head, over their whole width, or not.
    """

    norms_first: bool = True
    qk_norm: QkNorm = "none"


# All that is written for a family; the rest is told by its sizes and weights.
FORMS: Mapping[str, Form] = {
    "llama": Form(),
    "qwen2": Form(),
    "qwen3": Form(qk_norm="head"),
    "olmo2": Form(norms_first=False, qk_norm="width"),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerWeights:
    """Weights of one layer: the model's own arrays, matrices [out, in].

    Attributes:
        q: [heads * head_dim, H].
        k: [kv_heads * head_dim, H].
        v: The same.
        o: [H, heads * head_dim].
        gate: [I, H]; its outputs are activated.
        up: [I, H].
        down: [H, I].
        attention_norm: [H], before attention, or behind it.
        mlp_norm: [H], before the MLP, or behind it.
        q_bias: [heads * head_dim], ``None`` where the family has none.
        k_bias: [kv_heads * head_dim].
        v_bias: The same.
        q_norm: [head_dim] or [heads * head_dim], ``None`` where the family has none.
        k_norm: [head_dim] or [kv_heads * head_dim].
    """

    q: Float32
    k: Float32
    v: Float32
    o: Float32
    gate: Float32
    up: Float32
    down: Float32
    attention_norm: Float32
    mlp_norm: Float32
    q_bias: Float32 | None
    k_bias: Float32 | None
    v_bias: Float32 | None
    q_norm: Float32 | None
    k_norm: Float32 | None


def form_of(model: LanguageModel) -> Form:
    """The form of a model's layers.

    Raises:
        ModelError: Its family does not generate text.
    """
    family = model.architecture.model_type
    if family not in FORMS:
        raise ModelError(
            f"model {model.name!r} is of the family {family!r}, which does not generate text",
            help=f"supported are {', '.join(FORMS)}",
        )
    return FORMS[family]


def layer_weights(model: LanguageModel, layer: int) -> LayerWeights:
    """Weights of a layer, by role.

    Args:
        model: Of any supported family.
        layer: 0 to L - 1.

    Raises:
        ModelError: The family is not supported, a weight is missing or has another shape.
    """
    form, a = form_of(model), model.architecture
    prefix = f"model.layers.{layer}."
    h, inner, q, kv = (
        a.hidden_size,
        a.intermediate_size,
        a.num_attention_heads * a.head_dim,
        a.num_key_value_heads * a.head_dim,
    )

    def weight(name: str, *shape: int) -> Float32:
        return take(model, f"{prefix}{name}.weight", shape)

    def bias(name: str, size: int) -> Float32 | None:
        full = f"{prefix}self_attn.{name}.bias"
        return take(model, full, (size,)) if full in model.weights else None

    norms = ["input_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"]
    attention_norm, mlp_norm = norms[:2] if form.norms_first else norms[1:]
    normed = {"none": None, "head": (a.head_dim, a.head_dim), "width": (q, kv)}[form.qk_norm]
    return LayerWeights(
        q=weight("self_attn.q_proj", q, h),
        k=weight("self_attn.k_proj", kv, h),
        v=weight("self_attn.v_proj", kv, h),
        o=weight("self_attn.o_proj", h, q),
        gate=weight("mlp.gate_proj", inner, h),
        up=weight("mlp.up_proj", inner, h),
        down=weight("mlp.down_proj", h, inner),
        attention_norm=weight(attention_norm, h),
        mlp_norm=weight(mlp_norm, h),
        q_bias=bias("q_proj", q),
        k_bias=bias("k_proj", kv),
        v_bias=bias("v_proj", kv),
        q_norm=None if normed is None else weight("self_attn.q_norm", normed[0]),
        k_norm=None if normed is None else weight("self_attn.k_norm", normed[1]),
    )


def take(model: LanguageModel, name: str, shape: tuple[int, ...]) -> Float32:
    """A weight of a model.

    Raises:
        ModelError: It is missing, or has another shape.
    """
    found = model.weights.get(name)
    if found is None or found.shape != shape:
        said = "nothing" if found is None else f"an array of shape {found.shape}"
        raise ModelError(
            f"model {model.name!r}: expected {name!r} of shape {shape}, found {said}",
            help="edgewise pull it again; a sharded or adapted model must be merged first",
        )
    return found


def head_weight(model: LanguageModel) -> Float32:
    """The LM head, [V, H]; of a tied model, the embedding."""
    a = model.architecture
    return take(model, "lm_head.weight", (a.vocab_size, a.hidden_size))


def final_norm(model: LanguageModel) -> Float32:
    """Weight of the last norm, [H]."""
    return take(model, "model.norm.weight", (model.architecture.hidden_size,))


def embedding(model: LanguageModel) -> Float32:
    """A row for each token, [V, H]."""
    a = model.architecture
    return take(model, "model.embed_tokens.weight", (a.vocab_size, a.hidden_size))
