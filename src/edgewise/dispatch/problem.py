"""The question as arrays: cost of each operator on each backend, of switching, of segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from edgewise.dispatch.trace import Node, Trace
from edgewise.errors import ConfigError, ProfileError
from edgewise.profiles.operators import OperatorShape, OperatorTable

Float64 = npt.NDArray[np.float64]
Objective = Literal["latency", "energy", "edp"]
OBJECTIVES: tuple[Objective, ...] = ("latency", "energy", "edp")

HOME = "torch:cpu"  # where the operators that are not dispatched run


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """A candidate with its costs.

    Attributes:
        start: Number of the first operator it covers, counted over operators.
        stop: Number after the last.
        cost_s: Its time on each backend, [B], seconds; ``inf`` where it cannot run there.
        cost_j: Its energy, [B], joules; ``None`` where not known.
        weight_bytes: Of its parameters.
        candidate: (trace, candidate): where it is from.
    """

    start: int
    stop: int
    cost_s: Float64
    cost_j: Float64 | None
    weight_bytes: float
    candidate: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """One or several forward passes, one after the other, over B backends.

    Operators are chained in order, as in replay: going from operator t - 1 on backend a to t on b
    costs ``switch_s[t, a, b]``. Operators that are not dispatched lie in the gaps between.

    Attributes:
        traces: The forward passes.
        backends: Names. [B].
        names: Of the operators. [T].
        shapes: Of the operators. [T].
        op_s: Time of each, [T, B], seconds; ``inf`` where it cannot run.
        op_j: Energy, [T, B], joules; ``None`` where any is unknown.
        switch_s: [T, B, B], seconds, from row to column; zero on the diagonal and for t = 0.
        switch_j: The same, joules; ``None`` where any is unknown.
        gap_s: Time of the fixed operators before each operator, and after the last, [T + 1],
            seconds; a segment that covers them saves them. Zero where they were not measured.
        gap_j: The same, joules; ``None`` where any is unknown.
        weight_bytes: Of each operator's parameters. [T].
        segments: What may replace runs of operators.
        begins: Number of the first operator of each trace; there the chain begins anew for
            residency, not for the paper's replay.
    """

    traces: tuple[Trace, ...]
    backends: tuple[str, ...]
    names: tuple[str, ...]
    shapes: tuple[OperatorShape, ...]
    op_s: Float64
    op_j: Float64 | None
    switch_s: Float64
    switch_j: Float64 | None
    gap_s: Float64
    gap_j: Float64 | None
    weight_bytes: Float64
    segments: tuple[Segment, ...] = ()
    begins: tuple[int, ...] = (0,)

    @property
    def num_operators(self) -> int:
        """T."""
        return len(self.shapes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assignment:
    """Who runs what.

    Attributes:
        backend: Number of the backend of each operator. [T], int.
        segments: Numbers of the segments that replace operators, ascending, not overlapping; all
            operators of one have its backend.
    """

    backend: npt.NDArray[np.int64]
    segments: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What an assignment costs over the whole problem.

    Attributes:
        latency_s: Operators, switches and gaps.
        energy_j: The same; ``None`` where not known.
        switch_s: The part of ``latency_s`` spent on switches.
        gap_s: The part spent on operators that are not dispatched.
        backend_switches: Neighbours on different backends.
        device_switches: Of those, on different devices: what follows the colon, letter case aside.
        framework_switches: Of those, in different runtimes: what stands before the colon.
    """

    latency_s: float
    energy_j: float | None
    switch_s: float
    gap_s: float
    backend_switches: int
    device_switches: int
    framework_switches: int

    @property
    def edp(self) -> float | None:
        """Energy-delay product over the whole problem, joule-seconds."""
        return None if self.energy_j is None else self.energy_j * self.latency_s

    def of(self, objective: Objective) -> float:
        """The number that an objective makes small.

        Raises:
            ProfileError: It needs energy, which is not known.
        """
        value = {"latency": self.latency_s, "energy": self.energy_j, "edp": self.edp}[objective]
        if value is None:
            raise ProfileError(
                f"the objective {objective!r} needs energy, which was not measured",
                help="measure where there is an energy meter, or take --objective latency",
            )
        return value


def build_problem(
    traces: Sequence[Trace],
    table: OperatorTable,
    *,
    backends: Sequence[str] | None = None,
    segments: bool = False,
) -> Problem:
    """Look up everything a decision needs.

    Args:
        traces: Forward passes in the order they run.
        table: Measured costs.
        backends: Which may be used; all of the table's by default. Backends that cannot run one
            of the operators stay, with ``inf`` there.
        segments: Consider those whose parts are all in the table.

    Raises:
        ConfigError: No trace, or a backend is named twice or not in the table.
        ProfileError: An operator has no usable cost on any of the backends, or a switch between
            two of them was not measured.
    """
    names = tuple(backends) if backends is not None else table.backends()
    if not traces or not names or len(set(names)) != len(names):
        raise ConfigError(f"expected traces and distinct backends, found {len(traces)} and {names}")
    for name in names:
        if name not in table.backends():
            raise ConfigError(
                f"table {table.name!r} has no cost on backend {name!r}",
                help=f"it has {', '.join(table.backends())}",
            )
    rows: dict[OperatorShape, tuple[Float64, Float64]] = {}

    def row(shape: OperatorShape) -> tuple[Float64, Float64]:
        """[B] seconds and joules, ``inf`` and NaN where there is none."""
        if shape not in rows:
            seconds = np.full(len(names), np.inf)
            joules = np.full(len(names), np.nan)
            for b, name in enumerate(names):
                cost = table.costs.get((shape, name))
                if cost is not None and cost.usable:
                    assert cost.latency is not None
                    seconds[b] = cost.latency.median_s
                    joules[b] = np.nan if cost.energy.energy_j is None else cost.energy.energy_j
            rows[shape] = seconds, joules
        return rows[shape]

    def fixed(shape: OperatorShape) -> tuple[float, float]:
        cost = table.costs.get((shape, HOME))
        if cost is None or cost.latency is None:
            return 0.0, 0.0
        joules = cost.energy.energy_j
        return cost.latency.median_s, np.nan if joules is None else joules

    operators: list[Node] = []
    gaps, begins, position = [np.zeros(2)], [], []
    for trace in traces:
        begins.append(len(operators))
        places = []
        for node in trace.nodes:
            places.append(len(operators))
            if node.supported:
                operators.append(node)
                gaps.append(np.zeros(2))
            else:
                gaps[-1] += fixed(node.shape)
        position.append([*places, len(operators)])
    if not operators:
        raise ConfigError("the traces have no operator whose backend could be chosen")
    pairs = [row(node.shape) for node in operators]
    op_s = np.array([seconds for seconds, _ in pairs])
    op_j = np.array([joules for _, joules in pairs])
    stuck = np.flatnonzero(np.isinf(op_s).all(axis=1))
    if stuck.size:
        shape = operators[stuck[0]].shape
        raise ProfileError(
            f"table {table.name!r} has no usable cost of {shape.key!r} on any of"
            f" {', '.join(names)} ({len({operators[t].shape for t in stuck})} shapes are missing)",
            help="edgewise dispatch measure adds what is missing",
        )
    count = len(names)
    sizes = np.array([node.shape.input_bytes for node in operators], dtype=np.float64)
    switch_s = np.zeros((len(operators), count, count))
    switch_j = np.zeros_like(switch_s)
    for a, source in enumerate(names):
        for b, target in enumerate(names):
            if a == b:
                continue
            cost = table.switch(source, target)
            switch_s[:, a, b] = np.maximum(0.0, cost.fixed_s + cost.per_byte_s * sizes)
            if cost.fixed_j is None:
                switch_j[:, a, b] = np.nan
            else:
                per_byte = cost.per_byte_j or 0.0
                switch_j[:, a, b] = np.maximum(0.0, cost.fixed_j + per_byte * sizes)
    switch_s[0] = switch_j[0] = 0.0
    gap = np.array(gaps)
    known = not (np.isnan(op_j[np.isfinite(op_s)]).any() or np.isnan(switch_j).any())
    found = []
    for i, trace in enumerate(traces if segments else ()):
        for j, candidate in enumerate(trace.candidates):
            parts = [row(part) for part in candidate.parts]
            cost_s = np.sum([seconds for seconds, _ in parts], axis=0)
            cost_j = np.sum([joules for _, joules in parts], axis=0)
            start, stop = position[i][candidate.start], position[i][candidate.stop]
            behind = _fixed_at_the_end(trace.nodes[candidate.start : candidate.stop])
            for shape in behind:  # that gap stays open, so what the segment saves of it is less
                seconds, joules = fixed(shape)
                cost_s, cost_j = cost_s - seconds, cost_j - joules
            if np.isfinite(cost_s).any() and start < stop:
                found.append(
                    Segment(
                        start=start,
                        stop=stop,
                        cost_s=cost_s,
                        cost_j=None if np.isnan(cost_j[np.isfinite(cost_s)]).any() else cost_j,
                        weight_bytes=float(sum(p.weight_bytes for p in candidate.parts)),
                        candidate=(i, j),
                    )
                )
    return Problem(
        traces=tuple(traces),
        backends=names,
        names=tuple(node.name for node in operators),
        shapes=tuple(node.shape for node in operators),
        op_s=op_s,
        op_j=np.where(np.isinf(op_s), np.inf, op_j) if known else None,
        switch_s=switch_s,
        switch_j=switch_j if known else None,
        gap_s=gap[:, 0],
        gap_j=None if np.isnan(gap[:, 1]).any() else gap[:, 1],
        weight_bytes=np.array([node.shape.weight_bytes for node in operators], dtype=np.float64),
        segments=tuple(found),
        begins=tuple(begins),
    )


def _fixed_at_the_end(nodes: Sequence[Node]) -> list[OperatorShape]:
    """Shapes of the fixed operators after the last that is dispatched."""
    last = max(i for i, node in enumerate(nodes) if node.supported)
    return [node.shape for node in nodes[last + 1 :]]


def totals(problem: Problem, assignment: Assignment) -> Totals:
    """What an assignment costs; the one way to count that every method is judged by.

    Operators inside a segment cost what the segment costs, with no switch and no gap between them.

    Raises:
        ConfigError: It has the wrong length, overlapping segments, or a segment whose operators
            are on several backends.
    """
    backend = assignment.backend
    steps = np.arange(problem.num_operators)
    if backend.shape != steps.shape:
        raise ConfigError(
            f"expected a backend for each of {len(steps)} operators, found {backend.shape}"
        )
    inside = np.zeros(len(steps), dtype=bool)  # covered, and not first in its segment
    covered = np.zeros(len(steps), dtype=bool)
    seconds, joules = 0.0, 0.0
    for number in assignment.segments:
        segment = problem.segments[number]
        span = slice(segment.start, segment.stop)
        if covered[span].any() or len(set(backend[span].tolist())) != 1:
            raise ConfigError(
                f"segment {number} overlaps another or is spread over several backends"
            )
        covered[span] = True
        inside[segment.start + 1 : segment.stop] = True
        b = backend[segment.start]
        seconds += float(segment.cost_s[b])
        joules += np.nan if segment.cost_j is None else float(segment.cost_j[b])
    alone = ~covered
    before = np.concatenate([backend[:1], backend[:-1]])
    gap_open = np.concatenate([~inside, [True]])
    switch_s = float(problem.switch_s[steps, before, backend].sum())
    gap_s = float(problem.gap_s[gap_open].sum())
    seconds += float(problem.op_s[steps, backend][alone].sum()) + switch_s + gap_s
    energy = None
    if problem.op_j is not None and problem.switch_j is not None and problem.gap_j is not None:
        joules += float(problem.op_j[steps, backend][alone].sum())
        joules += float(problem.switch_j[steps, before, backend].sum())
        joules += float(problem.gap_j[gap_open].sum())
        energy = None if np.isnan(joules) else joules
    changed = before != backend
    runtimes = np.array([name.partition(":")[0] for name in problem.backends])
    devices = np.array([name.partition(":")[2].lower() for name in problem.backends])
    return Totals(
        latency_s=seconds,
        energy_j=energy,
        switch_s=switch_s,
        gap_s=gap_s,
        backend_switches=int(changed.sum()),
        device_switches=int((changed & (devices[before] != devices[backend])).sum()),
        framework_switches=int((changed & (runtimes[before] != runtimes[backend])).sum()),
    )
