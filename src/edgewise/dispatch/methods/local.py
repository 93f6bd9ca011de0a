"""Baseline: the cheapest backend for each operator by itself; the switches come on top.

For EDP an operator's own energy times its own time is made small, as the paper's labels do, which
is not the whole trace's.
"""

from __future__ import annotations

import numpy as np

from edgewise.dispatch.problem import Assignment, Objective, Problem, joules
from edgewise.dispatch.search import Decision, decided


def find(problem: Problem, objective: Objective) -> Decision:
    """Choose operator by operator, blind to switches.

    Args:
        problem: Costs.
        objective: What is made small.

    Source:
        Transition-Aware Backend Dispatch for Edge LLM Inference, "operator-local".
    """
    cost = problem.op_s
    if objective != "latency":
        op_j, _, _ = joules(problem, objective)
        cost = op_j if objective == "energy" else op_j * problem.op_s
    chosen = np.where(np.isfinite(problem.op_s), cost, np.inf).argmin(axis=1)
    return decided(problem, Assignment(backend=chosen), method="local", objective=objective)
