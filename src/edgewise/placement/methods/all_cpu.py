"""Baseline: no model uses the accelerator; cores by load."""

from __future__ import annotations

import numpy as np

from edgewise.placement.problem import Problem
from edgewise.placement.scores import Scores
from edgewise.placement.search import Found, chosen


def find(problem: Problem) -> Found:
    """Leave every model on the CPU.

    Args:
        problem: Tenants and device.
    """
    scores = Scores(problem)
    places = np.zeros((1, len(problem.tenants)), dtype=np.int64)
    return chosen(scores, places[0], scores.proportional(places)[0], method="all-cpu", evaluated=1)
