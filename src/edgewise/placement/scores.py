"""How good candidate plans are, for a search: few array operations for thousands of candidates.

`evaluate` says everything about a plan; a search needs one number. Where the objective is a sum
over tenants, cores act on a tenant's own suffix alone, so that part is a table; the accelerator's
queue is a function of a few sums over tenants, each of them a table as well. `tests` hold every
score against `evaluate`.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from edgewise.placement import queueing
from edgewise.placement.cores import best_split, proportional
from edgewise.placement.memory import hot_first, wanted_bytes
from edgewise.placement.problem import Objective, Problem
from edgewise.placement.response import (
    OVERLOAD_COST_S,
    evaluate,
    fed_alone_wait_s,
    shared_wait,
)

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

ADDITIVE: Final[tuple[Objective, ...]] = ("mean", "weighted")
UNSTABLE: Final = 1e9  # added to the score of what cannot run: it is never preferred to what can
_CLIP = 0.999  # as in `response`
_TINY = 1e-100


class Scores:
    """Ranks candidate plans of one problem.

    Args:
        problem: Costs and rates.

    Attributes:
        problem: As given.
        additive: Whether the objective is a sum over tenants of their mean responses.
        offered: Load of each suffix on one core, [n, p].
        weights: What a second of each tenant's response counts, [n]; of the mean where the
            objective is not additive.
        cpu: What suffixes cost, [n, p, k]: weighted seconds and overload.
        alone: What to add where the tenant alone uses the accelerator, [n, p, k].
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.additive = problem.objective in ADDITIVE
        self.pinned = problem.residency == "pinned" and problem.accelerator is not None
        self._model = problem.miss_model
        rates = problem.rates
        own = rates * problem.costs.weights if problem.objective == "weighted" else rates
        self.weights = own / max(float(own.sum()), 1e-300)
        self.offered = rates[:, None] * problem.cpu_s[:, :, 1]
        overload = queueing.overload(problem.cpu_busy)
        response = problem.cpu_wait_s + problem.cpu_s
        self.cpu = self.weights[:, None, None] * response + OVERLOAD_COST_S * overload
        self.alone = self.weights[:, None, None] * self._fed_alone()
        self._suffixes = np.stack([self.cpu, overload], axis=3).reshape(-1, 2)
        tenants, places, self._width = problem.cpu_s.shape
        self._rows = np.arange(tenants)
        self._first = self._rows * places
        self._regular = bool((problem.costs.arrival_cv2 == 1).all())
        self._correlated = problem.assumptions.correlated and self._model != "pinned"
        if not self.pinned and self._model != "lru":
            self._sums = self._features()

    def rank(self, places: Int64, cores: Int64) -> Float64:
        """Score candidates, lower is better; what cannot run comes after all that can.

        Args:
            places: p, [M, n].
            cores: k, [M, n], at most K in a row.
        """
        if not self.additive:
            found = evaluate(self.problem, places, cores, shares_bytes=self.shares_bytes(places))
            return found.score + np.where(found.stable, 0.0, UNSTABLE)
        shared, busy, users = self.accelerator(places)
        where = (places + self._first) * self._width + cores
        cpu = self._suffixes.take(where, axis=0).sum(axis=1)
        if users.min() <= 1:
            cpu[:, 0] += (users == 1) * self.alone.take(where).sum(axis=1)
        found_rank: Float64 = shared + cpu[:, 0] + UNSTABLE * (cpu[:, 1] + (busy >= 1) > 0)
        if busy.max() >= 1:
            found_rank += OVERLOAD_COST_S * queueing.overload(busy)
        return found_rank

    def shares_bytes(self, places: Int64) -> Float64 | None:
        """Memory of each tenant under pinned residency, hot ones first, [M, n]; else ``None``."""
        return hot_first(self.problem, places) if self.pinned else None

    def proportional(self, places: Int64) -> Int64:
        """Cores by load, [M, n]."""
        return proportional(self.offered.take(places + self._first), self.problem.cores)

    def split(self, places: Int64) -> Int64:
        """Cores with the least weighted mean of suffix times, [M, n]: optimal where additive."""
        return best_split(self.suffix_costs(places))[0]

    def suffix_costs(self, places: Int64) -> Float64:
        """What each suffix costs with k cores, [M, n, k]."""
        found = self.cpu[self._rows, places]
        only = (places > 0).sum(axis=1) == 1
        if only.any():
            found = found + only[:, None, None] * self.alone[self._rows, places]
        return found

    def accelerator(self, places: Int64) -> tuple[Float64, Float64, Float64]:
        """Weighted seconds on it, the wait clipped where unstable; its ρ; how many use it: [M]."""
        if self.pinned or self._model == "lru":
            shared = shared_wait(self.problem, places, shares_bytes=self.shares_bytes(places))
            uses = places > 0
            spent = shared.wait_s[:, None] + shared.service_s + shared.queue.miss * shared.load_s
            return np.where(uses, spent, 0.0) @ self.weights, shared.busy, uses.sum(axis=1)
        return self._from_sums(places)

    def _features(self) -> Float64:
        """Tables whose sums over tenants give the accelerator's queue, [n p, 18]."""
        problem = self.problem
        runs = (np.arange(problem.service_s.shape[1]) > 0) * 1.0
        rate = problem.rates[:, None] * runs
        weight = self.weights[:, None] * runs
        s, t = problem.service_s, problem.load_s
        if self._model == "pinned":
            t = np.zeros_like(t)
        load, load2 = rate * t, rate * rate * t
        columns = (
            rate * (s + t),
            rate * (s + t) ** 2 / 2,
            load2 * (s + t),
            weight * (s + t),
            load2,
            load2 * (2 * s + t) / 2,
            load2 * load,
            weight * load,
            rate,
            np.broadcast_to(runs, s.shape),
            weight,
            rate * s,
            rate * s * s / 2,
            weight * s,
            problem.prefix_bytes * runs,
            rate * problem.costs.arrival_cv2[:, None],
            s,
            t,
        )
        return np.stack(columns, axis=2).reshape(-1, len(columns))

    def _from_sums(self, places: Int64) -> tuple[Float64, Float64, Float64]:
        """As `cache.mixed_service` and `response.shared_wait`, from sums over tenants.

        With α_i = 1 - q_i: E[S] = Σ q (s + T) - Σ q² T, E[S²] = Σ q (s + T)² - Σ q² (2 s T + T²),
        U = Σ q² T, κ = E[S] U - Σ q² T (s + T) + Σ q³ T².
        """
        each = self._sums.take(places + self._first, axis=0)  # [M, n, F]
        sums = each.sum(axis=1).T
        rate, users = sums[8], sums[9]
        part = 1 / np.maximum(rate, _TINY)
        sum_s, half, product, cost = sums[:4] - sums[4:8] * part
        fits = None
        if self._model == "paper" and self.problem.accelerator is not None:
            fits = sums[14] <= self.problem.accelerator.sram_bytes
            sum_s, half = np.where(fits, sums[11], sum_s), np.where(fits, sums[12], half)
            cost = np.where(fits, sums[13], cost)
        mean, half = sum_s * part, half * part  # E[S], E[S²] / 2
        clipped = np.minimum(rate, _CLIP / np.maximum(mean, _TINY))
        more = half
        if self._correlated:
            repeat = sums[4] * part * part  # U
            covariance = mean * repeat - product * part * part
            more = half + (covariance if fits is None else np.where(fits, 0.0, covariance))
        wait = clipped * more / (1 - clipped * mean)
        if self._correlated:
            # What an idle device is left with: states weigh by exp(-Λ S).
            share = each[:, :, 8] * part[:, None]
            quiet = np.exp(each[:, :, 16:] * -clipped[:, None, None])
            calm = quiet[:, :, 1]
            decay = quiet[:, :, 0] * share * (calm + share * (1 - calm))
            loads = (decay * share * each[:, :, 17]).sum(axis=1)
            fresh = repeat - loads / np.maximum(decay.sum(axis=1), _TINY)
            wait = wait + (fresh if fits is None else np.where(fits, 0.0, fresh))
            wait = np.maximum(wait, 0.0)
        if not self._regular:
            used = users > 0
            arrivals = np.where(used, sums[15] * part, 1.0)
            services = np.where(used, 2 * half / np.maximum(mean, _TINY) ** 2 - 1, 0.0)
            wait = wait * (arrivals + services) / (1 + services)
        score: Float64 = sums[10] * wait + cost
        return score, rate * mean, users

    def _fed_alone(self) -> Float64:
        """How much less a suffix waits where its tenant alone uses the accelerator, [n, p, k]."""
        problem = self.problem
        less = np.zeros(problem.cpu_s.shape)
        if not problem.assumptions.tandem or problem.accelerator is None:
            return less
        service = problem.service_s
        if self.pinned:
            every = np.minimum(np.arange(service.shape[1])[:, None], problem.last)
            stream = np.maximum(problem.prefix_bytes - wanted_bytes(problem, every).T, 0.0)
            service = problem.base_s + stream / problem.accelerator.in_bytes_per_s
        # Neither without a prefix nor without a core is there anything to feed.
        n, p, k = problem.cpu_s.shape
        at = (
            np.arange(n)[:, None, None],
            np.arange(1, p)[None, :, None],
            np.arange(1, k)[None, None, :],
        )
        wait = fed_alone_wait_s(problem, at, service[:, 1:, None])
        less[:, 1:, 1:] = (wait - problem.cpu_wait_s[:, 1:, 1:]) * problem.costs.left[:, 1:, None]
        return less
