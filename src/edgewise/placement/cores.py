"""Whole cores for the suffixes, for many candidate plans at once."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


def proportional(offered: Float64, cores: int) -> Int64:
    """Give each suffix a core, and the rest one at a time to the largest load per core.

    With more suffixes than cores those of the largest load get one each, the others none: such a
    plan cannot run, and how far it is from one that can is for `evaluate` to say.

    Args:
        offered: Load of each suffix on one core, λ c, 0 where none is left, [M, n].
        cores: K.

    Returns:
        [M, n]; K in each row that has a suffix.

    Source:
        Ng et al., SwapLess (arXiv:2602.17808), Algorithm 1, line 10. The rule is that of Adams
        (1832) for seats: it takes the largest quotients.

    Example:
        >>> proportional(np.array([[3.0, 1.0, 0.0]]), 4).tolist()
        [[3, 1, 0]]
    """
    candidates, tenants = offered.shape
    # Load per core before each is given; the first of every suffix comes before any second.
    quotients = offered[:, :, None] / np.maximum(np.arange(cores), 1e-12)
    flat = quotients.reshape(candidates, tenants * cores)
    if tenants * cores > cores:
        won = (-flat).argsort(axis=1, kind="stable")[:, :cores]
        given = np.zeros(flat.shape, dtype=np.int64)
        given[np.arange(candidates)[:, None], won] = 1
    else:
        given = np.ones(flat.shape, dtype=np.int64)
    found: Int64 = given.reshape(candidates, tenants, cores).sum(axis=2) * (offered > 0)
    return found


@lru_cache(maxsize=32)
def _left_over(cores: int) -> tuple[Int64, npt.NDArray[np.bool_]]:
    """Cores that are left of c when one takes k, [c, k], and where that cannot be."""
    left = np.arange(cores + 1)[:, None] - np.arange(cores + 1)
    return np.maximum(left, 0), left < 0


def best_split(cost: Float64) -> tuple[Int64, Float64]:
    """Share cores so that the sum of costs is least; exact, by dynamic programming.

    Args:
        cost: Of each tenant with k cores, [M, n, K + 1].

    Returns:
        Cores, [M, n], at most K in a row, no more than are of use; and the least sum, [M].
    """
    candidates, tenants, width = cost.shape
    left, impossible = _left_over(width - 1)
    sums = cost[:, 0]
    choices = []
    # sums[m, c]: least cost of the tenants so far with exactly c cores.
    for i in range(1, tenants):
        options = sums[:, left] + cost[:, i, None, :]  # [M, c, k]
        options[:, impossible] = np.inf
        choice = options.argmin(axis=2)
        choices.append(choice)
        sums = np.take_along_axis(options, choice[:, :, None], axis=2)[:, :, 0]
    have = sums.argmin(axis=1)
    rows = np.arange(candidates)
    least = sums[rows, have]
    found = np.empty((candidates, tenants), dtype=np.int64)
    for i in range(tenants - 1, 0, -1):
        found[:, i] = choices[i - 1][rows, have]
        have = have - found[:, i]
    found[:, 0] = have
    return found, least
