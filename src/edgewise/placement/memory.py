"""Fixed shares of the accelerator's memory: who gets how many bytes when nobody may displace."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgewise.placement.problem import Problem
from edgewise.placement.response import evaluate

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

_MAX_ORDERS = 5  # tenants whose orders are all tried: 120
_STEPS = 0.5 ** np.arange(9)


def wanted_bytes(problem: Problem, places: Int64) -> Float64:
    """What each prefix could keep in memory: its parameters, as far as a compiler lets it.

    Args:
        problem: Costs.
        places: p, [M, n].

    Returns:
        [M, n], bytes.
    """
    rows = np.arange(places.shape[1])
    memory = problem.accelerator.sram_bytes if problem.accelerator else 0
    limit = np.minimum(problem.sram_bytes[rows, places], memory)
    found: Float64 = np.minimum(problem.prefix_bytes[rows, places], limit) * (places > 0)
    return found


def filled_in_order(wanted: Float64, order: Int64, memory_bytes: float) -> Float64:
    """Give memory in an order until it is used up.

    Args:
        wanted: [M, n], bytes.
        order: Tenants, first served first, [n] or [M, n].
        memory_bytes: How much there is.
    """
    order = np.broadcast_to(order, wanted.shape)
    ordered = np.take_along_axis(wanted, order, axis=1)
    before = np.cumsum(ordered, axis=1) - ordered
    given = np.clip(memory_bytes - before, 0.0, ordered)
    found = np.empty_like(wanted)
    np.put_along_axis(found, order, given, axis=1)
    return found


def hot_first(problem: Problem, places: Int64) -> Float64:
    """Give memory to whom is asked most often first: streams the fewest bytes per second.

    Args:
        problem: Costs and rates.
        places: p, [M, n].

    Returns:
        Shares, [M, n], bytes.

    Source:
        Fractional knapsack (Dantzig 1957): each byte kept saves λ_i bytes per second.
    """
    memory = float(problem.accelerator.sram_bytes) if problem.accelerator else 0.0
    order = np.argsort(-problem.rates, kind="stable")
    return filled_in_order(wanted_bytes(problem, places), order, memory)


def best_shares(
    problem: Problem,
    places: Sequence[int] | Int64,
    cores: Sequence[int] | Int64,
    *,
    rounds: int = 40,
) -> tuple[Float64, int]:
    """Improve the shares of one plan under the problem's own objective.

    Under ``mean`` and ``weighted`` the response is convex in the shares (a squared norm over a
    linear function), so moving memory between pairs ends near the optimum. Starts are all orders
    of at most five tenants.

    Args:
        problem: With pinned residency.
        places: p, [n].
        cores: k, [n].
        rounds: How many transfers at most.

    Returns:
        Shares, [n], bytes, and how many candidates were looked at.
    """
    place = np.array([places])
    memory = float(problem.accelerator.sram_bytes) if problem.accelerator else 0.0
    wanted = wanted_bytes(problem, place)
    users = np.flatnonzero(wanted[0] > 0)
    share = hot_first(problem, place)[0]
    if wanted.sum() <= memory or len(users) < 2:
        return share, 0

    def scores(shares: Float64) -> Float64:
        many = len(shares)
        return evaluate(
            problem,
            np.repeat(place, many, axis=0),
            np.repeat(np.array([cores]), many, axis=0),
            shares_bytes=shares,
        ).score

    starts = [share]
    if len(users) <= _MAX_ORDERS:
        rest = [i for i in range(len(share)) if i not in users]
        orders = np.array([[*order, *rest] for order in itertools.permutations(users)])
        every = np.repeat(wanted, len(orders), axis=0)
        starts.extend(filled_in_order(every, orders, memory))
    found = scores(np.array(starts))
    share, best, looked = starts[int(found.argmin())], float(found.min()), len(starts)
    pairs = np.array([(i, j) for i in users for j in users if i != j])
    for _ in range(rounds):
        most = np.minimum(share[pairs[:, 0]], wanted[0, pairs[:, 1]] - share[pairs[:, 1]])
        amounts = (most[:, None] * _STEPS).ravel()
        moved = np.repeat(share[None], len(amounts), axis=0)
        rows = np.arange(len(amounts))
        moved[rows, np.repeat(pairs[:, 0], len(_STEPS))] -= amounts
        moved[rows, np.repeat(pairs[:, 1], len(_STEPS))] += amounts
        found = scores(moved)
        looked += len(moved)
        if found.min() >= best * (1 - 1e-9):
            break
        share, best = moved[int(found.argmin())], float(found.min())
    return share, looked
