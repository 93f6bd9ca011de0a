"""The paper's way: the cheapest backend given the one before, with the switch from there counted.

Causal: it never pays for a switch that only later operators make up for. For EDP the energy of
operator and switch times their time is made small, as in the paper, which is not the whole trace's.
"""

from __future__ import annotations

import numpy as np

from edgewise.dispatch.problem import Assignment, Float64, Objective, Problem, joules
from edgewise.dispatch.search import Decision, decided


def find(problem: Problem, objective: Objective) -> Decision:
    """Choose operator by operator, each knowing who ran the one before; ties stay there.

    Args:
        problem: Costs.
        objective: What is made small.

    Source:
        Transition-Aware Backend Dispatch for Edge LLM Inference, "transition-aware".
    """
    cost = step_costs(problem, objective)
    best = cost.argmin(axis=2)
    stay = np.arange(cost.shape[1])
    follow = np.where(cost[:, stay, stay] <= cost.min(axis=2), stay, best).tolist()
    backend = np.empty(len(follow), dtype=np.int64)
    before = int(cost[0].min(axis=0).argmin())  # nothing ran before: no switch is paid
    for t, after in enumerate(follow):
        backend[t] = before = after[before]
    return decided(problem, Assignment(backend=backend), method="greedy", objective=objective)


def step_costs(problem: Problem, objective: Objective) -> Float64:
    """Cost of each operator on b after a with the switch, as its choice is made by; [T, B, B]."""
    seconds = problem.op_s[:, None, :] + problem.switch_s
    if objective == "latency":
        return seconds
    op_j, switch_j, _ = joules(problem, objective)
    step_j = op_j[:, None, :] + switch_j
    cost = step_j if objective == "energy" else step_j * seconds
    return np.where(np.isfinite(seconds), cost, np.inf)
