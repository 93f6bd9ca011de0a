"""Waiting times in closed form, for arrays of candidates at once.

Rates are per second, times seconds. An unstable queue waits for ever: ``math.inf``. Searches that
must compare unstable candidates add `overload` to a wait computed at a clipped utilisation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]
MultiServer = Literal["lee-longton", "cosmetatos"]


def pollaczek_khinchine_s(rate: Float64, mean_s: Float64, second_s2: Float64) -> Float64:
    """Mean wait of M/G/1, first come first served: Λ E[S²] / (2 (1 - ρ)), ρ = Λ E[S].

    Exact for independent service times. Where the time depends on whether the previous request
    was of the same class, see `correlated_wait_s`.

    Args:
        rate: Λ, any shape.
        mean_s: E[S], same shape.
        second_s2: E[S²], seconds squared, same shape.

    Source:
        Pollaczek (1930), Khinchine (1932); any text on queues.
    """
    return correlated_wait_s(rate, mean_s, second_s2, np.zeros_like(mean_s))


def correlated_wait_s(
    rate: Float64,
    mean_s: Float64,
    second_s2: Float64,
    covariance_s2: Float64,
    *,
    fresh_s: Float64 | float | None = None,
) -> Float64:
    """Mean wait of a single server whose service times depend on those before.

    W = Λ (E[S²] / 2 + κ) / (1 - ρ) + f is exact, with κ the sum of the covariances of a service
    time with all later ones, and f what later services cost more, all together, in the state that
    an idle period leaves than on average. κ is exact in heavy traffic; f, which has the other sign,
    cancels it in light traffic. Without f it is interpolated as -Λ κ, which gives
    W ≈ Λ (E[S²] / 2 + ρ κ) / (1 - ρ) and was seen wrong by up to 6 % of the wait.

    Args:
        rate: Λ, any shape.
        mean_s: E[S].
        second_s2: E[S²].
        covariance_s2: κ; zero, without f, gives Pollaczek-Khinchine.
        fresh_s: f, from `cache.mixed_service`, whose approximation of it is within 2 % of the wait.

    Source:
        Second moments of Lindley's recursion with the Poisson equation of the modulating chain;
        derived in docs/background/placement.md. Exact transforms of such queues: M. F. Neuts, "The
        single server queue with Poisson input and semi-Markov service times", J. Appl. Prob. 3
        (1966).
    """
    load = rate * mean_s
    correlated = load * covariance_s2 if fresh_s is None else covariance_s2
    with np.errstate(divide="ignore", invalid="ignore"):
        wait_s = rate * (second_s2 / 2 + correlated) / (1 - load)
        if fresh_s is not None:
            wait_s = wait_s + fresh_s
    # Strongly negative covariance at a high load may pass the form's limits.
    return np.where(load < 1, np.maximum(wait_s, 0.0), np.inf)


def erlang_c(offered: Float64, servers: npt.NDArray[np.int64]) -> Float64:
    """Probability that a request must wait in M/M/k; 1 where the load is k or more.

    By Erlang's B recursion, which cannot overflow.

    Args:
        offered: a = λ c, any shape.
        servers: k, at least 1, same shape.

    Source:
        A. K. Erlang (1917); B(a, k) = a B(a, k-1) / (k + a B(a, k-1)), C = B / (1 - u (1 - B)).
    """
    blocked = np.ones_like(offered)
    for k in range(1, int(servers.max(initial=1)) + 1):
        step = offered * blocked / (k + offered * blocked)
        blocked = np.where(k <= servers, step, blocked)
    busy = np.minimum(offered / servers, 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        waits = blocked / (1 - busy * (1 - blocked))
    return np.where(busy < 1, waits, 1.0)


def mmk_wait_s(rate: Float64, service_s: Float64, servers: npt.NDArray[np.int64]) -> Float64:
    """Mean wait of M/M/k: C c / (k (1 - u)).

    Args:
        rate: λ, any shape.
        service_s: c, mean.
        servers: k, at least 1.
    """
    busy = rate * service_s / servers
    with np.errstate(divide="ignore", invalid="ignore"):
        wait_s = erlang_c(rate * service_s, servers) * service_s / (servers * (1 - busy))
    return np.where(busy < 1, wait_s, np.inf)


def mdk_wait_s(
    rate: Float64,
    service_s: Float64,
    servers: npt.NDArray[np.int64],
    *,
    method: MultiServer = "cosmetatos",
) -> Float64:
    """Mean wait of M/D/k: constant service times, k servers, one queue.

    ``lee-longton`` is half of M/M/k's; at half load it says an eighth too little for four servers,
    at a load of 0.3 a fifth. ``cosmetatos`` multiplies by
    1 + (1 - u)(k - 1)(√(4 + 5k) - 2) / (16 k u) and is within 1 % from half load on, for up to
    eight servers; below, where there is next to no wait, it says too much (3 % at 0.3, 12 % at 0.2
    for four). Both are exact for k = 1.

    Args:
        rate: λ, any shape.
        service_s: c, constant.
        servers: k, at least 1.
        method: Which.

    Source:
        Lee and Longton (1959); Cosmetatos, "Approximate explicit formulae for the average queueing
        time in the processes (M/D/r) and (D/M/r)", INFOR 13 (1975).
    """
    half = mmk_wait_s(rate, service_s, servers) / 2
    if method == "lee-longton":
        return half
    busy = rate * service_s / servers
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = 1 + (1 - busy) * (servers - 1) * (np.sqrt(4 + 5 * servers) - 2) / (
            16 * servers * busy
        )
        found = half * factor
    return np.where(busy <= 0, 0.0, np.where(busy < 1, found, np.inf))


def pool_wait_s(  # noqa: PLR0913 - a queue has that many parameters
    rate: Float64,
    service_s: Float64,
    servers: npt.NDArray[np.int64],
    *,
    service_cv2: Float64 | float = 0.0,
    arrival_cv2: Float64 | float = 1.0,
    method: MultiServer = "cosmetatos",
) -> Float64:
    """Mean wait in front of a pool of k workers.

    Between constant and exponential service times the wait is interpolated by their squared
    coefficient of variation; bursty or regular arrivals scale it by (C_a² + C_s²) / (1 + C_s²).

    Args:
        rate: λ, any shape.
        service_s: c, mean.
        servers: k, at least 1.
        service_cv2: C_s²; 0 is constant, 1 exponential.
        arrival_cv2: C_a²; 1 is Poisson, 0 periodic.
        method: For the constant part.

    Source:
        Björklund and Elldin (1964) for the interpolation; Allen and Cunneen (1978) for arrivals.
    """
    constant = mdk_wait_s(rate, service_s, servers, method=method)
    random = mmk_wait_s(rate, service_s, servers)
    with np.errstate(invalid="ignore"):
        mixed = (1 - service_cv2) * constant + service_cv2 * random
        found = mixed * (arrival_cv2 + service_cv2) / (1 + service_cv2)
    return np.where(rate * service_s < servers, found, np.inf)


def tandem_pool_wait_s(  # noqa: PLR0913 - two stations
    rate: Float64,
    first_s: Float64,
    service_s: Float64,
    servers: npt.NDArray[np.int64],
    *,
    service_cv2: Float64 | float = 0.0,
    method: MultiServer = "cosmetatos",
) -> Float64:
    """Mean wait at a pool that is fed by one server with constant service times alone.

    What leaves the first station is spaced by its service time s at least, so nothing waits where
    c ≤ k s. Else a request begins its suffix after A + s + max over m of (m mod k) s + ⌊m / k⌋ c
    less the time since the m-th request before it: for k = 1 the wait of both stations is that of
    the slower one alone, W = W_M/D/1(c) - W_M/D/1(s), exactly. For k > 1 the wait of both is convex
    in s, from W_M/D/k(c) at s = 0 to W_M/D/1(c / k) at s = c / k, and taken as a power of s between
    (fitted; within 1 % of the response time for k up to 4).

    Args:
        rate: λ, Poisson at the first station.
        first_s: s, constant.
        service_s: c.
        servers: k.
        service_cv2: C_s² of the pool.
        method: For the pool.

    Source:
        H. D. Friedman, "Reduction methods for tandem queuing systems", Oper. Res. 13 (1965).
    """
    constant = mdk_wait_s(rate, service_s, servers, method=method)
    random = mmk_wait_s(rate, service_s, servers)
    before = pollaczek_khinchine_s(rate, first_s, first_s**2)
    with np.errstate(divide="ignore", invalid="ignore"):
        each = service_s / servers
        fast = pollaczek_khinchine_s(rate, each, each**2)
        slower = np.where(each > 0, np.minimum(first_s / each, 1.0), 1.0)
        power = 2.0 + 0.15 * np.maximum(servers - 2, 0)
        both = constant + (fast - constant) * slower**power
        found = np.where(each <= first_s, 0.0, np.maximum(both - before, 0.0))
        found = found + service_cv2 * (random - constant)
    stable = (rate * service_s < servers) & (rate * first_s < 1)
    return np.where(stable, found, np.inf)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Feed:
    """What one tenant's pool must know of the shared server before it; arrays of any one shape.

    Attributes:
        share: q_i, of the server's requests.
        first_s: s_i, without loading.
        caused_s: g_i + `cache.Service.ahead_s`: its own time with loads, and what it makes the
            following requests load.
        busy: ρ of the server.
        mean_s: E[S] over all tenants.
        second_s2: E[S²] over all tenants.
    """

    share: Float64
    first_s: Float64
    caused_s: Float64
    busy: Float64
    mean_s: Float64
    second_s2: Float64


def fed_pool_wait_s(  # noqa: PLR0913 - two stations
    rate: Float64,
    service_s: Float64,
    servers: npt.NDArray[np.int64],
    feed: Feed,
    *,
    service_cv2: Float64 | float = 0.0,
    method: MultiServer = "cosmetatos",
) -> Float64:
    """Mean wait at one tenant's pool behind a server that several tenants share.

    Two things happen to a Poisson stream on its way. A request holds the next ones of its tenant
    back, by the time σ that it costs the server: gaps are longer, so they are taken as σ plus an
    exponential rest, which leaves M/D/k with rate λ / (1 - λ σ) and service c - k σ. Over periods
    longer than the server's busy ones the stream is Poisson again, as if the tenant had the server
    to itself, `tandem_pool_wait_s`; w weighs the two by the relaxation times of server and pool.
    And what is served for others, or loaded, blocks the tenant's requests, which then come at
    once: the mean rest f of such blocks is waited for again in the pool, as far as the pool is the
    slower of the two.

    The structure is derived, its constants are fitted to simulated mixes;
    docs/background/placement.md says how well it does on others.

    Args:
        rate: λ of the tenant.
        service_s: c.
        servers: k.
        feed: The server before it.
        service_cv2: C_s² of the pool.
        method: For the pool.

    Source:
        Ours. The exact ends are Friedman's (share 1) and M/D/k (share towards 0). Relaxation times
        as in W. Whitt and W. You, "Using robust queueing to expose the impact of dependence in
        single-server queues", Oper. Res. 66 (2018).
    """
    one = np.maximum(service_s / servers, 1e-300)
    used = rate * one
    with np.errstate(divide="ignore", invalid="ignore"):
        server_s = feed.second_s2 / feed.mean_s / 2 / (1 - feed.busy) ** 2
        apart = (1 - feed.share) ** 1.25 / (1 + one / (1 - used) ** 2 / server_s / 4)  # w
        held_s = feed.first_s + 1.75 * feed.busy**2 * np.maximum(feed.caused_s - feed.first_s, 0)
        held_s = np.maximum(np.minimum(np.minimum(held_s, 0.98 * one), 0.9 / rate), feed.first_s)
        rest_s = np.maximum(service_s - servers * held_s, 0.0)
        spaced = mdk_wait_s(rate / (1 - rate * held_s), rest_s, servers, method=method)
        tandem = tandem_pool_wait_s(rate, held_s, service_s, servers, method=method)
        own = rate * feed.first_s
        blocked_s = (feed.busy / feed.mean_s * feed.second_s2 - own * feed.first_s) / 2  # f
        piled = 2 * rate * blocked_s / np.maximum(feed.busy - own, 1e-300)  # requests behind one
        burst = piled + used * servers
        again_s = 1.75 * blocked_s * np.maximum(used - own, 0.0) / (1 - own)
        again_s = again_s * burst / (burst + 0.7 * (servers - 1))
        again_s = again_s * (1 + np.clip(piled - 1, 0, 4) / 4)
        found = apart * spaced + (1 - apart) * tandem + again_s
        found = np.where(one <= feed.first_s, 0.0, found)
        found = found + service_cv2 * (
            mmk_wait_s(rate, service_s, servers)
            - mdk_wait_s(rate, service_s, servers, method=method)
        )
    return np.where((used < 1) & (feed.busy < 1), np.maximum(found, 0.0), np.inf)


def waiting_tail(
    t_s: Float64,
    *,
    first_busy: Float64,
    first_s: Float64,
    second_busy: Float64,
    second_s: Float64,
) -> Float64:
    """P(W₁ + W₂ > t) for two independent waits, each zero or exponential.

    A wait with mean W̄ that happens with probability a is taken as a exp(-a t / W̄): for M/G/1
    a = ρ; for a pool it is Erlang's C. Against simulation 95 % quantiles are within about a tenth.

    Args:
        t_s: Instants, any shape; negative ones give 1.
        first_busy: a of the first wait.
        first_s: Its mean.
        second_busy: a of the second.
        second_s: Its mean.

    Source:
        Sum of two atoms-and-exponentials, integrated by hand; the single form is the exponential
        approximation in Harchol-Balter, Performance Modeling (2013).
    """
    a, b = np.clip(first_busy, 0.0, 1.0), np.clip(second_busy, 0.0, 1.0)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        mu = np.where(first_s > 0, a / first_s, np.inf)
        nu = np.where(second_s > 0, b / second_s, np.inf)
        t = np.maximum(t_s, 0.0)
        one = np.where(np.isinf(mu), 0.0, np.exp(-np.where(np.isinf(mu), 0.0, mu) * t))
        two = np.where(np.isinf(nu), 0.0, np.exp(-np.where(np.isinf(nu), 0.0, nu) * t))
        near = np.abs(nu - mu) <= 1e-9 * np.maximum(mu, nu)
        both = np.where(
            np.isinf(mu) | np.isinf(nu),
            np.where(np.isinf(mu), two, one),
            np.where(near, one * (1 + mu * t), (nu * one - mu * two) / (nu - mu)),
        )
        found = a * (1 - b) * one + (1 - a) * b * two + a * b * both
    for_ever = np.isinf(first_s) | np.isinf(second_s)
    return np.where(for_ever | (t_s < 0), 1.0, np.clip(found, 0.0, 1.0))


def gamma_tail(
    t_s: Float64,
    *,
    first: tuple[Float64, Float64, Float64],
    second: tuple[Float64, Float64, Float64],
) -> Float64:
    """P(W₁ + W₂ > t) for two independent waits: 0, or gamma with the sum's first two moments.

    Args:
        t_s: Instants, any shape; negative ones give 1.
        first: Of the first wait: probability a of waiting, mean W̄, and E[W²] / E[W]² given that it
            waits (2 for an exponential one).
        second: Of the second wait.

    Source:
        Two-moment fit of the conditional wait: H. C. Tijms, Stochastic Models (1994), ch. 4.
    """
    from scipy.special import gammaincc  # slow to import, and a search needs none of it

    chances, means, seconds = [], [], []
    for chance, mean, spread in (first, second):
        waits = np.clip(np.where(mean > 0, chance, 0.0), 0.0, 1.0)
        wait = np.where(np.isfinite(mean), mean, 0.0)
        chances.append(waits)
        means.append(wait)
        seconds.append(np.where(waits > 0, spread * wait**2 / np.maximum(waits, 1e-300), 0.0))
    some = 1 - (1 - chances[0]) * (1 - chances[1])
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = (means[0] + means[1]) / some
        cv2 = (seconds[0] + seconds[1] + 2 * means[0] * means[1]) / some / mean**2 - 1
        cv2 = np.maximum(cv2, 1e-3)
        left = some * gammaincc(1 / cv2, np.maximum(t_s, 0.0) / (mean * cv2))
    found = np.where(some > 0, np.nan_to_num(left), 0.0)
    for_ever = np.isinf(first[1]) | np.isinf(second[1])
    return np.where(for_ever | (np.asarray(t_s) < 0), 1.0, found)


def overload(utilisation: Float64, *, limit: float = 1.0) -> Float64:
    """How far a utilisation is above what is stable, 0 where it is not.

    Args:
        utilisation: ρ, any shape.
        limit: First value that is unstable.
    """
    return np.maximum(utilisation - limit, 0.0) + np.where(utilisation >= limit, 1e-3, 0.0)
