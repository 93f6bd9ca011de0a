"""Algorithm 1 of SwapLess, with a price for overload instead of infinity.

An unstable plan costs more the more its queues are overloaded, so the search can leave the plan
with every model on the CPU. Moves go one way and one tenant at a time: about half of the answers
are more than 1 % off the optimum (`placement.study`).

Source:
    Ng et al., SwapLess (arXiv:2602.17808), Algorithm 1; the price is ours.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from edgewise.placement.problem import Problem
from edgewise.placement.scores import Scores
from edgewise.placement.search import Found, chosen

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


def find(problem: Problem) -> Found:
    """Run the algorithm.

    Args:
        problem: Tenants and device.
    """
    scores = Scores(problem)
    places, cores, looked = algorithm_1(scores, scores.rank)
    return chosen(scores, places, cores, method="greedy", evaluated=looked)


def algorithm_1(
    scores: Scores, latency: Callable[[Int64, Int64], Float64]
) -> tuple[Int64, Int64, int]:
    """Start with every model on the CPU; take the best move of one or two places while one helps.

    All moves of a step are one array.

    Args:
        scores: Gives cores in proportion to load.
        latency: Of places and cores, [M, n] each; what a move must lower.

    Returns:
        Places and cores, [n] each, and how many candidates were looked at.
    """
    last = scores.problem.last
    moves = np.repeat(np.eye(len(last), dtype=np.int64), 2, axis=0)
    moves[1::2] *= 2
    places = np.zeros((1, len(last)), dtype=np.int64)
    cores = scores.proportional(places)
    best, looked = float(latency(places, cores)[0]), 1
    places, cores = places[0], cores[0]
    while True:
        # A move past the end is a shorter one, or none.
        near = np.minimum(places + moves, last)
        held = scores.proportional(near)
        found = latency(near, held)
        looked += len(found)
        move = int(found.argmin())
        if not found[move] < best:
            return places, cores, looked
        places, cores, best = near[move], held[move], float(found[move])
