"""Edgewise runs neural networks on small machines so that answers arrive in time.

The public names are loaded when first used: ``import edgewise`` needs numpy alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgewise.api import load, load_language
    from edgewise.errors import EdgeError
    from edgewise.model import StagedModel
    from edgewise.runtime import Answer, Session
    from edgewise.runtime.dispatching import dispatch_model
    from edgewise.runtime.generation import LanguageSession

__version__ = "0.1.0"

_HOME = {
    "Answer": "edgewise.runtime",
    "EdgeError": "edgewise.errors",
    "LanguageSession": "edgewise.runtime.generation",
    "Session": "edgewise.runtime",
    "StagedModel": "edgewise.model",
    "dispatch_model": "edgewise.runtime.dispatching",
    "load": "edgewise.api",
    "load_language": "edgewise.api",
}

__all__ = [
    "Answer",
    "EdgeError",
    "LanguageSession",
    "Session",
    "StagedModel",
    "__version__",
    "dispatch_model",
    "load",
    "load_language",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'edgewise' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
