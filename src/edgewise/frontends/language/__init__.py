"""Language models: from a Hugging Face folder, a GGUF file or an installed package."""

from edgewise.frontends.language.base import load_language_model
from edgewise.frontends.language.pull import pull_model, pullable

__all__ = ["load_language_model", "pull_model", "pullable"]
