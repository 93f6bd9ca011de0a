"""Sessions that cost exactly what a test says, and a real model small enough for every test."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pytest

from edgewise.backends.null import NullProgram
from edgewise.clock import VirtualClock
from edgewise.frontends.outline import outline_model
from edgewise.model import StagedModel, Validation
from edgewise.predict import CostTable
from edgewise.runtime import Session

Float32 = npt.NDArray[np.float32]
X = np.zeros((1, 3, 8, 8), dtype=np.float32)


class MakeSession(Protocol):
    def __call__(
        self,
        stage_s: Sequence[float] = (1.0, 1.0, 1.0, 1.0),
        head_s: Sequence[float] | None = None,
        *,
        policy: str = "edgewise",
        accuracy: Sequence[float] | None = None,
        slower: float = 1.0,
        logits: Callable[[int, Float32], Float32] | None = None,
        batch_ratio: dict[int, float] | None = None,
        **options: Any,
    ) -> Session: ...


@functools.cache
def outline(num: int) -> StagedModel:
    """A chain with validation logits, which some policies choose their thresholds from."""
    rng = np.random.default_rng(0)
    validation = Validation(logits=rng.normal(size=(num, 40, 10)), labels=rng.integers(0, 10, 40))
    return outline_model(num).with_heads({}, validation=validation)


def make_session(
    stage_s: Sequence[float] = (1.0, 1.0, 1.0, 1.0),
    head_s: Sequence[float] | None = None,
    *,
    policy: str = "edgewise",
    accuracy: Sequence[float] | None = None,
    slower: float = 1.0,
    logits: Callable[[int, Float32], Float32] | None = None,
    batch_ratio: dict[int, float] | None = None,
    **options: Any,
) -> Session:
    """A session on the null backend: units take their medians, times ``slower``."""
    num = len(stage_s)
    heads = [0.25] * num if head_s is None else list(head_s)
    model = outline(num)
    if accuracy is not None:
        model = model.with_heads({}, accuracy=dict(enumerate(accuracy)))

    def cost_s(unit: str) -> float:
        kind, _, place = unit.partition(":")
        if kind == "head":
            return slower * heads[int(place)]
        start, stop = map(int, place.split("-"))
        return slower * float(sum(stage_s[start:stop]))

    clock = VirtualClock()
    program = NullProgram(model, clock=clock, cost_s=cost_s, logits=logits)
    table = CostTable.from_costs(list(stage_s), heads)
    table = CostTable(
        backend="null",
        stage_s=table.stage_s,
        head_s=table.head_s,
        segment_s=table.segment_s,
        batch_ratio=batch_ratio or {},
        provenance="simulated",
    )
    return Session(program, table, policy=policy, clock=clock, **options)


@pytest.fixture(name="make_session", scope="session")
def _make_session() -> MakeSession:
    return make_session


@pytest.fixture
def x() -> Float32:
    return X


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> StagedModel:
    """Four convolutions and a classifier as ONNX, any batch size, three exits."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    helper, rng = onnx.helper, np.random.default_rng(1)
    weights, nodes, channels, last = {}, [], 3, "x"
    for k in range(4):
        weights[f"w{k}"] = rng.normal(0, 0.3, (6, channels, 3, 3)).astype(np.float32)
        nodes += [
            helper.make_node("Conv", [last, f"w{k}"], [f"c{k}"], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", [f"c{k}"], [f"r{k}"]),
        ]
        channels, last = 6, f"r{k}"
    weights["linear"] = rng.normal(0, 0.5, (6, 5)).astype(np.float32)
    nodes += [
        helper.make_node("GlobalAveragePool", [last], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("MatMul", ["flat", "linear"], ["logits"]),
    ]
    element = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info("x", element, ["N", 3, 8, 8])],
        [helper.make_tensor_value_info("logits", element, ["N", 5])],
        [onnx.numpy_helper.from_array(v, k) for k, v in weights.items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    proto.ir_version = 10
    path: Path = tmp_path_factory.mktemp("tiny") / "tiny.onnx"
    onnx.save(proto, path)
    return StagedModel.from_onnx(path, exits=3).with_random_heads(width=8)
