"""The optimum over operators: no sequence of backends is better, for any objective."""

from __future__ import annotations

from dataclasses import replace

from edgewise.dispatch.methods import best
from edgewise.dispatch.problem import Objective, Problem
from edgewise.dispatch.search import Decision


def find(
    problem: Problem,
    objective: Objective,
    *,
    cap_s: float | None = None,
    memory_bytes: float | None = None,
) -> Decision:
    """As `best`, without segments."""
    alone = replace(problem, segments=())
    found = best.find(alone, objective, cap_s=cap_s, memory_bytes=memory_bytes)
    return replace(found, method="viterbi")
