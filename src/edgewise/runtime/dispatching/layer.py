"""A whole decoder layer in one call: when that is allowed, and how the cache is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from edgewise.errors import BackendUnavailable

if TYPE_CHECKING:
    import torch

_CACHES = ("cache", "past_key_values", "past_key_value")  # as transformers renamed it
# The angles say where a token is; hidden states are taken from what a layer answers.
_HARMLESS = {"position_ids", "cache_position", "use_cache", "output_hidden_states"}
_FIRST = (4, 56)  # layers answer with a tensor since then, and caches are lists of layers


def check_version() -> None:
    """Refuse a transformers whose layers speak otherwise.

    Raises:
        BackendUnavailable: It is missing or too old for whole layers.
    """
    try:
        import transformers
    except ImportError as error:
        raise BackendUnavailable(
            "whole layers need transformers, which is not installed",
            help="pip install 'edgewise[torch]'",
        ) from error
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version < _FIRST:
        raise BackendUnavailable(
            f"whole layers need transformers {_FIRST[0]}.{_FIRST[1]} or later, found"
            f" {transformers.__version__}",
            help="pip install -U transformers, or plan without segments",
        )


def why_not(  # noqa: PLR0911 - one line for each reason
    layer: Any, hidden: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str:
    """Why a call of a layer is not one that a program computes; empty where it is.

    A program knows one sequence without padding, that every token sees itself and all before it.
    """
    mask = args[0] if args else kwargs.get("attention_mask")
    if mask is not None:
        return "an attention mask: padding, or attention that is not sdpa"
    if len(args) > 1 or kwargs.get("position_embeddings") is None:
        return "a layer that is called otherwise"
    given = {"attention_mask", "position_embeddings", *_HARMLESS, *_CACHES}
    for name, value in kwargs.items():
        if name not in given and value is not None and value is not False:
            return f"the argument {name}"
    config = layer.self_attn.config
    if getattr(config, "output_attentions", False):
        return "the argument output_attentions"
    if getattr(layer.self_attn, "sliding_window", None) or not getattr(config, "is_causal", True):
        return "attention that does not see all before it"
    cache = _cache(kwargs)
    if cache is None:
        return ""
    place = _place(cache, layer.self_attn.layer_idx)
    if place is not None and type(place).__name__ != "DynamicLayer":
        return f"a cache of {type(place).__name__}"
    if hidden.shape[1] > 1 and _past(place) is not None:
        return "several tokens after a cache"
    return ""


def call_layer(
    layer: Any,
    program: Callable[..., Any],
    empty: torch.Tensor,
    hidden: torch.Tensor,
    kwargs: Mapping[str, Any],
) -> torch.Tensor:
    """Compute a layer and append its keys and values to the cache.

    Args:
        layer: The module.
        program: Its program.
        empty: Keys of no tokens, [1, kv_heads, 0, head_dim].
        hidden: [1, M, K].
        kwargs: As transformers calls the layer with; `why_not` found nothing in them.
    """
    cos, sin = kwargs["position_embeddings"]
    index = layer.self_attn.layer_idx
    cache = _cache(kwargs)
    past = None if cache is None else _past(_place(cache, index))
    keys, values = (empty, empty) if past is None else past
    answer, new_keys, new_values = program(hidden, cos, sin, keys, values)
    if cache is not None:
        cache.update(new_keys, new_values, index)
    found: torch.Tensor = answer
    return found


def _cache(kwargs: Mapping[str, Any]) -> Any:
    for name in _CACHES:
        cache = kwargs.get(name)
        if cache is not None:
            return cache
    return None


def _place(cache: Any, index: int) -> Any:
    """What a cache holds of one layer; ``None`` before its first token."""
    layers = cache.layers
    return layers[index] if index < len(layers) else None


def _past(place: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Keys and values so far; ``None`` where there are none."""
    keys = getattr(place, "keys", None)
    if keys is None or not keys.numel():
        return None
    return keys, place.values
