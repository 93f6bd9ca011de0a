"""Transformers models to run plans on: an architecture with random weights, or a local folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgewise.backends.base import import_runtime
from edgewise.errors import BackendUnavailable, ConfigError
from edgewise.model.transformer import Architecture

_CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM"),
    "modernbert": ("ModernBertConfig", "ModernBertForMaskedLM"),
}


def build_model(architecture: Architecture, *, seed: int = 0) -> Any:
    """Build a model with random weights, distributed as at the begin of training: none subnormal.

    Args:
        architecture: Its sizes.
        seed: Of the weights.

    Returns:
        The transformers model, float32, for inference.

    Raises:
        BackendUnavailable: transformers is not installed.
    """
    transformers = _import()
    import torch

    names = _CLASSES[architecture.model_type]
    config_class, model_class = (getattr(transformers, name) for name in names)
    config = config_class(**_fields(architecture))
    config._attn_implementation = "sdpa"  # noqa: SLF001 - no public name before a model exists
    with torch.random.fork_rng(devices=[]), _quiet(transformers):
        torch.manual_seed(seed)
        model = model_class(config)
    return model.eval().requires_grad_(requires_grad=False)


def open_folder(folder: Path) -> Any:
    """Load a model with its weights from a local folder of transformers; nothing is downloaded.

    Raises:
        BackendUnavailable: transformers is not installed.
        ConfigError: It cannot be read.
    """
    transformers = _import()
    import torch

    loaders = (transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM)
    with _quiet(transformers):
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        loader = loaders[config.model_type == "modernbert"]
        try:
            model = loader.from_pretrained(
                folder, local_files_only=True, dtype=torch.float32, attn_implementation="sdpa"
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"{folder} is no model that transformers can load: {error}"
            ) from error
    return model.eval().requires_grad_(requires_grad=False)


def _import() -> Any:
    import_runtime("torch", backend="torch:cpu", extra="torch")
    try:
        import transformers
    except ImportError as error:
        raise BackendUnavailable(
            "transformers is not installed", help="pip install 'edgewise[torch]'"
        ) from error
    return transformers


def _fields(a: Architecture) -> dict[str, Any]:
    """An architecture as a configuration's fields."""
    eps = "norm_eps" if a.model_type == "modernbert" else "rms_norm_eps"
    act = "hidden_activation" if a.model_type == "modernbert" else "hidden_act"
    fields: dict[str, Any] = {
        "hidden_size": a.hidden_size,
        "intermediate_size": a.intermediate_size,
        "num_hidden_layers": a.num_hidden_layers,
        "num_attention_heads": a.num_attention_heads,
        "vocab_size": a.vocab_size,
        "tie_word_embeddings": a.tie_word_embeddings,
        eps: a.rms_norm_eps,
        act: a.hidden_act,
        # Special tokens may lie outside a small vocabulary; nothing here needs them.
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    }
    if a.model_type == "modernbert":
        return fields | dict.fromkeys(("cls_token_id", "sep_token_id"))
    return fields | {
        "num_key_value_heads": a.num_key_value_heads,
        "head_dim": a.head_dim,
        "rope_theta": a.rope_theta,
        "max_position_embeddings": 4096,
    }


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without progress bars and advice on standard error."""
    logging = transformers.utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        logging.enable_progress_bar()
