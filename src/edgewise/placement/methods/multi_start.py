"""Downhill from many plans at once, up to three places either way.

Starts are all on the CPU, all on the accelerator, the threshold rule, prefixes that fit the memory
alone or together, and each tenant alone on or off the accelerator. Cores are split optimally where
the objective is a sum of mean responses; for others the split for the mean and the split by load
are both tried, and single cores are moved. No promise of the optimum: against it over 60 mixes of
two to four tenants see `placement.study`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgewise.errors import ConfigError
from edgewise.placement.descent import descend
from edgewise.placement.methods.threshold import threshold_places
from edgewise.placement.problem import Problem
from edgewise.placement.scores import Scores
from edgewise.placement.search import Found, chosen

Int64 = npt.NDArray[np.int64]


def find(problem: Problem, *, reach: int = 3) -> Found:
    """Search from all starts.

    Args:
        problem: Tenants and device.
        reach: By how many places a tenant may move in one step.

    Raises:
        ConfigError: The reach is below one.
    """
    if reach < 1:
        raise ConfigError(f"expected a reach of at least 1, found {reach!r}")
    scores = Scores(problem)
    moves = [h for h in range(-reach, reach + 1) if h]
    rules = [scores.split] if scores.additive else [scores.split, scores.proportional]
    end = descend(
        scores,
        start_places(problem),
        moves=moves,
        allocate=rules,
        transfers=not scores.additive,
    )
    return chosen(
        scores,
        end.places[end.best],
        end.cores[end.best],
        method="multi-start",
        evaluated=end.evaluated,
        polish=True,
    )


def start_places(problem: Problem) -> Int64:
    """Where the searches start, [S, n], each once."""
    last, tenants = problem.last, len(problem.tenants)
    nothing = np.zeros(tenants, dtype=np.int64)
    found = [nothing, last, threshold_places(problem)]
    if problem.accelerator is not None:
        memory = problem.accelerator.sram_bytes
        for room in (memory, memory / tenants):
            fits = problem.prefix_bytes <= room
            found.append(np.minimum(fits.sum(axis=1) - 1, last))
    one = np.eye(tenants, dtype=np.int64)
    found.extend([*(last * one), *(last * (1 - one))])
    return np.unique(np.array(found), axis=0)
