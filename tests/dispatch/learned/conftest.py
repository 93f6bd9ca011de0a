"""Four small models, and a table whose costs follow a rule that can be learned."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from edgewise.dispatch.forward import RULES, paper_traces
from edgewise.dispatch.learned.rows import Rows, training_rows
from edgewise.model.transformer import Architecture
from edgewise.profiles.operators import (
    Energy,
    LatencySummary,
    OperatorCost,
    OperatorShape,
    OperatorTable,
    SwitchCost,
    table_of,
)
from edgewise.profiles.records import ThreadPolicy

CPU, GPU, ORT = "torch:cpu", "torch:cuda", "onnxruntime:CPU"
_NAMES = ("mean", "median", "min", "max", "p90", "p95", "p99", "median_low", "median_high")

Seconds = Callable[[OperatorShape, str], float]


def _model(name: str, hidden: int, layers: int) -> Architecture:
    return Architecture(
        name=name,
        model_type="llama",
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=hidden // 2,
        vocab_size=16 * hidden,
    )


def crossing(shape: OperatorShape, backend: str) -> float:
    """A GPU that pays from a million multiply-accumulates on; ONNX Runtime is best at norms."""
    work = shape.flops or shape.m * shape.k
    start, rate = {CPU: (1e-6, 1e9), GPU: (1e-3, 1e11), ORT: (2e-6, 0.8e9)}[backend]
    return start * (0.1 if backend == ORT and "norm" in shape.kind else 1.0) + work / rate


def make_table(architectures: tuple[Architecture, ...], seconds: Seconds) -> OperatorTable:
    shapes = dict.fromkeys(
        node.shape
        for architecture in architectures
        for rule in RULES
        for trace in paper_traces(architecture, rule=rule)
        for node in trace.operators
    )
    costs = []
    for shape in shapes:
        for backend, watts in ((CPU, 4.0), (GPU, 9.0), (ORT, 5.0)):
            took = seconds(shape, backend)
            fields = dict.fromkeys((f"{name}_s" for name in _NAMES), took)
            costs.append(
                OperatorCost(
                    shape=shape,
                    backend=backend,
                    latency=LatencySummary(**fields, std_s=0.0, calls=1, samples=1),
                    correctness=None,
                    energy=Energy(energy_j=watts * took, note="made up"),
                    thread_policy=ThreadPolicy(threads=1),
                )
            )
    switches = [
        SwitchCost(source=a, target=b, fixed_s=1e-5, fixed_j=5e-5)
        for a in (CPU, GPU, ORT)
        for b in (CPU, GPU, ORT)
        if a != b
    ]
    return table_of(
        costs,
        switches,
        name="made-up",
        device_id="none",
        device={},
        thread_policy=ThreadPolicy(threads=1),
        provenance="simulated",
    )


@pytest.fixture(scope="session")
def models() -> tuple[Architecture, ...]:
    sizes = (64, 96, 128, 192, 256)
    return tuple(_model(f"model{size}", size, 2 + i % 2) for i, size in enumerate(sizes))


@pytest.fixture(scope="session")
def table(models: tuple[Architecture, ...]) -> OperatorTable:
    return make_table(models, crossing)


@pytest.fixture(scope="session")
def rows(models: tuple[Architecture, ...], table: OperatorTable) -> Rows:
    return training_rows(models, table)


@pytest.fixture(scope="session")
def table_with() -> Callable[[tuple[Architecture, ...], Seconds], OperatorTable]:
    return make_table
