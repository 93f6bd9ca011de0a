"""Every plan, evaluated one by one: the oracle for small problems, and for every objective.

Under pinned residency memory is filled hot first in every plan, and improved for the best.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from edgewise.errors import ConfigError
from edgewise.placement.memory import hot_first
from edgewise.placement.problem import Problem
from edgewise.placement.response import evaluate
from edgewise.placement.scores import UNSTABLE, Scores
from edgewise.placement.search import Found, chosen

_CHUNK = 20_000


def find(problem: Problem, *, most: int = 500_000) -> Found:
    """Look at all places and all splits of the cores.

    Args:
        problem: Tenants and device.
        most: How many plans at most.

    Raises:
        ConfigError: There are more.
    """
    tenants, cores = len(problem.tenants), problem.cores
    every_place = math.prod(int(p) + 1 for p in problem.last)
    total = every_place * math.comb(cores + tenants, tenants)
    if total > most:
        raise ConfigError(
            f"{total} plans are too many to try all, the limit is {most}",
            help="use method 'exact' or 'multi-start'",
        )
    splits = np.array(
        [k for k in itertools.product(range(cores + 1), repeat=tenants) if sum(k) <= cores]
    )
    places = np.array(list(itertools.product(*(range(int(p) + 1) for p in problem.last))))
    pinned = problem.residency == "pinned" and problem.accelerator is not None
    best, at = math.inf, (places[0], splits[0])
    per_chunk = max(_CHUNK // len(splits), 1)
    for start in range(0, len(places), per_chunk):
        part = places[start : start + per_chunk]
        p = np.repeat(part, len(splits), axis=0)
        k = np.tile(splits, (len(part), 1))
        found = evaluate(problem, p, k, shares_bytes=hot_first(problem, p) if pinned else None)
        rank = found.score + np.where(found.stable, 0.0, UNSTABLE)
        lowest = int(rank.argmin())
        if rank[lowest] < best:
            best, at = float(rank[lowest]), (p[lowest], k[lowest])
    return chosen(Scores(problem), *at, method="exhaustive", evaluated=total, polish=True)
