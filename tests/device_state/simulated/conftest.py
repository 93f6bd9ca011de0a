"""What the tests of simulated devices share: the devices, their work, the maker of work files."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from edgewise.device.simulated import DeviceModel, device_names, load_device


@pytest.fixture(params=device_names())
def device(request: pytest.FixtureRequest) -> DeviceModel:
    """Each simulated device in turn."""
    return load_device(request.param)


@pytest.fixture(scope="session")
def make_work() -> ModuleType:
    """The program that makes the work files."""
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    spec = importlib.util.spec_from_file_location(
        "edgewise_test_make_work", Path(__file__).parent / "make_work.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
