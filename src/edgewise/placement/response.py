"""What a plan would give: response times of all tenants, for many candidate plans at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgewise.placement import queueing
from edgewise.placement.cache import Service, mixed_service
from edgewise.placement.problem import Problem

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

OVERLOAD_COST_S = 1e3  # of one unit of utilisation too much: more than any wait
_CLIP = 0.999
_FEW = 2_000  # response times whose quantiles are sought by sixteenths, not by halves
_BITS = 50


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluation:
    """M candidates, n tenants.

    Attributes:
        score: What a search minimises, [M]: the objective, plus `OVERLOAD_COST_S` for each unit
            of utilisation that is too much, so that unstable candidates can be compared.
        stable: Whether every queue is, [M].
        response_s: R_i, [M, n]; infinite where one of its queues is unstable.
        accelerator_wait_s: Of a request with a prefix, [M].
        accelerator_busy: ρ, [M].
        miss: α_i, [M, n].
        service_s: s_i at its place, [M, n].
        load_s: T_i at its place, [M, n].
        cpu_s: Time of the suffix, [M, n].
        cpu_wait_s: Wait in front of it, [M, n].
        cpu_busy: Utilisation of its cores, [M, n].
        cpu_waits: Probability of waiting there, [M, n].
    """

    score: Float64
    stable: npt.NDArray[np.bool_]
    response_s: Float64
    accelerator_wait_s: Float64
    accelerator_busy: Float64
    miss: Float64
    service_s: Float64
    load_s: Float64
    cpu_s: Float64
    cpu_wait_s: Float64
    cpu_busy: Float64
    cpu_waits: Float64


def evaluate(
    problem: Problem, places: Int64, cores: Int64, *, shares_bytes: Float64 | None = None
) -> Evaluation:
    """Predict response times of candidate plans.

    R_i = [p_i > 0] (W + s_i + α_i T_i) + [p_i < P_i] (W_cpu,i + c_i), with W the wait of the shared
    accelerator.

    Args:
        problem: Costs and rates.
        places: p_i, [M, n], each 0 to P_i.
        cores: k_i, [M, n], each 0 to K; none where no suffix is left.
        shares_bytes: Accelerator memory of each tenant, [M, n], for pinned residency.

    Source:
        Ng et al., SwapLess (arXiv:2602.17808), equations 1 to 10 as reconstructed; corrections are
        named in `queueing`, `cache` and docs/background/placement.md.
    """
    rows = np.arange(places.shape[1])
    held = np.minimum(cores, problem.cores)
    uses = places > 0  # [M, n]
    shared = shared_wait(problem, places, shares_bytes=shares_bytes)
    service, load, queue = shared.service_s, shared.load_s, shared.queue
    busy, wait = shared.busy, shared.wait_s

    cpu_s = problem.cpu_s[rows, places, held]
    cpu_wait = _tandem(problem, places, held, service, problem.cpu_wait_s[rows, places, held])
    cpu_busy = problem.cpu_busy[rows, places, held]
    excess = queueing.overload(busy) + queueing.overload(cpu_busy).sum(axis=1)
    excess = excess + np.maximum(cores.sum(axis=1) - problem.cores, 0)
    stable = excess == 0
    finite = np.where(uses, wait[:, None] + service + queue.miss * load, 0.0) + cpu_wait + cpu_s
    lost = (uses & (busy >= 1)[:, None]) | (cpu_busy >= 1)
    found = Evaluation(
        score=np.zeros(len(places)),
        stable=stable,
        response_s=np.where(lost, np.inf, finite),
        accelerator_wait_s=np.where(busy < 1, wait, np.inf),
        accelerator_busy=busy,
        miss=queue.miss,
        service_s=service,
        load_s=load,
        cpu_s=cpu_s,
        cpu_wait_s=np.where(cpu_busy < 1, cpu_wait, np.inf),
        cpu_busy=cpu_busy,
        cpu_waits=problem.cpu_waits[rows, places, held],
    )
    found.score[:] = _objective(problem, found, finite) + OVERLOAD_COST_S * excess
    return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedWait:
    """The accelerator's queue under M candidates.

    Attributes:
        wait_s: Mean wait, clipped where it is unstable, [M].
        busy: ρ, [M].
        service_s: s_i at its place, [M, n].
        load_s: T_i at its place, [M, n].
        queue: Moments of the service time, and misses.
    """

    wait_s: Float64
    busy: Float64
    service_s: Float64
    load_s: Float64
    queue: Service


def shared_wait(
    problem: Problem, places: Int64, *, shares_bytes: Float64 | None = None
) -> SharedWait:
    """Wait for the accelerator under candidate places.

    Args:
        problem: Costs and rates.
        places: p_i, [M, n].
        shares_bytes: As for `evaluate`.
    """
    rows = np.arange(places.shape[1])
    uses = places > 0  # [M, n]
    service = problem.service_s[rows, places]
    load = problem.load_s[rows, places]
    sizes = problem.prefix_bytes[rows, places]
    if problem.residency == "pinned" and problem.accelerator is not None:
        room = np.zeros_like(sizes) if shares_bytes is None else shares_bytes
        stream = np.maximum(sizes - room, 0.0) / problem.accelerator.in_bytes_per_s
        service = problem.base_s[rows, places] + np.where(uses, stream, 0.0)
    rate = (problem.rates * uses).sum(axis=1)  # Λ, [M]
    shares = problem.rates * uses / np.maximum(rate, 1e-300)[:, None]
    queue = mixed_service(
        shares,
        service,
        load,
        np.minimum(sizes, problem.sram_bytes[rows, places]),
        sram_bytes=problem.accelerator.sram_bytes if problem.accelerator else 0.0,
        model=problem.miss_model,
        rate=rate if problem.assumptions.correlated else None,
    )
    busy = rate * queue.mean_s
    with np.errstate(divide="ignore", invalid="ignore"):
        clipped = np.where(busy < _CLIP, rate, _CLIP / np.where(busy > 0, queue.mean_s, 1.0))
    covariance = queue.covariance_s2 if problem.assumptions.correlated else 0.0 * rate
    wait = queueing.correlated_wait_s(
        clipped, queue.mean_s, queue.second_s2, covariance, fresh_s=queue.fresh_s
    )
    wait = wait * _burstiness(problem, shares, queue.mean_s, queue.second_s2)
    return SharedWait(wait_s=wait, busy=busy, service_s=service, load_s=load, queue=queue)


def _burstiness(
    problem: Problem, shares: Float64, mean_s: Float64, second_s2: Float64
) -> Float64 | float:
    """(C_a² + C_s²) / (1 + C_s²) of the merged arrivals: each tenant's C_a² by its share."""
    own = np.array([t.arrival_cv2 for t in problem.tenants])
    if (own == 1).all():
        return 1.0
    arrivals = np.where(mean_s > 0, (shares * own).sum(axis=1), 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        services = np.where(mean_s > 0, second_s2 / np.maximum(mean_s, 1e-300) ** 2 - 1, 0.0)
    found: Float64 = (arrivals + services) / (1 + services)
    return found


def _tandem(
    problem: Problem, places: Int64, cores: Int64, service: Float64, wait: Float64
) -> Float64:
    """Replace the wait of a pool that one tenant alone feeds from the accelerator."""
    uses = places > 0
    alone = uses & (uses.sum(axis=1, keepdims=True) == 1) & (places < problem.last)
    if not (problem.assumptions.tandem and alone.any()):
        return wait
    wait = wait.copy()
    candidates, tenants = np.nonzero(alone)
    at = (tenants, places[candidates, tenants], cores[candidates, tenants])
    wait[candidates, tenants] = fed_alone_wait_s(problem, at, service[candidates, tenants])
    return wait


def fed_alone_wait_s(problem: Problem, at: tuple[Int64, Int64, Int64], first_s: Float64) -> Float64:
    """Wait in front of a suffix whose tenant alone uses the accelerator, any shape.

    Args:
        problem: Costs and rates.
        at: Tenants, places above 0 and cores: indices that broadcast together.
        first_s: Time of the prefix.
    """
    tenants, places, _ = at
    workers, wait = problem.workers[at], problem.cpu_wait_s[at]
    rate = problem.rates[tenants]
    usable = (workers > 0) & (problem.cpu_busy[at] < _CLIP) & (rate * first_s < _CLIP)
    usable = usable & (problem.costs.arrival_cv2[tenants] == 1.0)
    found = queueing.tandem_pool_wait_s(
        rate,
        first_s,
        problem.cpu_s[at],
        np.maximum(workers, 1),
        service_cv2=problem.cpu_cv2[tenants, places],
        method=problem.assumptions.multi_server,
    )
    return np.where(usable, found, wait)


def response_tail(found: Evaluation, t_s: Float64, *, clip: bool = False) -> Float64:
    """P(R_i > t), [M, n].

    Waits at the accelerator and at the cores are taken as independent, each zero or exponential;
    a miss adds the load.

    Args:
        found: The evaluation.
        t_s: [M, n] or what broadcasts to it.
        clip: Give an unstable queue the longest finite wait instead of 1 for every t.
    """
    uses = found.service_s > 0
    wait = np.where(uses, found.accelerator_wait_s[:, None], 0.0)
    busy = np.where(uses, np.minimum(found.accelerator_busy, 1.0)[:, None], 0.0)
    cpu_wait = found.cpu_wait_s
    if clip:
        wait, cpu_wait = (np.where(np.isinf(w), 1e2, w) for w in (wait, cpu_wait))
    fixed = found.service_s + found.cpu_s
    total = np.zeros(np.broadcast_shapes(fixed.shape, np.shape(t_s)))
    for chance, more in ((1 - found.miss, 0.0), (found.miss, found.load_s)):
        total = total + chance * queueing.waiting_tail(
            np.asarray(t_s) - fixed - more,
            first_busy=busy,
            first_s=wait,
            second_busy=found.cpu_waits,
            second_s=cpu_wait,
        )
    return total


def response_quantile_s(found: Evaluation, q: float, *, clip: bool = False) -> Float64:
    """Time that a share ``q`` of each tenant's requests stays under, [M, n]; infinite if unstable.

    Args:
        found: The evaluation.
        q: 0 to 1, exclusive.
        clip: As for `response_tail`.
    """
    low = np.zeros_like(found.response_s)
    mean = np.where(np.isinf(found.response_s), 1e3, found.response_s)
    high = mean * 4 / (1 - q)  # far beyond Markov's bound
    # Few candidates: many instants at once cost hardly more than one.
    parts = 16 if low.size <= _FEW else 2
    inside = np.arange(1, parts)[:, None, None] / parts
    for _ in range(math.ceil(_BITS / math.log2(parts))):
        width = high - low
        above = response_tail(found, low + inside * width, clip=clip) > 1 - q
        passed = above.sum(axis=0)
        low, high = low + passed / parts * width, low + (passed + 1) / parts * width
    return np.where(np.isinf(found.response_s) & (not clip), np.inf, high)


def _objective(problem: Problem, found: Evaluation, finite_s: Float64) -> Float64:
    """The objective with clipped waits, [M]."""
    rates = problem.rates / problem.rates.sum()
    if problem.objective == "mean":
        return np.asarray(finite_s @ rates)
    if problem.objective == "weighted":
        weights = problem.rates * np.array([t.weight for t in problem.tenants])
        return np.asarray(finite_s @ (weights / max(weights.sum(), 1e-300)))
    if problem.objective == "max-min":
        return np.asarray((finite_s / ideal_s(problem)).max(axis=1))
    if problem.objective == "p99":
        return np.asarray(response_quantile_s(found, 0.99, clip=True) @ rates)
    deadlines = np.array([t.deadline_s or np.inf for t in problem.tenants])
    misses = response_tail(found, deadlines, clip=True) @ rates
    # Ties are common where nothing is late: the shorter mean wins.
    return np.asarray(misses + 1e-3 * (finite_s @ rates))


def ideal_s(problem: Problem) -> Float64:
    """What each tenant's response is held against under ``max-min``, [n].

    Its deadline where it has one, else its best response alone on the idle machine.
    """
    found = []
    for i, tenant in enumerate(problem.tenants):
        stop = problem.last[i] + 1
        alone = problem.service_s[i, :stop] + problem.cpu_s[i, :stop, 1:].min(
            axis=1, initial=np.inf
        )
        found.append(tenant.deadline_s or float(alone.min()))
    return np.array(found)
