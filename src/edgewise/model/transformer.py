"""What a transformer is made of, from its published configuration alone: no weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from edgewise.errors import ConfigError, nearest_names

Family = Literal["llama", "qwen2", "qwen3", "olmo2", "modernbert"]
FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "qwen3", "olmo2", "modernbert")

# Switches of transformers that change what a layer computes, with the value that is supported.
_EXPECTED = {
    "attention_bias": False,
    "mlp_bias": False,
    "norm_bias": False,
    "classifier_bias": False,
    "decoder_bias": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Sizes of a transformer, in the words of its configuration file.

    Attributes:
        name: Of the model.
        model_type: Its family.
        hidden_size: Width of the residual stream.
        intermediate_size: Width inside the MLP.
        num_hidden_layers: Layers.
        num_attention_heads: Of the queries.
        num_key_value_heads: Of keys and values.
        head_dim: Width of a head.
        vocab_size: Tokens.
        hidden_act: ``"silu"`` or ``"gelu"``.
        tie_word_embeddings: The head shares the embedding's weights.
        rms_norm_eps: Of its norms.
        rope_theta: Base of the rotary angles.
    """

    name: str
    model_type: Family
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    hidden_act: Literal["silu", "gelu"] = "silu"
    tie_word_embeddings: bool = True
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    @property
    def causal(self) -> bool:
        """Whether it generates text token by token."""
        return self.model_type != "modernbert"


def architecture_names() -> tuple[str, ...]:
    """Models whose configurations ship with Edgewise."""
    folder = files("edgewise.model") / "architectures"
    return tuple(
        sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json"))
    )


def load_architecture(model: str | Path) -> Architecture:
    """Read an architecture.

    Args:
        model: A name of :func:`architecture_names` (letter case aside), a configuration file of
            transformers, or a folder with a ``config.json``.

    Raises:
        ConfigError: Unknown name or family, an unreadable file, or a field is missing or wrong.
    """
    text = str(model)
    if text.lower() in architecture_names():
        file = files("edgewise.model") / "architectures" / f"{text.lower()}.json"
        return architecture_of(json.loads(file.read_text()), name=text.lower(), where=text)
    path = Path(model)
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        raise ConfigError(
            f"{text!r} is neither a model that is known nor a configuration file",
            help=nearest_names(text.lower(), architecture_names()),
        )
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no configuration of a model: {error}") from error
    name = path.parent.name if path.name == "config.json" else path.stem
    return architecture_of(document, name=name or "model", where=str(path))


def architecture_of(document: Any, *, name: str, where: str) -> Architecture:
    """Read an architecture from a configuration's fields, as transformers writes them.

    Args:
        document: The configuration.
        name: What to call the model.
        where: The file, for messages.

    Raises:
        ConfigError: The family is not supported, or a field is missing or wrong.
    """
    if not isinstance(document, Mapping):
        raise ConfigError(f"{where}: expected a JSON object, found {type(document).__name__}")
    family = document.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(
            f"{where}: model_type {family!r} is not supported",
            help=f"supported are {', '.join(FAMILIES)}",
        )
    for field, expected in _EXPECTED.items():
        if document.get(field, expected) != expected:
            raise ConfigError(
                f"{where}: {field} = {document[field]!r} is not supported",
                help=f"{field} = {expected} is",
            )
    heads = _number(document, "num_attention_heads", where)
    hidden = _number(document, "hidden_size", where)
    kv_heads = document.get("num_key_value_heads")
    head_dim = document.get("head_dim")
    if head_dim is None and hidden % heads:
        raise ConfigError(
            f"{where}: hidden_size {hidden} is no multiple of num_attention_heads {heads}",
            help="give head_dim",
        )
    encoder = family == "modernbert"
    activation: Any = document.get("hidden_act") or document.get("hidden_activation")
    activation = activation or ("gelu" if encoder else "silu")
    if activation not in {"silu", "gelu"}:
        raise ConfigError(
            f"{where}: hidden_act {activation!r} is not supported", help="silu and gelu are"
        )
    rope = document.get("rope_parameters") or {}
    # Where a file leaves these out, the classes of transformers put them so.
    eps = document.get("rms_norm_eps", document.get("norm_eps"))
    usual_eps = 1e-5 if encoder or family == "olmo2" else 1e-6
    return Architecture(
        name=name,
        model_type=family,
        hidden_size=hidden,
        intermediate_size=_number(document, "intermediate_size", where),
        num_hidden_layers=_number(document, "num_hidden_layers", where),
        num_attention_heads=heads,
        num_key_value_heads=heads
        if kv_heads is None
        else _number(document, "num_key_value_heads", where),
        head_dim=hidden // heads if head_dim is None else _number(document, "head_dim", where),
        vocab_size=_number(document, "vocab_size", where),
        hidden_act=activation,
        tie_word_embeddings=bool(document.get("tie_word_embeddings", encoder)),
        rms_norm_eps=usual_eps if eps is None else float(eps),
        rope_theta=float(document.get("rope_theta") or rope.get("rope_theta") or 10000.0),
    )


def _number(document: Mapping[str, Any], field: str, where: str) -> int:
    if field not in document:
        raise ConfigError(f"{where}: the configuration has no {field}")
    value = document[field]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{where}: expected {field} of at least 1, found {value!r}")
    return value
