"""Going downhill from several plans at once: all candidate moves of a step are one array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgewise.placement.scores import Scores

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Allocate = Callable[[Int64], Int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Descent:
    """Where each start ended.

    Attributes:
        places: p, [S, n].
        cores: k, [S, n].
        rank: [S].
        steps: How many steps were taken together.
        evaluated: How many candidates were looked at.
    """

    places: Int64
    cores: Int64
    rank: Float64
    steps: int
    evaluated: int

    @property
    def best(self) -> int:
        """Which start ended lowest."""
        return int(self.rank.argmin())


def descend(
    scores: Scores,
    starts: Int64,
    *,
    moves: Sequence[int],
    allocate: Sequence[Allocate],
    transfers: bool = False,
) -> Descent:
    """Take the best move of all tenants until none is better, from every start.

    Args:
        scores: Ranks candidates.
        starts: Places, [S, n].
        moves: By how many places a tenant may move in one step.
        allocate: Rules that give cores to places; each makes candidates of its own.
        transfers: Whether one core may move from a tenant to another at the same places.
    """
    last = scores.problem.last
    tenants = len(last)
    steps = np.zeros((tenants * len(moves), tenants), dtype=np.int64)
    steps[np.arange(len(steps)), np.repeat(np.arange(tenants), len(moves))] = np.tile(
        np.asarray(moves), tenants
    )
    give = _transfers(tenants) if transfers and tenants > 1 else None
    places = starts.copy()
    options = [rule(places) for rule in allocate]
    ranks = np.array([scores.rank(places, cores) for cores in options])
    pick = ranks.argmin(axis=0)
    cores = np.array(options)[pick, np.arange(len(places))]
    reached = ranks.min(axis=0)
    active = np.arange(len(places))
    taken, looked = 0, ranks.size
    while len(active):
        # A move past the end is a shorter one, or none.
        near = np.minimum(np.maximum(places[active, None, :] + steps, 0), last)
        flat = near.reshape(-1, tenants)
        candidates = [(flat, rule(flat)) for rule in allocate]
        if give is not None:
            moved = cores[active, None, :] + give
            # Who has none gives none: the others keep theirs.
            moved = np.where((moved < 0).any(axis=2)[:, :, None], cores[active, None, :], moved)
            same = np.repeat(places[active], len(give), axis=0)
            candidates.append((same, moved.reshape(-1, tenants)))
        best_places, best_cores, lowest = places[active], cores[active], reached[active]
        lowest = lowest * (1 - 1e-12)
        lower = np.zeros(len(active), dtype=bool)
        for near_places, near_cores in candidates:
            found = scores.rank(near_places, near_cores).reshape(len(active), -1)
            looked += found.size
            pick = found.argmin(axis=1)
            least = found.min(axis=1)
            better = least < lowest
            if better.any():
                rows = (np.arange(len(active)) * found.shape[1] + pick)[better]
                best_places[better], best_cores[better] = near_places[rows], near_cores[rows]
                lowest = np.minimum(lowest, least)
                lower |= better
        active = active[lower]
        places[active], cores[active] = best_places[lower], best_cores[lower]
        reached[active] = lowest[lower]
        taken += 1
    return Descent(places=places, cores=cores, rank=reached, steps=taken - 1, evaluated=looked)


def _transfers(tenants: int) -> Int64:
    """One core from each tenant to each other, [n (n - 1), n]."""
    pairs = [(i, j) for i in range(tenants) for j in range(tenants) if i != j]
    found = np.zeros((len(pairs), tenants), dtype=np.int64)
    for row, (i, j) in enumerate(pairs):
        found[row, i], found[row, j] = -1, 1
    return found
