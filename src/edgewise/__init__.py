"""Edgewise runs neural networks on small machines so that answers arrive in time.

The public names are loaded when first used: ``import edgewise`` needs numpy alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgewise.api import load
    from edgewise.errors import EdgeError
    from edgewise.model import StagedModel
    from edgewise.runtime import Answer, Session

__version__ = "0.1.0"

_HOME = {
    "Answer": "edgewise.runtime",
    "EdgeError": "edgewise.errors",
    "Session": "edgewise.runtime",
    "StagedModel": "edgewise.model",
    "load": "edgewise.api",
}

__all__ = ["Answer", "EdgeError", "Session", "StagedModel", "__version__", "load"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'edgewise' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
