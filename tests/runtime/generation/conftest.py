"""The fake decoder, imported once for all tests of this folder."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def fakes() -> Any:
    """The module beside this one."""
    spec = importlib.util.spec_from_file_location(
        "edgewise_test_generation_fakes", Path(__file__).parent / "fakes.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
