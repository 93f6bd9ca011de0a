"""Baseline: every model on the accelerator, its memory pinned to whom is asked most often.

What has no memory streams with every call and nothing is ever displaced. SwapLess has no such
baseline; it is often better than switching.
"""

from __future__ import annotations

from edgewise.placement.problem import Problem
from edgewise.placement.scores import Scores
from edgewise.placement.search import Found, chosen


def find(problem: Problem) -> Found:
    """Put every model on the accelerator and fill its memory hot first.

    Args:
        problem: Tenants and device.

    Raises:
        ConfigError: The device gives models no fixed shares of its memory.
    """
    scores = Scores(problem.with_residency("pinned"))
    places = problem.last[None]
    return chosen(
        scores, places[0], scores.proportional(places)[0], method="rate-pinning", evaluated=1
    )
