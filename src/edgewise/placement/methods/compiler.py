"""Baseline: every model wholly on the accelerator, as its compiler places them.

Models switch in its memory as the device's policy says, whatever the problem's residency.

Source:
    Ng et al., SwapLess (arXiv:2602.17808), section V-A3, "Edge TPU Compiler".
"""

from __future__ import annotations

from edgewise.placement.problem import Problem
from edgewise.placement.scores import Scores
from edgewise.placement.search import Found, chosen


def find(problem: Problem) -> Found:
    """Put every model on the accelerator; without one they stay on the CPU.

    Args:
        problem: Tenants and device.
    """
    scores = Scores(problem.with_residency("switch"))
    places = problem.last[None]
    return chosen(scores, places[0], scores.proportional(places)[0], method="compiler", evaluated=1)
