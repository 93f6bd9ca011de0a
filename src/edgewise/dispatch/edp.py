"""Least energy times delay of a whole pass: exact, although the product is no sum over operators.

L E is quasi-concave where both are positive, so that its least value over all paths is at a corner
of the convex hull of their (L, E), and each such corner has the least a L + b E for some weights.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from edgewise.dispatch.paths import Edges, Graph, Solution
from edgewise.errors import ProfileError

MAX_SOLVES = 40
_EQUAL = 1e-12  # relative; sums of ten thousand terms differ by less


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Line:
    """Every path has a L + b E >= c; found is the one nearest to that.

    Attributes:
        a: Weight of the latency.
        b: Weight of the energy.
        latency: Of the path, seconds.
        energy: Of the path, joules.
        found: The path, and c as its bound.
    """

    a: float
    b: float
    latency: float
    energy: float
    found: Solution

    @property
    def c(self) -> float:
        return self.found.lower_bound

    @property
    def edp(self) -> float:
        return self.latency * self.energy


def least_product(
    graph: Graph,
    energy: Edges,
    solve: Callable[[Edges], Solution],
    *,
    max_solves: int = MAX_SOLVES,
) -> Solution:
    """Find the path of least latency times energy.

    Each call of ``solve`` gives a line that all paths are above. The product's least value above
    all lines is at one of their crossings, so the crossing with the least product is looked into
    first, until none has less than the best path. Typically 5 to 10 calls.

    Args:
        graph: Paths with their latency.
        energy: Their energy.
        solve: Finds the path of least cost, perhaps under a constraint.
        max_solves: Calls of ``solve`` after which the best path so far is returned with its bound.

    Raises:
        ProfileError: A path has a negative latency or energy.

    Source:
        Y. P. Aneja and K. P. K. Nair, Bicriteria transportation problem, Management Science 25
        (1979), for the enumeration of corners.
    """

    def line(a: float, b: float) -> _Line:
        found = solve(graph.latency.times(a).plus(energy.times(b)))
        return _Line(
            a=a,
            b=b,
            latency=graph.total(graph.latency, found.assignment),
            energy=graph.total(energy, found.assignment),
            found=found,
        )

    lines = [line(1.0, 0.0), line(0.0, 1.0)]
    if min(lines[0].c, lines[1].c) < 0:
        raise ProfileError(
            f"EDP needs costs above zero, found a plan of {lines[0].c:.3g} s and one of"
            f" {lines[1].c:.3g} J",
            help="measure again what has less than no energy, or take --objective latency",
        )
    # (bound, number, left, right); the numbers keep heapq from comparing lines
    waiting = [(_crossing(lines[0], lines[1]), 0, lines[0], lines[1])]
    settled = best = min(line.edp for line in lines)
    while waiting and waiting[0][0] < best * (1 - _EQUAL) and len(lines) < max_solves:
        bound, _, left, right = heapq.heappop(waiting)
        a, b = left.energy - right.energy, right.latency - left.latency
        if min(a, b) <= 0 or _parallel(a, b, left) or _parallel(a, b, right):
            settled = min(settled, bound)  # the solutions' own bounds leave this open
            continue
        lines.append(line(a, b))
        best = min(best, lines[-1].edp)
        for number, pair in enumerate(((left, lines[-1]), (lines[-1], right))):
            heapq.heappush(waiting, (_crossing(*pair), 2 * len(lines) + number, pair[0], pair[1]))
    bound = min([best, settled, *(item[0] for item in waiting)])
    return Solution(
        assignment=min(lines, key=lambda line: line.edp).found.assignment,
        value=best,
        lower_bound=best if bound >= best * (1 - _EQUAL) else bound,
        solves=sum(line.found.solves for line in lines),
    )


def _parallel(a: float, b: float, line: _Line) -> bool:
    return abs(a * line.b - b * line.a) <= _EQUAL * (a * line.b + b * line.a)


def _crossing(left: _Line, right: _Line) -> float:
    """Latency times energy where two lines cross."""
    for path in (left, right):
        if _through(left, path) and _through(right, path):  # there, without rounding
            return path.latency * path.energy
    across = left.a * right.b - left.b * right.a
    latency = (left.c * right.b - left.b * right.c) / across
    energy = (left.a * right.c - left.c * right.a) / across
    return max(latency, 0.0) * max(energy, 0.0)


def _through(line: _Line, path: _Line) -> bool:
    return line.a * path.latency + line.b * path.energy <= line.c * (1 + _EQUAL)
