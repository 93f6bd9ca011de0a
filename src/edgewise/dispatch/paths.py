"""Assignments as paths: operators are layers, backends the nodes in them, segments long edges."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Self

import numpy as np

from edgewise.dispatch.problem import HOME, Assignment, Float64, Problem, joules


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Edges:
    """What the parts of a path cost by one measure; zero where nothing can run.

    Attributes:
        enter: Of going from backend a to operator t on b, with the gap before. [T, B, B].
        run: Of an operator. [T, B].
        span: Of a segment. [S, B].
        end: Of what every path has behind its last operator.
    """

    enter: Float64
    run: Float64
    span: Float64
    end: float = 0.0

    def times(self, factor: float) -> Self:
        """The same measure, scaled."""
        return type(self)(
            enter=factor * self.enter,
            run=factor * self.run,
            span=factor * self.span,
            end=factor * self.end,
        )

    def plus(self, other: Edges) -> Self:
        """The sum of two measures."""
        return type(self)(
            enter=self.enter + other.enter,
            run=self.run + other.run,
            span=self.span + other.span,
            end=self.end + other.end,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Graph:
    """Where paths may go, and what they cost by each measure.

    Attributes:
        closed: ``inf`` where an operator cannot run, else 0. [T, B].
        closed_span: The same of the segments. [S, B].
        starts: First operator of each segment. [S].
        stops: Number after its last. [S].
        latency: Seconds.
        energy: Joules; ``None`` where not asked for.
        kept: Bytes of weights that other backends than `HOME` keep beside the model's own.
    """

    closed: Float64
    closed_span: Float64
    starts: tuple[int, ...]
    stops: tuple[int, ...]
    latency: Edges
    energy: Edges | None
    kept: Edges

    def total(self, cost: Edges, assignment: Assignment) -> float:
        """What one path costs by a measure."""
        backend = assignment.backend
        steps = np.arange(len(backend))
        alone = np.ones(len(backend), dtype=bool)
        entered = alone.copy()
        found = cost.end
        for number in assignment.segments:
            start, stop = self.starts[number], self.stops[number]
            alone[start:stop] = False
            entered[start + 1 : stop] = False
            found += float(cost.span[number, backend[start]])
        before = np.concatenate([backend[:1], backend[:-1]])
        found += float(cost.enter[steps, before, backend][entered].sum())
        return found + float(cost.run[steps, backend][alone].sum())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solution:
    """A path and how good it is.

    Attributes:
        assignment: The path.
        value: What it costs.
        lower_bound: What every path costs at least.
        solves: How many shortest paths were looked for.
    """

    assignment: Assignment
    value: float
    lower_bound: float
    solves: int

    @property
    def exact(self) -> bool:
        """Whether no path costs less."""
        return self.lower_bound >= self.value


def graph_of(problem: Problem, *, energy: bool) -> Graph:
    """Make the graph of a problem.

    Args:
        problem: Costs.
        energy: Whether paths have an energy; segments without one are closed then.

    Raises:
        ProfileError: They should, and that of operators or switches is not known.
    """
    segments = problem.segments
    unknown = [energy and segment.cost_j is None for segment in segments]
    span_s = _matrix([s.cost_s for s in segments], problem)
    span_j = _matrix([s.cost_s if s.cost_j is None else s.cost_j for s in segments], problem)
    away = np.array([name != HOME for name in problem.backends], dtype=np.float64)
    kept_by = np.array([segment.weight_bytes for segment in segments], dtype=np.float64)
    return Graph(
        closed=np.where(np.isinf(problem.op_s), np.inf, 0.0),
        closed_span=np.where(
            np.isinf(span_s) | np.array(unknown, dtype=bool)[:, None], np.inf, 0.0
        ),
        starts=tuple(segment.start for segment in segments),
        stops=tuple(segment.stop for segment in segments),
        latency=_edges(problem.op_s, problem.switch_s, problem.gap_s, span_s),
        energy=_edges(*joules(problem, "energy"), span_j) if energy else None,
        kept=Edges(
            enter=np.zeros_like(problem.switch_s),
            run=problem.weight_bytes[:, None] * away,
            span=kept_by[:, None] * away,
        ),
    )


def _matrix(rows: list[Float64], problem: Problem) -> Float64:
    """[S, B], also where S is 0."""
    return np.array(rows, dtype=np.float64).reshape(len(rows), len(problem.backends))


def _edges(run: Float64, switch: Float64, gap: Float64, span: Float64) -> Edges:
    return Edges(
        enter=switch + gap[:-1, None, None],
        run=np.where(np.isinf(run), 0.0, run),
        span=np.where(np.isinf(span), 0.0, span),
        end=float(gap[-1]),
    )


def shortest(graph: Graph, cost: Edges) -> Assignment:
    """The path of least cost; equal ways are decided for who runs next and for single operators.

    Exact for any measure that is a sum over operators, segments and switches between neighbours:
    Viterbi's recursion, T B² steps.

    Source:
        A. J. Viterbi, Error bounds for convolutional codes, IEEE Trans. Inf. Theory 13 (1967).
    """
    value, entered, run, span = _forward(graph, cost)
    before = np.zeros(entered.shape, dtype=np.int64)
    backends = np.arange(entered.shape[1])
    for a in backends[::-1]:
        before[value[:-1, a, None] + cost.enter[:, a] <= entered] = a
    stay = value[:-1] + cost.enter[:, backends, backends] <= entered
    came = np.where(stay, backends, before).tolist()
    alone = (entered + run <= value[1:]).tolist()
    ending = by_place(graph.stops)
    backend = np.empty(len(came), dtype=np.int64)
    segments = []
    t, b = len(came), int(value[-1].argmin())
    while t > 0:
        start = t - 1
        if not alone[start][b]:
            number = next(
                s for s in ending[t] if entered[graph.starts[s], b] + span[s, b] <= value[t, b]
            )
            segments.append(number)
            start = graph.starts[number]
        backend[start:t] = b
        t, b = start, came[start][b]
    return Assignment(backend=backend, segments=tuple(reversed(segments)))


def _forward(graph: Graph, cost: Edges) -> tuple[Float64, Float64, Float64, Float64]:
    """Least cost of having done t operators [T + 1, B] and of having entered the next [T, B]."""
    run, span = cost.run + graph.closed, cost.span + graph.closed_span
    value = np.zeros((len(run) + 1, run.shape[1]))
    entered = np.empty_like(run)
    ending = by_place(graph.stops)
    coming = np.empty(cost.enter.shape[1:])
    columns = value[:, :, None]
    # numpy's functions cost more than their work here, hence no more than three per operator
    rows = zip(columns, cost.enter, run, entered, value[1:], strict=False)
    for t, (done, enter, alone, into, after) in enumerate(rows, start=1):
        np.add(done, enter, out=coming)
        np.minimum.reduce(coming, axis=0, out=into)
        np.add(into, alone, out=after)
        for number in ending.get(t, ()):
            np.minimum(after, entered[graph.starts[number]] + span[number], out=after)
    return value, entered, run, span


def tails(graph: Graph, cost: Edges) -> Float64:
    """Least cost of all that follows once an operator's backend has been entered. [T, B]."""
    run, span = cost.run + graph.closed, cost.span + graph.closed_span
    left = np.zeros((len(run) + 1, run.shape[1]))
    follow = np.empty_like(run)
    starting = by_place(graph.starts)
    for t in range(len(run) - 1, -1, -1):
        follow[t] = run[t] + left[t + 1]
        for number in starting.get(t, ()):
            np.minimum(follow[t], span[number] + left[graph.stops[number]], out=follow[t])
        left[t] = (cost.enter[t] + follow[t]).min(axis=1)
    return follow + cost.end


def by_place(places: tuple[int, ...]) -> dict[int, list[int]]:
    """Numbers of the segments that start or stop at a place."""
    found = defaultdict(list)
    for number, place in enumerate(places):
        found[place].append(number)
    return dict(found)
