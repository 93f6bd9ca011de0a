"""What one plan would give, as exactly as formulas can: `evaluate`, refined.

A search takes arrivals at a tenant's cores as Poisson, which makes suffixes independent of the
other tenants, and waits as exponential. For the plan that was chosen this module takes arrivals as
what leaves the accelerator, and waits with their second moments.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from edgewise.placement import queueing
from edgewise.placement.problem import Problem
from edgewise.placement.response import (
    Evaluation,
    SharedWait,
    _objective,
    evaluate,
    shared_wait,
)

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

# Of the bracket around a quantile in one array, and how often: to 17^-8, 1e-10 of the bracket.
_SECTIONS, _PASSES = 17, 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Forecast(Evaluation):
    """An evaluation with what quantiles need.

    Attributes:
        accelerator_spread: E[W²] / E[W]² of a wait that is not 0, [M]; 2 for an exponential one.
        cpu_spread: The same of the waits for cores, [M, n].
    """

    accelerator_spread: Float64
    cpu_spread: Float64


def forecast(
    problem: Problem, places: Int64, cores: Int64, *, shares_bytes: Float64 | None = None
) -> Forecast:
    """Predict response times as `evaluate` does, and waits for cores behind a shared accelerator.

    Args:
        problem: Costs and rates.
        places: p, [M, n].
        cores: k, [M, n].
        shares_bytes: As for `evaluate`.
    """
    found = evaluate(problem, places, cores, shares_bytes=shares_bytes)
    shared = shared_wait(problem, places, shares_bytes=shares_bytes)
    values = {f.name: getattr(found, f.name) for f in fields(Evaluation)}
    poisson = all(t.arrival_cv2 == 1 for t in problem.tenants)
    if problem.assumptions.tandem and poisson:
        wait = _fed(problem, places, cores, found, shared)
        with np.errstate(divide="ignore", invalid="ignore"):
            more = np.where(np.isfinite(wait), wait - found.cpu_wait_s, 0.0)
            ratio = np.where(found.cpu_wait_s > 0, wait / found.cpu_wait_s, 1.0)
        values["cpu_wait_s"] = wait
        values["response_s"] = found.response_s + more
        # Longer waits are in part more of them.
        values["cpu_waits"] = np.minimum(found.cpu_waits * np.sqrt(np.minimum(ratio, 1e6)), 1.0)
    cv2 = np.minimum(problem.cpu_cv2[np.arange(places.shape[1]), places], 1.0)
    constant = (4 + 2 * np.minimum(found.cpu_busy, 1.0)) / 3  # M/D/1, given that it waits
    refined = Forecast(
        **values,
        accelerator_spread=_spread(problem, places, found, shared),
        cpu_spread=(1 - cv2) * constant + cv2 * 2,
    )
    score = np.where(refined.stable, refined.response_s.T, 0.0).T
    refined.score[:] = np.where(refined.stable, _objective(problem, refined, score), found.score)
    return refined


def _fed(
    problem: Problem, places: Int64, cores: Int64, found: Evaluation, shared: SharedWait
) -> Float64:
    """Waits for cores, with those behind an accelerator that others use as well replaced."""
    rows = np.arange(places.shape[1])
    rates = problem.rates * (places > 0)
    workers = problem.workers[rows, places, np.minimum(cores, problem.cores)]
    several = (rates > 0).sum(axis=1, keepdims=True) > 1
    fed = (rates > 0) & several & (workers > 0) & (shared.busy < 1)[:, None] & (found.cpu_busy < 1)
    if not fed.any():
        return found.cpu_wait_s
    rate = np.broadcast_to(problem.rates, places.shape)
    feed = queueing.Feed(
        share=rates / np.maximum(rates.sum(axis=1, keepdims=True), 1e-300),
        first_s=found.service_s,
        caused_s=found.service_s + found.miss * found.load_s + shared.queue.ahead_s,
        busy=np.broadcast_to(shared.busy[:, None], places.shape),
        mean_s=np.broadcast_to(shared.queue.mean_s[:, None], places.shape),
        second_s2=np.broadcast_to(shared.queue.second_s2[:, None], places.shape),
    )
    wait = queueing.fed_pool_wait_s(
        rate,
        found.cpu_s,
        np.maximum(workers, 1),
        feed,
        service_cv2=problem.cpu_cv2[rows, places],
        method=problem.assumptions.multi_server,
    )
    return np.where(fed, wait, found.cpu_wait_s)


def _spread(problem: Problem, places: Int64, found: Evaluation, shared: SharedWait) -> Float64:
    """E[W²] / E[W]² at the accelerator given W > 0: E[W²] = 2 W² + Λ E[S³] / (3 (1 - ρ)).

    Source:
        Takács' recursion for M/G/1 (1962), with the W of dependent services in the place of theirs.
    """
    rates = problem.rates * (places > 0)
    loaded = found.service_s + found.load_s
    third = rates * ((1 - found.miss) * found.service_s**3 + found.miss * loaded**3)
    busy = np.minimum(shared.busy, 0.999)
    wait = np.where(shared.wait_s > 0, shared.wait_s, 1.0)
    random = np.where(shared.wait_s > 0, third.sum(axis=1) / (3 * (1 - busy)) / wait**2, 0.0)
    return np.asarray(busy * (2 + random))


def forecast_tail(found: Forecast, t_s: Float64 | float) -> Float64:
    """P(R_i > t), [M, n].

    Waits at the accelerator and at the cores are taken as independent, their sum as 0 or gamma with
    its first two moments; a miss adds the load.

    Args:
        found: The forecast.
        t_s: [M, n] or what broadcasts to it.
    """
    uses = found.service_s > 0
    beyond = np.asarray(t_s) - found.service_s - found.cpu_s
    total = np.zeros(np.broadcast_shapes(found.response_s.shape, beyond.shape))
    for chance, more in ((1 - found.miss, 0.0), (found.miss, found.load_s)):
        total = total + chance * queueing.gamma_tail(
            beyond - more,
            first=(
                np.where(uses, np.minimum(found.accelerator_busy, 1.0)[:, None], 0.0),
                np.where(uses, found.accelerator_wait_s[:, None], 0.0),
                found.accelerator_spread[:, None],
            ),
            second=(found.cpu_waits, found.cpu_wait_s, found.cpu_spread),
        )
    return np.where(np.isinf(found.response_s), 1.0, total)


def forecast_quantile_s(found: Forecast, q: float) -> Float64:
    """Time that a share ``q`` of each tenant's requests stays under, [M, n]; infinite if unstable.

    Args:
        found: The forecast.
        q: 0 to 1, exclusive.
    """
    low = np.zeros_like(found.response_s)
    high = np.where(np.isinf(found.response_s), 1.0, found.response_s) / (1 - q)  # Markov's bound
    marks = (np.arange(1, _SECTIONS) / _SECTIONS)[:, None, None]
    for _ in range(_PASSES):
        width = (high - low) / _SECTIONS
        above = forecast_tail(found, low + marks * (high - low)) > 1 - q  # [sections - 1, M, n]
        low = low + width * above.sum(axis=0)
        high = low + width
    return np.where(np.isinf(found.response_s), np.inf, high)
