"""Plans that must not take longer than a latency cap: least energy, or least EDP, within it."""

from __future__ import annotations

from edgewise.dispatch.labels import Limit
from edgewise.dispatch.paths import Graph, shortest
from edgewise.dispatch.problem import Problem
from edgewise.dispatch.search import decided
from edgewise.errors import Infeasible
from edgewise.units import check_budget_s, format_duration


def latency_limit(problem: Problem, graph: Graph, cap_s: float) -> Limit:
    """Say how long a plan may take.

    Args:
        problem: Costs.
        graph: Made of them.
        cap_s: Seconds for all forward passes of the problem together.

    Raises:
        ConfigError: The cap is no time above zero.
        Infeasible: Not even the fastest plan takes so little; ``closest`` is its `Decision`.
    """
    limit = Limit(of=graph.latency, at_most=check_budget_s(cap_s))
    fastest = shortest(graph, graph.latency)
    if graph.total(graph.latency, fastest) <= limit.allowed:
        return limit
    closest = decided(problem, fastest, method="best", objective="latency", exact=True, solves=1)
    raise Infeasible(
        f"no plan takes at most {format_duration(cap_s)}: the fastest takes"
        f" {format_duration(closest.totals.latency_s)}",
        closest=closest,
        help=f"allow {closest.totals.latency_s:.6g} s or more, or add a backend",
    )
