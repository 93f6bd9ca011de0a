"""The optimum for objectives that are sums of mean responses, cores included.

For each set of tenants that use the accelerator, tenants are placed one after another. A label is a
partial plan: the first two moments of the accelerator's service time so far, and the least cost of
the suffixes for every number of cores. Labels go whose best completion cannot beat the best plan
known, which `multi-start` finds first; so do places of a tenant that another one beats in service
time, load, bytes and suffix at once. What is left is scored in full.

The bound on the wait is three quarters of Pollaczek and Khinchine's with independent misses: the
true wait was 6 % below at the most over random mixes, as misses of one tenant follow those of
another. Under ``lru`` and ``paper`` bounds are without misses where misses depend on all prefixes;
more labels are left. Under pinned residency memory is filled hot first in every plan and improved
for the best.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgewise.errors import ConfigError
from edgewise.placement.descent import descend
from edgewise.placement.memory import wanted_bytes
from edgewise.placement.methods.multi_start import start_places
from edgewise.placement.problem import Problem
from edgewise.placement.scores import ADDITIVE, UNSTABLE, Scores
from edgewise.placement.search import Found, chosen

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

_WAIT_BOUND = 0.75
_CHUNK = 4_096


def find(problem: Problem, *, max_labels: int = 1_000_000, warm: bool = True) -> Found:
    """Search all plans that may be the best.

    Args:
        problem: Tenants and device, objective ``mean`` or ``weighted``.
        max_labels: How many partial plans may be kept at once.
        warm: Whether to begin with what `multi-start` finds; without it much less can be left out.

    Raises:
        ConfigError: Another objective, or more labels would be needed.
    """
    scores = Scores(problem)
    if not scores.additive:
        raise ConfigError(
            f"method 'exact' is for the objectives {' and '.join(ADDITIVE)}, found"
            f" {problem.objective!r}",
            help="use method 'exhaustive' for few tenants, or 'multi-start'",
        )
    best, at, looked = UNSTABLE, np.zeros(len(problem.tenants), dtype=np.int64), 0
    if warm:
        start = descend(
            scores, start_places(problem), moves=(-3, -2, -1, 1, 2, 3), allocate=[scores.split]
        )
        best, at = float(start.rank[start.best]), start.places[start.best]
        looked = start.evaluated
    tables = _Tables.of(scores)
    for least, members, terms in tables.sets_by_bound():
        if least >= best:
            break
        places, bound = tables.labels(members, terms, best, max_labels)
        order = bound.argsort()
        for first in range(0, len(order), _CHUNK):
            rows = order[first : first + _CHUNK]
            rows = rows[bound[rows] < best]
            if not len(rows):
                break
            looked += len(rows)
            part = places[rows]
            rank = scores.rank(part, scores.split(part))
            lowest = int(rank.argmin())
            if rank[lowest] < best:
                best, at = float(rank[lowest]), part[lowest]
    cores = scores.split(at[None])[0]
    return chosen(scores, at, cores, method="exact", evaluated=looked, polish=True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Tables:
    scores: Scores
    service_s: Float64  # the least, [n, p]
    load_s: Float64  # [n, p]
    kept: tuple[Int64, ...]  # places above 0 that no other beats
    misses: bool  # whether α = 1 - q for every set

    @classmethod
    def of(cls, scores: Scores) -> _Tables:
        problem = scores.problem
        tenants, places = problem.service_s.shape
        service = problem.service_s
        every = np.broadcast_to(np.arange(places)[:, None], (places, tenants))
        every = np.minimum(every, problem.last)
        wanted = wanted_bytes(problem, every).T
        if scores.pinned and problem.accelerator is not None:
            stream = np.maximum(problem.prefix_bytes - wanted, 0.0)
            service = problem.base_s + stream / problem.accelerator.in_bytes_per_s
        kept = []
        for i in range(tenants):
            here = np.arange(1, int(problem.last[i]) + 1)
            columns = [service[i], problem.load_s[i], problem.prefix_bytes[i]]
            columns += [problem.base_s[i], wanted[i], *scores.cpu[i].T]
            columns += [*(scores.cpu[i] + scores.alone[i]).T]
            kept.append(here[~_beaten(np.stack(columns, axis=1)[here])])
        return cls(
            scores=scores,
            service_s=service,
            load_s=problem.load_s,
            kept=tuple(kept),
            misses=problem.miss_model == "token",
        )

    def sets_by_bound(self) -> list[tuple[float, Int64, _Terms]]:
        """Sets of tenants on the accelerator, the most promising first; hopeless ones left out."""
        tenants = len(self.kept)
        found = []
        for number in range(1 << tenants):
            members = np.flatnonzero((number >> np.arange(tenants)) & 1)
            if any(len(self.kept[i]) == 0 for i in members):
                continue
            terms = self._terms(members)
            bound = float(self._bound(members, terms.rest_first[0], terms.rest_second[0], 0.0))
            cost = float(terms.rest_cost[0][-1])
            if bound < UNSTABLE:
                found.append((bound + cost, members, terms))
        return sorted(found, key=lambda item: item[0])

    def labels(
        self, members: Int64, terms: _Terms, best: float, most: int
    ) -> tuple[Int64, Float64]:
        """Plans of a set that may beat the best, [L, n], and the least each may cost, [L]."""
        width = self.scores.problem.cores + 1
        places = np.zeros((1, len(self.kept)), dtype=np.int64)
        first, second, cost = np.zeros(1), np.zeros(1), np.zeros((1, width))
        bound = np.zeros(1)
        for i, options in enumerate(terms.places):
            first = (first[:, None] + terms.first[i]).ravel()
            if len(first) > most:
                raise ConfigError(
                    f"method 'exact' would keep {len(first)} partial plans, the limit is {most}",
                    help="use method 'multi-start'",
                )
            second = (second[:, None] + terms.second[i]).ravel()
            cost = _joined(cost, terms.cost[i])
            places = np.repeat(places, len(options), axis=0)
            places[:, i] = np.tile(options, len(places) // len(options))
            suffixes = (cost + terms.rest_cost[i + 1][::-1]).min(axis=1)
            bound = self._bound(
                members,
                first + terms.rest_first[i + 1],
                second + terms.rest_second[i + 1],
                suffixes,
            )
            keep = bound < best
            places, first, second = places[keep], first[keep], second[keep]
            cost, bound = cost[keep], bound[keep]
        return places, bound

    def _bound(
        self, members: Int64, mean_s: Float64, second_s2: Float64, cost: Float64 | float
    ) -> Float64:
        """Least score with these moments or larger ones; no less than unstable where ρ ≥ 1."""
        problem = self.scores.problem
        rate = float(problem.rates[members].sum())
        if rate == 0:
            return np.zeros_like(mean_s) + cost
        calm = float(problem.rates[members] @ problem.costs.arrival_cv2[members]) / rate
        least = _WAIT_BOUND * min(calm, 1.0)
        busy = rate * np.asarray(mean_s)
        wait = least * rate * np.asarray(second_s2) / 2 / (1 - np.minimum(busy, 0.999))
        found: Float64 = wait * float(self.scores.weights[members].sum()) + cost
        return np.where(busy < 1, found, UNSTABLE)

    def _terms(self, members: Int64) -> _Terms:
        problem, scores = self.scores.problem, self.scores
        tenants = len(self.kept)
        rate = float(problem.rates[members].sum())
        suffix = scores.cpu
        if len(members) == 1:
            suffix = suffix.copy()
            suffix[members[0]] += scores.alone[members[0]]
        places, firsts, seconds, costs = [], [], [], []
        for i in range(tenants):
            if i not in members:
                places.append(np.zeros(1, dtype=np.int64))
                firsts.append(np.zeros(1))
                seconds.append(np.zeros(1))
                costs.append(suffix[i, :1])
                continue
            here = self.kept[i]
            share = float(problem.rates[i]) / rate
            miss = 1 - share if self.misses else 0.0
            s, t = self.service_s[i, here], self.load_s[i, here]
            places.append(here)
            firsts.append(share * (s + miss * t))
            seconds.append(share * (s * s + miss * t * (2 * s + t)))
            costs.append(suffix[i, here] + scores.weights[i] * (s + miss * t)[:, None])
        rest_cost = [np.zeros(problem.cores + 1)]
        for cost in reversed(costs):
            rest_cost.append(_joined(rest_cost[-1][None], cost.min(axis=0)[None])[0])
        return _Terms(
            places=tuple(places),
            first=tuple(firsts),
            second=tuple(seconds),
            cost=tuple(costs),
            rest_first=_sums_after([float(v.min()) for v in firsts]),
            rest_second=_sums_after([float(v.min()) for v in seconds]),
            rest_cost=tuple(reversed(rest_cost)),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Terms:
    """What each tenant of one set adds at each place that is left to it, and the rest at least."""

    places: tuple[Int64, ...]  # n arrays [p]
    first: tuple[Float64, ...]  # to E[S], [p]
    second: tuple[Float64, ...]  # to E[S²], [p]
    cost: tuple[Float64, ...]  # to the score beside the wait, [p, k]
    rest_first: Float64  # of this tenant and later ones, [n + 1]
    rest_second: Float64  # [n + 1]
    rest_cost: tuple[Float64, ...]  # with at most k cores, n + 1 arrays [k]


def _sums_after(values: list[float]) -> Float64:
    return np.array([sum(values[i:]) for i in range(len(values) + 1)])


def _joined(first: Float64, second: Float64) -> Float64:
    """Least cost of two together for every number of cores, [A B, k]."""
    many, width = first.shape
    found = np.full((many, len(second), width), np.inf)
    for k in range(width):
        both = first[:, None, : width - k] + second[None, :, k, None]
        found[:, :, k:] = np.minimum(found[:, :, k:], both)
    return found.reshape(-1, width)


def _beaten(columns: Float64) -> npt.NDArray[np.bool_]:
    """Rows that another row is at most as large as in every column; of equals the first stays."""
    less = np.asarray((columns[:, None] <= columns[None]).all(axis=2))  # [better, worse]
    same = less & less.T
    earlier = np.tri(len(columns), k=-1, dtype=bool).T
    found: npt.NDArray[np.bool_] = (less & (~same | earlier)).any(axis=0)
    return found
