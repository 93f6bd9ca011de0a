from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgewise.backends.null import NullProgram
from edgewise.clock import Clock, VirtualClock
from edgewise.device import DeviceFingerprint
from edgewise.model.graph import Graph, TensorSpec
from edgewise.model.staged import Exit, Stage, StagedModel
from edgewise.profiles import ProfileStore

COSTS_S: Mapping[str, float] = {
    "segment:0-1": 0.001, "segment:1-2": 0.002, "segment:2-3": 0.003,
    "segment:0-2": 0.0025, "segment:0-3": 0.005,
    "head:0": 0.0001, "head:1": 0.0002, "head:2": 0.0003,
}  # fmt: skip


class BareSource:
    """A source without operators: enough for the null backend."""

    graph = Graph(inputs=(), outputs=(), ops=(), tensors={})
    dynamic_batch = True

    def __init__(self, digest: str) -> None:
        self._digest = digest

    def onnx_segment(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("the null backend asks for no operators")

    def torch_segment(self, *_: Any) -> Callable[[Any], Any] | None:
        return None

    def weights_digest(self) -> str:
        return self._digest


def make_model(num_stages: int = 3, *, name: str = "net", digest: str = "aa") -> StagedModel:
    specs = [TensorSpec(name="x", shape=(1, 3, 8, 8), dtype="float32")]
    specs += [
        TensorSpec(name=f"t{k}", shape=(1, 4, 4, 4), dtype="float32") for k in range(num_stages)
    ]
    stages = tuple(
        Stage(
            index=k, name=f"stage {k}", start=specs[k], stop=specs[k + 1],
            flops=1.0, weight_bytes=4, num_ops=1,
        )
        for k in range(num_stages)
    )  # fmt: skip
    exits = tuple(
        Exit(index=k, name=f"exit {k}", depth_ratio=(k + 1) / num_stages, head=None)
        for k in range(num_stages)
    )
    model = StagedModel(
        name=name, source=BareSource(digest), stages=stages, exits=exits, num_classes=5
    )
    return model.with_random_heads(width=4)


def make_program(
    clock: Clock, *, scale: float = 1.0, model: StagedModel | None = None, threads: int = 1
) -> NullProgram:
    return NullProgram(
        model or make_model(),
        threads=threads,
        clock=clock,
        cost_s=lambda unit: scale * COSTS_S[unit],
    )


@pytest.fixture(name="make_model")
def _make_model() -> Callable[..., StagedModel]:
    return make_model


@pytest.fixture(name="make_program")
def _make_program() -> Callable[..., NullProgram]:
    return make_program


@pytest.fixture
def costs_s() -> Mapping[str, float]:
    """What the programs of `make_program` charge at scale 1."""
    return COSTS_S


@pytest.fixture
def store(tmp_path: Path) -> ProfileStore:
    return ProfileStore(tmp_path / "profiles.sqlite3")


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture
def device() -> DeviceFingerprint:
    return DeviceFingerprint(
        arch="arm64", cpu_model="A76", isa=("neon",), cores=4, usable_cores=4.0,
        memory_bytes=2**33, board="a board", hypervisor=False, os="an OS", kernel="6.1",
    )  # fmt: skip
