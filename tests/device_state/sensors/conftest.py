"""The machines of trees.py, for every test of a sensor."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def trees() -> Any:
    """Builders of machines as trees of files, see trees.py."""
    path = Path(__file__).parent.parent / "trees.py"
    spec = importlib.util.spec_from_file_location("edgewise_test_trees", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
