"""Plans within a memory budget: every other backend than the home keeps a copy of its weights.

A copy is counted for every operator and segment of every forward pass in the problem, for pieces
are compiled for one length each. What torch on the CPU runs uses the model's own weights.
"""

from __future__ import annotations

import math

from edgewise.dispatch.labels import Limit
from edgewise.dispatch.paths import Graph, graph_of, shortest
from edgewise.dispatch.problem import HOME, Assignment, Problem
from edgewise.dispatch.search import decided
from edgewise.errors import ConfigError, Infeasible
from edgewise.units import format_bytes


def kept_bytes(problem: Problem, assignment: Assignment) -> float:
    """Weights that an assignment keeps beside the model's own, bytes."""
    graph = graph_of(problem, energy=False)
    return graph.total(graph.kept, assignment)


def memory_limit(problem: Problem, graph: Graph, memory_bytes: float) -> Limit:
    """Say how many bytes of weights a plan may keep beside the model's own.

    Args:
        problem: Costs.
        graph: Made of them.
        memory_bytes: The budget, 0 or more.

    Raises:
        ConfigError: The budget is negative or not a number.
        Infeasible: An operator cannot run at home, and its weights do not fit; ``closest`` is the
            `Decision` that keeps least.
    """
    if math.isnan(memory_bytes) or memory_bytes < 0:
        raise ConfigError(f"expected a memory budget of 0 bytes or more, found {memory_bytes}")
    limit = Limit(of=graph.kept, at_most=memory_bytes)
    least = shortest(graph, graph.kept)
    least_bytes = graph.total(graph.kept, least)
    if least_bytes <= limit.allowed:
        return limit
    raise Infeasible(
        f"no plan keeps at most {format_bytes(memory_bytes)} of weights outside {HOME}: what"
        f" cannot run there has {format_bytes(least_bytes)}",
        closest=decided(problem, least, method="best", objective="latency", exact=False, solves=1),
        help=f"allow {least_bytes:.0f} bytes or more, or measure those operators on {HOME}",
    )
