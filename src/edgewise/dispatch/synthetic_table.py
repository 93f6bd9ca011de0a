"""Made-up tables of costs for real traces: to try deciders where nothing was measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgewise.dispatch.problem import HOME
from edgewise.dispatch.trace import Trace
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

BACKENDS = (HOME, "onnxruntime:CPU", "openvino:CPU")


def random_table(  # noqa: PLR0913 - each is one property of the table
    traces: Sequence[Trace],
    rng: np.random.Generator,
    *,
    backends: Sequence[str] = BACKENDS,
    switch_s: float = 20e-6,
    spread: float = 0.3,
    error_ratio: float = 0.02,
    name: str = "made up",
) -> OperatorTable:
    """Draw costs of all operators and segments of some forward passes.

    Args:
        traces: Whose shapes.
        rng: Where chance comes from.
        backends: Their names.
        switch_s: Fixed cost of a switch, seconds, give or take a factor of 2.
        spread: Standard deviation of the logarithm of a cost, around a roofline of 50 GFLOP/s and
            10 GB/s with 3 µs a call.
        error_ratio: Half the width of the 95 % intervals.
        name: Of the table.
    """
    shapes = dict.fromkeys(node.shape for trace in traces for node in trace.nodes)
    parts = (part for trace in traces for c in trace.candidates for part in c.parts)
    policy = ThreadPolicy(threads=1)

    def cost(shape: OperatorShape, backend: str) -> OperatorCost:
        roof_s = 3e-6 + shape.flops / 50e9 + (shape.input_bytes + shape.output_bytes) / 10e9
        seconds = roof_s * float(np.exp(spread * rng.standard_normal()))
        joules = 8.0 * seconds * float(np.exp(spread * rng.standard_normal()))
        return OperatorCost(
            shape=shape,
            backend=backend,
            latency=summary(seconds, error_ratio=error_ratio),
            correctness=None,
            energy=Energy(
                energy_j=joules,
                low_j=joules * (1 - error_ratio),
                high_j=joules * (1 + error_ratio),
                note="made up",
            ),
            thread_policy=policy,
        )

    costs = [
        cost(shape, backend)
        for shape in dict.fromkeys([*shapes, *parts])
        for backend in ([HOME] if shape.is_fixed else backends)
    ]
    places = dict.fromkeys((HOME, *backends))
    switches = [
        SwitchCost(
            source=a,
            target=b,
            fixed_s=switch_s * float(rng.uniform(0.5, 2.0)),
            per_byte_s=1e-10 * float(rng.uniform(0.5, 2.0)),
            fixed_j=8.0 * switch_s * float(rng.uniform(0.5, 2.0)),
            per_byte_j=1e-9,
        )
        for a in places
        for b in places
        if a != b
    ]
    return table_of(
        costs,
        switches,
        name=name,
        device_id="made-up",
        device={},
        thread_policy=policy,
        provenance="simulated",
    )


def summary(seconds: float, *, error_ratio: float = 0.0) -> LatencySummary:
    """Statistics of calls that all take about the same."""
    return LatencySummary(
        mean_s=seconds,
        median_s=seconds,
        std_s=0.0,
        min_s=seconds,
        max_s=seconds,
        p90_s=seconds,
        p95_s=seconds,
        p99_s=seconds,
        median_low_s=seconds * (1 - error_ratio),
        median_high_s=seconds * (1 + error_ratio),
        calls=1,
        samples=1,
    )
