"""The question as arrays: cost of each operator on each backend, of switching, of segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from edgewise.dispatch.trace import Node, Trace
from edgewise.errors import ConfigError, ProfileError, nearest_names
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
            raise _energy_is_not_known(objective)
        return value


def need_energy(problem: Problem, objective: Objective) -> None:
    """Refuse an objective that the problem has no numbers for.

    Raises:
        ConfigError: No such objective.
        ProfileError: It needs energy, which is not known of every operator and switch.
    """
    if objective not in OBJECTIVES:
        raise ConfigError(
            f"unknown objective {objective!r}", help=nearest_names(objective, OBJECTIVES)
        )
    if objective != "latency":
        joules(problem, objective)


def joules(problem: Problem, objective: Objective) -> tuple[Float64, Float64, Float64]:
    """Energies of operators, switches and gaps, for an objective that needs them.

    Raises:
        ProfileError: One of them is not known.
    """
    if problem.op_j is None or problem.switch_j is None or problem.gap_j is None:
        raise _energy_is_not_known(objective)
    return problem.op_j, problem.switch_j, problem.gap_j


def _energy_is_not_known(objective: Objective) -> ProfileError:
    return ProfileError(
        f"the objective {objective!r} needs energy, which was not measured",
        help="measure where there is an energy meter, or take --objective latency",
    )


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
    costs = _Costs(table, _backends(traces, table, backends))
    chain = _chain(traces, costs)
    shapes = tuple(node.shape for node in chain.operators)
    op_s, op_j, sizes, weights = costs.columns(shapes)
    switch_s, switch_j = costs.switches(sizes)
    known = not (np.isnan(op_j[np.isfinite(op_s)]).any() or np.isnan(switch_j).any())
    gap_s, gap_j = chain.gaps.T
    return Problem(
        traces=tuple(traces),
        backends=costs.backends,
        names=tuple(node.name for node in chain.operators),
        shapes=shapes,
        op_s=op_s,
        op_j=np.where(np.isinf(op_s), np.inf, op_j) if known else None,
        switch_s=switch_s,
        switch_j=switch_j if known else None,
        gap_s=gap_s,
        gap_j=None if np.isnan(gap_j).any() else gap_j,
        weight_bytes=weights,
        segments=_segments(traces, chain, costs) if segments else (),
        begins=chain.begins,
    )


def _backends(
    traces: Sequence[Trace], table: OperatorTable, wanted: Sequence[str] | None
) -> tuple[str, ...]:
    names = tuple(wanted) if wanted is not None else table.backends()
    if not traces or not names or len(set(names)) != len(names):
        raise ConfigError(f"expected traces and distinct backends, found {len(traces)} and {names}")
    for name in names:
        if name not in table.backends():
            raise ConfigError(
                f"table {table.name!r} has no cost on backend {name!r}",
                help=f"it has {', '.join(table.backends())}",
            )
    return names


class _Costs:
    """The table's numbers as arrays over some backends; each shape is looked up once."""

    def __init__(self, table: OperatorTable, backends: tuple[str, ...]) -> None:
        self.table, self.backends = table, backends
        self._rows: dict[OperatorShape, tuple[Float64, Float64]] = {}

    def row(self, shape: OperatorShape) -> tuple[Float64, Float64]:
        """[B] seconds and joules, ``inf`` and NaN where there is none."""
        if shape not in self._rows:
            seconds = np.full(len(self.backends), np.inf)
            joules = np.full(len(self.backends), np.nan)
            for b, name in enumerate(self.backends):
                cost = self.table.costs.get((shape, name))
                if cost is not None and cost.usable and cost.latency is not None:
                    seconds[b] = cost.latency.median_s
                    joules[b] = np.nan if cost.energy.energy_j is None else cost.energy.energy_j
            self._rows[shape] = seconds, joules
        return self._rows[shape]

    def fixed(self, shape: OperatorShape) -> tuple[float, float]:
        """Seconds and joules of an operator that stays at home; zero where it was not measured."""
        cost = self.table.costs.get((shape, HOME))
        if cost is None or cost.latency is None:
            return 0.0, 0.0
        joules = cost.energy.energy_j
        return cost.latency.median_s, np.nan if joules is None else joules

    def columns(self, shapes: Sequence[OperatorShape]) -> tuple[Float64, Float64, Float64, Float64]:
        """Seconds [T, B], joules [T, B], bytes of input [T] and of weights [T] of operators."""
        numbers: dict[OperatorShape, int] = {}
        index = np.array([numbers.setdefault(shape, len(numbers)) for shape in shapes])
        rows = [self.row(shape) for shape in numbers]
        missing = [s for s, (seconds, _) in zip(numbers, rows, strict=True) if _none(seconds)]
        if missing:
            raise ProfileError(
                f"table {self.table.name!r} has no usable cost of {missing[0].key!r} on any of"
                f" {', '.join(self.backends)} ({len(missing)} shapes are missing)",
                help="edgewise dispatch measure adds what is missing",
            )
        sizes = np.array([(s.input_bytes, s.weight_bytes) for s in numbers], dtype=np.float64)
        seconds, joules = np.array(rows).swapaxes(0, 1)
        return seconds[index], joules[index], sizes[index, 0], sizes[index, 1]

    def switches(self, sizes: Float64) -> tuple[Float64, Float64]:
        """[T, B, B] seconds and joules of going to operators with inputs of so many bytes."""
        seconds = np.zeros((len(sizes), len(self.backends), len(self.backends)))
        joules = np.zeros_like(seconds)
        for a, source in enumerate(self.backends):
            for b, target in enumerate(self.backends):
                if a == b:
                    continue
                cost = self.table.switch(source, target)
                seconds[:, a, b] = np.maximum(0.0, cost.fixed_s + cost.per_byte_s * sizes)
                fixed_j = np.nan if cost.fixed_j is None else cost.fixed_j
                joules[:, a, b] = np.maximum(0.0, fixed_j + (cost.per_byte_j or 0.0) * sizes)
        seconds[0] = joules[0] = 0.0  # nothing ran before
        return seconds, joules


def _none(seconds: Float64) -> bool:
    return bool(np.isinf(seconds).all())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Chain:
    """Operators of all traces in order.

    Attributes:
        operators: [T].
        gaps: [T + 1, 2], seconds and joules of the fixed operators before each, and at the end.
        begins: Of each trace.
        places: For each trace, how many operators stand before each of its nodes, and all.
    """

    operators: tuple[Node, ...]
    gaps: Float64
    begins: tuple[int, ...]
    places: tuple[tuple[int, ...], ...]


def _chain(traces: Sequence[Trace], costs: _Costs) -> _Chain:
    operators: list[Node] = []
    gaps = [np.zeros(2)]
    begins, places = [], []
    for trace in traces:
        begins.append(len(operators))
        place = []
        for node in trace.nodes:
            place.append(len(operators))
            if node.supported:
                operators.append(node)
                gaps.append(np.zeros(2))
            else:
                gaps[-1] += costs.fixed(node.shape)
        places.append((*place, len(operators)))
    if not operators:
        raise ConfigError("the traces have no operator whose backend could be chosen")
    return _Chain(
        operators=tuple(operators),
        gaps=np.array(gaps),
        begins=tuple(begins),
        places=tuple(places),
    )


def _segments(traces: Sequence[Trace], chain: _Chain, costs: _Costs) -> tuple[Segment, ...]:
    """The candidates that at least one backend can run."""
    found = []
    for i, trace in enumerate(traces):
        for j, candidate in enumerate(trace.candidates):
            start, stop = (chain.places[i][node] for node in (candidate.start, candidate.stop))
            if start == stop:
                continue
            rows = np.array([costs.row(part) for part in candidate.parts])  # [parts, 2, B]
            # The gap behind it stays open, so what the segment saves of that is taken off here.
            behind = _fixed_at_the_end(trace.nodes[candidate.start : candidate.stop])
            saved = np.array([costs.fixed(shape) for shape in behind]).reshape(-1, 2).sum(axis=0)
            cost_s, cost_j = rows.sum(axis=0) - saved[:, None]
            if np.isfinite(cost_s).any():
                cost_j = np.where(np.isinf(cost_s), np.inf, cost_j)
                found.append(
                    Segment(
                        start=start,
                        stop=stop,
                        cost_s=cost_s,
                        cost_j=None if np.isnan(cost_j).any() else cost_j,
                        weight_bytes=float(sum(part.weight_bytes for part in candidate.parts)),
                        candidate=(i, j),
                    )
                )
    return tuple(found)


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
    alone, gap_open = _covered(problem, assignment)
    before = np.concatenate([backend[:1], backend[:-1]])
    segments = [
        (problem.segments[n], backend[problem.segments[n].start]) for n in assignment.segments
    ]
    switch_s = float(problem.switch_s[steps, before, backend].sum())
    gap_s = float(problem.gap_s[gap_open].sum())
    seconds = float(problem.op_s[steps, backend][alone].sum()) + switch_s + gap_s
    seconds += sum(float(segment.cost_s[b]) for segment, b in segments)
    energy = None
    if problem.op_j is not None and problem.switch_j is not None and problem.gap_j is not None:
        joules = float(problem.op_j[steps, backend][alone].sum())
        joules += float(problem.switch_j[steps, before, backend].sum())
        joules += float(problem.gap_j[gap_open].sum())
        if all(segment.cost_j is not None for segment, _ in segments):
            energy = joules + sum(float(s.cost_j[b]) for s, b in segments if s.cost_j is not None)
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


def _covered(
    problem: Problem, assignment: Assignment
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Which operators run alone, [T], and which gaps are not inside of a segment, [T + 1]."""
    backend = assignment.backend
    if backend.shape != (problem.num_operators,):
        raise ConfigError(
            f"expected a backend for each of {problem.num_operators} operators, found"
            f" {backend.shape}"
        )
    alone = np.ones(problem.num_operators, dtype=bool)
    gap_open = np.ones(problem.num_operators + 1, dtype=bool)
    for number in assignment.segments:
        segment = problem.segments[number]
        span = slice(segment.start, segment.stop)
        if not alone[span].all() or len(set(backend[span].tolist())) != 1:
            raise ConfigError(
                f"segment {number} overlaps another or is spread over several backends"
            )
        alone[span] = False
        gap_open[segment.start + 1 : segment.stop] = False
    return alone, gap_open
