"""Made-up problems: to try deciders on many, and to see how much greedy choices lose."""

from __future__ import annotations

import numpy as np

from edgewise.dispatch.problem import Problem, Segment
from edgewise.profiles.operators import OperatorShape

NAMES = ("torch:cpu", "onnxruntime:CPU", "openvino:CPU", "torch:cuda", "litert:CPU")


def random_problem(  # noqa: PLR0913 - each is one property of the problem
    rng: np.random.Generator,
    *,
    operators: int,
    backends: int = 3,
    distinct: int | None = None,
    switch_ratio: float = 0.3,
    segments: int = 0,
    missing_ratio: float = 0.0,
) -> Problem:
    """Draw a problem: lognormal costs of some shapes, repeated in turn like a model's layers.

    Args:
        rng: Where chance comes from.
        operators: T.
        backends: B, at most 5.
        distinct: How many shapes; all operators differ by default.
        switch_ratio: Mean switch cost over the median cost of an operator.
        segments: How many, each of 2 to 4 operators.
        missing_ratio: Share of costs that are missing: that backend cannot run that operator. One
            backend of each is left.
    """
    distinct = operators if distinct is None else distinct
    turn = np.arange(operators) % distinct

    def costs(rows: int) -> tuple[np.ndarray, np.ndarray]:
        seconds = (
            1e-4 * rng.lognormal(0.0, 1.0, (rows, 1)) * rng.lognormal(0.0, 0.4, (rows, backends))
        )
        joules = seconds * 5.0 * rng.lognormal(0.0, 0.4, (rows, backends))
        closed = rng.random((rows, backends)) < missing_ratio
        closed[np.arange(rows), rng.integers(backends, size=rows)] = False
        return np.where(closed, np.inf, seconds), np.where(closed, np.inf, joules)

    op_s, op_j = (part[turn] for part in costs(distinct))
    switch_s = 1e-4 * switch_ratio * rng.uniform(0.5, 1.5, (backends, backends))
    switch_j = 5.0 * switch_s * rng.uniform(0.5, 1.5, (backends, backends))
    growth = rng.uniform(0.5, 1.5, distinct)[turn]  # by bytes
    growth[0] = 0.0
    between = 1 - np.eye(backends)
    gap_s = 1e-5 * rng.random(operators + 1)
    weights = rng.integers(1, 100, distinct)[turn].astype(np.float64) * 1024
    found = []
    for number in range(segments):
        start = int(rng.integers(0, operators - 1))
        stop = min(operators, start + int(rng.integers(2, 5)))
        # about what its operators cost on one backend
        better = rng.uniform(0.6, 1.1, backends)
        found.append(
            Segment(
                start=start,
                stop=stop,
                cost_s=op_s[start:stop].sum(axis=0) * better,
                cost_j=op_j[start:stop].sum(axis=0) * better,
                weight_bytes=float(weights[start:stop].sum()),
                candidate=(0, number),
            )
        )
    shape = [OperatorShape(kind="linear", m=16, k=64, n=i + 1) for i in range(distinct)]
    return Problem(
        traces=(),
        backends=NAMES[:backends],
        names=tuple(f"operator{t}" for t in range(operators)),
        shapes=tuple(shape[i] for i in turn),
        op_s=op_s,
        op_j=op_j,
        switch_s=growth[:, None, None] * switch_s * between,
        switch_j=growth[:, None, None] * switch_j * between,
        gap_s=gap_s,
        gap_j=3.0 * gap_s,
        weight_bytes=weights,
        segments=tuple(found),
    )
