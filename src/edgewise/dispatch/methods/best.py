"""The default: the optimum over operators and segments, for any objective and within a limit."""

from __future__ import annotations

from functools import partial

from edgewise.dispatch.capped import latency_limit
from edgewise.dispatch.edp import least_product
from edgewise.dispatch.labels import Limit, constrained
from edgewise.dispatch.memory import memory_limit
from edgewise.dispatch.paths import Edges, Graph, Solution, graph_of, shortest
from edgewise.dispatch.problem import Objective, Problem
from edgewise.dispatch.search import Decision, decided
from edgewise.errors import ConfigError


def find(
    problem: Problem,
    objective: Objective,
    *,
    cap_s: float | None = None,
    memory_bytes: float | None = None,
) -> Decision:
    """Find the best assignment, exact unless the decision says otherwise.

    Args:
        problem: Costs.
        objective: What is made small.
        cap_s: Latency that must not be exceeded, seconds.
        memory_bytes: Weights that backends other than the home may keep, bytes.

    Raises:
        ConfigError: Both limits at once, or one that is no time or size.
        Infeasible: No assignment is within the limit; ``closest`` is the one nearest to it.
    """
    graph = graph_of(problem, energy=objective != "latency")
    limit = _limit(problem, graph, cap_s, memory_bytes)
    solve = partial(_free, graph) if limit is None else partial(constrained, graph, limit=limit)
    if graph.energy is None:
        found = solve(graph.latency)
    elif objective == "energy":
        found = solve(graph.energy)
    else:
        found = least_product(graph, graph.energy, solve)
    return decided(
        problem,
        found.assignment,
        method="best",
        objective=objective,
        lower_bound=found.lower_bound,
        exact=found.exact,
        solves=found.solves,
    )


def _free(graph: Graph, cost: Edges) -> Solution:
    assignment = shortest(graph, cost)
    value = graph.total(cost, assignment)
    return Solution(assignment=assignment, value=value, lower_bound=value, solves=1)


def _limit(
    problem: Problem, graph: Graph, cap_s: float | None, memory_bytes: float | None
) -> Limit | None:
    if cap_s is not None and memory_bytes is not None:
        raise ConfigError(
            "a plan has one limit: a latency cap or a memory budget, found both",
            help="plan with the budget first, then see whether its latency will do",
        )
    if cap_s is not None:
        return latency_limit(problem, graph, cap_s)
    return None if memory_bytes is None else memory_limit(problem, graph, memory_bytes)
