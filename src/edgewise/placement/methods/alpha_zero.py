"""Baseline: the greedy search that believes no parameters are ever displaced.

Its plan is evaluated with the misses that it ignored. For one tenant it equals `greedy`.

Source:
    Ng et al., SwapLess (arXiv:2602.17808), section V-A3, "SwapLess (α = 0)".
"""

from __future__ import annotations

from dataclasses import replace

from edgewise.placement.methods import greedy
from edgewise.placement.problem import Problem
from edgewise.placement.scores import Scores
from edgewise.placement.search import Found, chosen


def find(problem: Problem) -> Found:
    """Search as if α = 0.

    Args:
        problem: Tenants and device.
    """
    truth = problem.with_residency("switch")
    blind = replace(truth, assumptions=replace(truth.assumptions, miss="pinned"))
    found = greedy.find(blind)
    return chosen(
        Scores(truth), found.places, found.cores, method="alpha-zero", evaluated=found.evaluated
    )
