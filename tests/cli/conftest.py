"""The tiny net of the reproduction tests, for commands that need a checkpoint and images."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def _reproduction_fixtures() -> Any:
    path = Path(__file__).parents[1] / "reproduce" / "conftest.py"
    spec = importlib.util.spec_from_file_location("edgewise_reproduction_fixtures", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_fixtures = _reproduction_fixtures()
tiny, checkpoint, images = _fixtures.tiny, _fixtures.checkpoint, _fixtures.images
