"""Algorithm 1 of SwapLess as printed.

Starts with every model on the CPU and takes the best move of one or two places until none is
better; cores by load. An unstable plan costs infinity. Where all models on the CPU is unstable and
no single move helps, which is usual, it stops at its first step.

Source:
    Ng et al., SwapLess (arXiv:2602.17808), Algorithm 1.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgewise.placement.methods.greedy import algorithm_1
from edgewise.placement.problem import Problem
from edgewise.placement.scores import UNSTABLE, Scores
from edgewise.placement.search import Found, chosen


def find(problem: Problem) -> Found:
    """Run the algorithm; the plan may be one that cannot run.

    Args:
        problem: Tenants and device.
    """
    scores = Scores(problem)

    def latency(
        places: npt.NDArray[np.int64], cores: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float64]:
        found = scores.rank(places, cores)
        return np.where(found < UNSTABLE, found, np.inf)

    places, cores, looked = algorithm_1(scores, latency)
    notes: tuple[str, ...] = ()
    if not np.isfinite(latency(places[None], cores[None])[0]):
        why = (
            "all models on the CPU cannot keep up, and no move of one or two places makes it stable"
        )
        if len(problem.tenants) > problem.cores:
            why = f"{len(problem.tenants)} suffixes need a core each and {problem.cores} are there"
        notes = (f"Algorithm 1 stopped at its first step: {why}",)
    return chosen(scores, places, cores, method="published", evaluated=looked, notes=notes)
