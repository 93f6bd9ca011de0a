"""Least cost where another sum must stay within a limit: Lagrange's bound, and labels for the rest.

The best weighted sum of cost and resource gives a bound that is often met by a path. Where it is
not, partial paths are kept side by side as labels; those go that are dominated, or cannot be part
of anything better than what is known. A limit on their number keeps it short and is accounted for
in the bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgewise.dispatch.paths import Edges, Graph, Solution, by_place, shortest, tails
from edgewise.dispatch.problem import Assignment, Float64
from edgewise.errors import Infeasible

MAX_LABELS = 4_000  # at one operator and backend
_WIDTHS = (16, 256)  # first searches: what they find makes the last one smaller
_EQUAL = 1e-10  # relative
_DIGITS = 50  # bits of the largest sum; all sums below 2**53 are exact

Int = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Limit:
    """A sum that must not be too large.

    Attributes:
        of: What is summed.
        at_most: Its limit; met also by what is over by a billionth, for sums are rounded.
    """

    of: Edges
    at_most: float

    @property
    def allowed(self) -> float:
        """What is still within the limit."""
        return self.at_most * (1 + 1e-9)


def constrained(
    graph: Graph, cost: Edges, limit: Limit, *, max_labels: int = MAX_LABELS
) -> Solution:
    """Find the path of least cost among those within a limit.

    Args:
        graph: Paths.
        cost: What is made small.
        limit: What they must be within.
        max_labels: Partial paths kept at one operator and backend; with more, those with the least
            bounds stay, and the solution's own bound says what may have been lost.

    Raises:
        Infeasible: None is; ``closest`` is the assignment that uses least.

    Source:
        G. Y. Handler and I. Zang, A dual algorithm for the constrained shortest path problem,
        Networks 10 (1980), for the bound; M. Desrochers and F. Soumis, A generalized permanent
        labelling algorithm for the shortest path problem with time windows, INFOR 26 (1988).
    """
    dual = _dual(graph, cost, limit)
    if dual.solution.exact:
        return dual.solution
    scaled, unit = _rounded(cost)
    resource, resource_unit = _rounded(limit.of)
    search = _Search(
        graph=graph,
        cost=scaled,
        resource=resource,
        allowed=math.floor(limit.allowed / resource_unit),
        multiplier=dual.multiplier * resource_unit / unit,
    )
    best, value = dual.solution.assignment, dual.solution.value
    lost = math.inf
    for width in (*(w for w in _WIDTHS if w < max_labels), max_labels):
        found, lost = search.run(width, below=value / unit * (1 - _EQUAL))
        lost *= unit
        if found is not None:
            best, value = found, graph.total(cost, found)
        if lost >= value * (1 - _EQUAL):
            lost = value
            break
    bound = min(value, max(dual.solution.lower_bound, lost))
    return Solution(assignment=best, value=value, lower_bound=bound, solves=dual.solution.solves)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Dual:
    """What weighing cost and resource finds: a path within the limit, a bound, and the weight."""

    solution: Solution
    multiplier: float


def _dual(graph: Graph, cost: Edges, limit: Limit) -> _Dual:
    def point(path: Assignment) -> tuple[float, float]:
        return graph.total(cost, path), graph.total(limit.of, path)

    over = shortest(graph, cost)
    cost_over, used_over = point(over)
    if used_over <= limit.allowed:
        return _Dual(
            solution=Solution(assignment=over, value=cost_over, lower_bound=cost_over, solves=1),
            multiplier=0.0,
        )
    within = shortest(graph, limit.of)
    cost_within, used_within = point(within)
    if used_within > limit.allowed:
        raise Infeasible(f"no path uses at most {limit.at_most:.6g}", closest=within)
    solves = 2
    while True:
        multiplier = max(cost_within - cost_over, 0.0) / (used_over - used_within)
        bound = cost_over + multiplier * (used_over - limit.allowed)
        weighted = cost.plus(limit.of.times(multiplier))
        path = shortest(graph, weighted)
        solves += 1
        cost_path, used_path = point(path)
        end = cost_over + multiplier * used_over
        if cost_path + multiplier * used_path >= end - abs(end) * _EQUAL * 1e-2:
            break
        if used_path <= limit.allowed:
            within, cost_within, used_within = path, cost_path, used_path
        else:
            cost_over, used_over = cost_path, used_path
    exact = bound >= cost_within * (1 - _EQUAL)
    return _Dual(
        solution=Solution(
            assignment=within,
            value=cost_within,
            lower_bound=cost_within if exact else bound,
            solves=solves,
        ),
        multiplier=multiplier,
    )


def _rounded(edges: Edges) -> tuple[Edges, float]:
    """Whole numbers and their unit, so that equal layers in another order have equal sums."""
    largest = sum(
        float(np.abs(part).reshape(len(part), -1).max(axis=1).sum()) if part.size else 0.0
        for part in (edges.enter, edges.run, edges.span)
    )
    unit = 2.0 ** math.ceil(math.log2(largest + abs(edges.end) or 1.0) - _DIGITS)
    return (
        Edges(
            enter=np.rint(edges.enter / unit),
            run=np.rint(edges.run / unit),
            span=np.rint(edges.span / unit),
            end=round(edges.end / unit),
        ),
        unit,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Labels:
    """Partial paths that end at one backend.

    Attributes:
        cost: So far. [N].
        used: Of the resource. [N].
        origin: Where each comes from: a backend, or which of several ways. [N].
        index: Which label there. [N].
    """

    cost: Float64
    used: Float64
    origin: Int
    index: Int

    def __len__(self) -> int:
        return len(self.cost)

    def of(self, which: npt.NDArray[np.int64 | np.bool_]) -> _Labels:
        return _Labels(self.cost[which], self.used[which], self.origin[which], self.index[which])


_NO_LABELS = _Labels(np.empty(0), np.empty(0), np.empty(0, np.int64), np.empty(0, np.int64))


def _joined(sources: Sequence[tuple[int, _Labels, float, float]]) -> _Labels:
    """Labels from several places, with what the way adds to each; dominated ones left out."""
    found = [source for source in sources if len(source[1])]
    if not found:
        return _NO_LABELS
    if len(found) == 1:
        number, labels, cost_more, used_more = found[0]
        every = np.arange(len(labels))
        came = np.full(len(labels), number)
        return _Labels(labels.cost + cost_more, labels.used + used_more, came, every)
    cost = np.concatenate([labels.cost + more for _, labels, more, _ in found])
    used = np.concatenate([labels.used + more for _, labels, _, more in found])
    origin = np.concatenate([np.full(len(labels), n) for n, labels, _, _ in found])
    index = np.concatenate([np.arange(len(labels)) for _, labels, _, _ in found])
    order = np.lexsort((used, cost))
    sorted_used = used[order]
    least = np.minimum.accumulate(sorted_used)
    better = np.concatenate([[True], sorted_used[1:] < least[:-1]])
    return _Labels(cost, used, origin, index).of(order[better])


class _Search:
    """Label setting, operator by operator, with what follows known from the end."""

    def __init__(
        self, *, graph: Graph, cost: Edges, resource: Edges, allowed: float, multiplier: float
    ) -> None:
        self.graph, self.cost, self.resource = graph, cost, resource
        self.allowed, self.multiplier = allowed, multiplier
        self.tail = tails(graph, cost.plus(resource.times(multiplier)))
        self.tail_cost = tails(graph, cost)
        self.tail_used = tails(graph, resource)
        self.ending = by_place(graph.stops)
        self.lost = math.inf

    def run(self, width: int, *, below: float) -> tuple[Assignment | None, float]:
        """The best path that costs less than ``below``, and a bound for what was left out."""
        count, backends = self.graph.closed.shape
        self.lost = math.inf
        start = _Labels(np.zeros(1), np.zeros(1), np.zeros(1, np.int64), np.zeros(1, np.int64))
        done, entered = [[start] * backends], []
        for t in range(count):
            row = []
            for b in range(backends):
                ways = (
                    (a, done[t][a], self.cost.enter[t, a, b], self.resource.enter[t, a, b])
                    for a in range(backends)
                )
                row.append(self._promising(_joined(tuple(ways)), t, b, width=width, below=below))
            entered.append(row)
            done.append([self._after(entered, t + 1, b) for b in range(backends)])
        best, end = None, below - self.cost.end
        for b, labels in enumerate(done[-1]):
            for index in np.flatnonzero(labels.used + self.resource.end <= self.allowed)[:1]:
                if labels.cost[index] < end:
                    best, end = (b, int(index)), labels.cost[index]
        return None if best is None else self._back(done, entered, *best), self.lost

    def _promising(self, labels: _Labels, t: int, b: int, *, width: int, below: float) -> _Labels:
        """Those that can be part of something within the limit and better than what is known."""
        bound = np.maximum(
            labels.cost + self.tail_cost[t, b],
            labels.cost + self.multiplier * (labels.used - self.allowed) + self.tail[t, b],
        )
        keep = (labels.used + self.tail_used[t, b] <= self.allowed) & (bound < below)
        kept, bound = labels.of(keep), bound[keep]
        if len(kept) <= width:
            return kept
        order = np.argpartition(bound, width)
        self.lost = min(self.lost, float(bound[order[width:]].min()))
        return kept.of(np.sort(order[:width]))

    def _ways(self, stop: int, b: int) -> list[tuple[int, int, float, float]]:
        """How an operator can be the last that is done: number, start, cost, resource."""
        t = stop - 1
        ways = []
        if self.graph.closed[t, b] == 0:
            ways.append((-1, t, self.cost.run[t, b], self.resource.run[t, b]))
        for number in self.ending.get(stop, ()):
            if self.graph.closed_span[number, b] == 0:
                span = self.cost.span[number, b], self.resource.span[number, b]
                ways.append((number, self.graph.starts[number], *span))
        return ways

    def _after(self, entered: list[list[_Labels]], stop: int, b: int) -> _Labels:
        ways = self._ways(stop, b)
        return _joined(
            [(number, entered[start][b], cost, used) for number, start, cost, used in ways]
        )

    def _back(
        self, done: list[list[_Labels]], entered: list[list[_Labels]], b: int, index: int
    ) -> Assignment:
        backend = np.empty(len(entered), dtype=np.int64)
        segments = []
        t = len(entered)
        while t > 0:
            number, into = int(done[t][b].origin[index]), int(done[t][b].index[index])
            start = t - 1
            if number >= 0:
                segments.append(number)
                start = self.graph.starts[number]
            backend[start:t] = b
            b, index = int(entered[start][b].origin[into]), int(entered[start][b].index[into])
            t = start
        return Assignment(backend=backend, segments=tuple(reversed(segments)))
