"""What all tests share: one thread for numeric work, and small nets that are exported once."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# A shared machine may stop a test for a while: no example fails for having taken long.
hypothesis.settings.register_profile("edgewise", deadline=None)
hypothesis.settings.load_profile("edgewise")

# Read when the libraries are first imported, hence here and not in a fixture.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")


@pytest.fixture(scope="session")
def nets() -> Any:
    """Small nets of many families."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location(
        "edgewise_test_models", Path(__file__).parent / "models.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def staged(nets: Any) -> Callable[..., Any]:
    """``staged(family, exits=...)``: a net of that family, staged; each is exported once."""
    from edgewise.frontends.torch_module import TorchSource
    from edgewise.model import StagedModel

    @functools.cache
    def source(family: str) -> TorchSource:
        return TorchSource.export(nets.make(family), nets.example(family))

    def stage(family: str, *, exits: Any = 4) -> StagedModel:
        return StagedModel.from_source(source(family), exits=exits, name=family)

    return stage
