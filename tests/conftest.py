"""What all tests share: one thread for numeric work, and small nets that are exported once."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# A shared machine may stop a test for a while: no example fails for having taken long. Examples are
# others in each run.
hypothesis.settings.register_profile("edgewise", deadline=None, max_examples=50)
hypothesis.settings.load_profile("edgewise")

# Read when the libraries are first imported, hence here and not in a fixture.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

# The width of whoever's terminal: readline, which pytest imports, hands it on to its processes.
os.environ.pop("COLUMNS", None)
os.environ.pop("LINES", None)

# A shell's `&` lets its jobs ignore Ctrl-C, and they hand that on to what they start: programs
# that a test interrupts would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _exporter_that_knows_its_operators() -> None:
    """Let torch's ONNX exporter gather its operators once a run, not for two seconds an export."""
    if "torch" not in sys.modules:
        return
    with contextlib.suppress(ImportError, AttributeError):  # a torch that keeps them elsewhere
        from torch.onnx._internal.exporter._registration import ONNXRegistry

        gather = functools.cache(ONNXRegistry.from_torchlib)
        ONNXRegistry.from_torchlib = staticmethod(gather)  # type: ignore[method-assign]


@pytest.fixture
def whole_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hold what a machine has once: of several pytest processes, one is in here at a time."""
    fcntl = pytest.importorskip("fcntl", reason="this system locks files otherwise")
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # each process has a folder of its own in it
    with (folder / "whole_machine.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def nets() -> Any:
    """Small nets of many families."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    torch.set_num_threads(1)
    return _helpers("models")


@pytest.fixture(scope="session")
def language() -> Any:
    """Tiny language models of every family, and what transformers computes for them."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    torch.set_num_threads(1)
    return _helpers("language_models")


@pytest.fixture(scope="session")
def tflite() -> Any:
    """The module that writes small TFLite models."""
    pytest.importorskip("ai_edge_litert", reason="ai-edge-litert is not installed")
    return _helpers("tflite_models")


def _helpers(name: str) -> Any:
    """Import a file beside this one that is no test."""
    spec = importlib.util.spec_from_file_location(
        f"edgewise_test_{name}", Path(__file__).parent / f"{name}.py"
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
