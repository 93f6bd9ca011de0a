"""Small models of another format than torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def tflite() -> Any:
    """The module that writes small TFLite models."""
    pytest.importorskip("ai_edge_litert", reason="ai-edge-litert is not installed")
    spec = importlib.util.spec_from_file_location(
        "edgewise_tflite_models", Path(__file__).parents[1] / "tflite_models.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
