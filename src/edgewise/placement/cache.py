"""How often a request finds another model's parameters in the accelerator's memory.

Classes of successive requests are taken as independent, as they are for Poisson arrivals that are
served in order. Who was served last decides what the next ones cost, so successive service times
are not independent: `Service` carries what a wait needs to know of that.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from edgewise.errors import ConfigError

Float64 = npt.NDArray[np.float64]
MissModel = Literal["paper", "token", "lru", "pinned"]
_CLIP = 0.999  # utilisation at which an unstable queue is evaluated for comparison
MAX_EXACT_LRU = 7  # 5,040 orders; 8 would be 40,320 for every candidate


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Service:
    """Moments of the accelerator's service time over all requests.

    Attributes:
        mean_s: E[S], [M].
        second_s2: E[S²], [M].
        covariance_s2: Σ of the covariances of a service time with all later ones, [M].
        fresh_s: How much more the requests after an idle period cost than those after any request,
            summed over all of them, [M]: an idle device was more often left by cheap requests.
            ``None`` where no rate was given.
        ahead_s: How much more than on average all later requests cost after one of class i, [M, n]:
            what its own parameters displace.
        miss: α_i, [M, n].
    """

    mean_s: Float64
    second_s2: Float64
    covariance_s2: Float64
    fresh_s: Float64 | None
    ahead_s: Float64
    miss: Float64


def mixed_service(  # noqa: PLR0913 - a queue has that many parameters
    shares: Float64,
    service_s: Float64,
    load_s: Float64,
    prefix_bytes: Float64,
    *,
    sram_bytes: Float64 | float,
    model: MissModel,
    rate: Float64 | None = None,
) -> Service:
    """Combine tenants' service times with what displaced parameters cost.

    Let H(x) be by how much all requests to come cost more than usual when the memory is in state x.
    For ``token`` x is the last class b and the next request alone differs:
    H(b) = Σ q s + Σ q T - q_b T_b. For ``lru`` x is an order of recency; a tenant j behind the set
    A of others pays T_j for as long as A and what joins it leave no room:
    H(x) = Σ_j q_j T_j V_j(A_j), V_j(A) = (1[no room] + Σ_{i∉A,j} q_i V_j(A+i)) / (1 - q(A)).

    Args:
        shares: q_i = λ_i / Λ over tenants with a prefix, 0 for the others, [M, n].
        service_s: s_i, streaming of what never fits included, [M, n].
        load_s: T_i, to bring parameters back, [M, n].
        prefix_bytes: F_i, [M, n].
        sram_bytes: C.
        model: ``token``: whoever was not last must load. ``lru``: exact for whole models, the
            least recently used goes first. ``pinned``: never. ``paper``: never where all fit
            together or one is alone, else 1 - q_i.
        rate: Λ, [M], for `Service.fresh_s`.

    Raises:
        ConfigError: ``lru`` with more tenants than `MAX_EXACT_LRU`.

    Source:
        `docs/background/placement.md` derives H and the idle state's law.
    """
    if model == "lru":
        return _lru(shares, service_s, load_s, prefix_bytes, sram_bytes=sram_bytes, rate=rate)
    if model == "pinned":
        miss = np.zeros_like(shares)
    else:
        miss = np.where(shares > 0, 1 - shares, 0.0)
        if model == "paper":
            together = np.where(shares > 0, prefix_bytes, 0.0).sum(axis=1, keepdims=True)
            miss = np.where(together <= sram_bytes, 0.0, miss)
    by_class_s = service_s + miss * load_s  # g_i
    mean_s = (shares * by_class_s).sum(axis=1)
    second = (shares * (service_s**2 + miss * (2 * service_s * load_s + load_s**2))).sum(axis=1)
    # Mean of the next service given this class: it loads unless it is of the same class.
    loads = np.where(miss > 0, shares * load_s, 0.0)
    next_s = (shares * service_s + loads).sum(axis=1, keepdims=True) - loads  # h_i, [M, n]
    covariance = (shares * by_class_s * next_s).sum(axis=1) - mean_s**2
    fresh = None
    if rate is not None:
        slow = _stable(rate, mean_s)[:, None]
        decay = shares * np.exp(-slow * service_s) * (1 - miss + miss * np.exp(-slow * load_s))
        fresh = _fresh(decay, shares, next_s)
    return Service(
        mean_s=mean_s,
        second_s2=second,
        covariance_s2=covariance,
        fresh_s=fresh,
        ahead_s=next_s - (shares * next_s).sum(axis=1, keepdims=True),
        miss=miss,
    )


def _stable(rate: Float64, mean_s: Float64) -> Float64:
    return np.minimum(rate, _CLIP / np.maximum(mean_s, 1e-300))


def _fresh(decay: Float64, weight: Float64, ahead_s: Float64) -> Float64:
    """Mean of H over the states that an idle period finds, less that over all.

    A request leaves the device idle if nothing arrives during its wait and service. The wait is
    taken as independent of the state, so states weigh by E[exp(-Λ S)], as in light traffic.
    """
    axes = tuple(range(1, weight.ndim))
    idle = (decay * ahead_s).sum(axis=axes) / np.maximum(decay.sum(axis=axes), 1e-300)
    found: Float64 = idle - (weight * ahead_s).sum(axis=axes)
    return found


@lru_cache(maxsize=8)
def _orders(
    tenants: int,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """All orders of recency, the order that a request of each class makes, who is before each.

    All [n!, n]; the last as bits of a set.
    """
    orders = list(itertools.permutations(range(tenants)))
    place = {order: k for k, order in enumerate(orders)}
    after = [
        [place[(a, *(b for b in order if b != a))] for a in range(tenants)] for order in orders
    ]
    before = [
        [sum(1 << b for b in order[: order.index(a)]) for a in range(tenants)] for order in orders
    ]
    shape = (-1, tenants)
    return (
        np.array(orders).reshape(shape),
        np.array(after).reshape(shape),
        np.array(before).reshape(shape),
    )


def recency_probabilities(shares: Float64) -> Float64:
    """Stationary probability of every order of most recent use, [M, n!].

    P(π) = q_π1 · q_π2 / (1 - q_π1) · q_π3 / (1 - q_π1 - q_π2) …; tenants without requests are last.

    Args:
        shares: q, [M, n], each row summing to one.

    Source:
        W. F. King, "Analysis of demand paging algorithms" (1971): the independent reference model.
    """
    ordered = shares[:, _orders(shares.shape[1])[0]]  # [M, n!, n]
    left = np.cumsum(ordered[:, :, ::-1], axis=2)[:, :, ::-1]  # no cancellation for rare tenants
    left_over = np.arange(shares.shape[1], 0, -1)
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = np.where(left > 0, ordered / left, 1.0 / left_over)
    product: Float64 = factor.prod(axis=2)
    return product


def _lru(  # noqa: PLR0913 - as mixed_service
    shares: Float64,
    service_s: Float64,
    load_s: Float64,
    prefix_bytes: Float64,
    *,
    sram_bytes: Float64 | float,
    rate: Float64 | None,
) -> Service:
    tenants = shares.shape[1]
    if tenants > MAX_EXACT_LRU:
        raise ConfigError(
            f"exact LRU miss rates are for at most {MAX_EXACT_LRU} tenants, found {tenants}",
            help="plan for the policy 'token', or for fewer tenants",
        )
    _, after, before = _orders(tenants)
    # A tenant without a prefix holds nothing; one that is too large takes everything.
    sizes = np.where(shares > 0, np.minimum(prefix_bytes, sram_bytes), 0.0)
    sets = (np.arange(1 << tenants)[:, None] >> np.arange(tenants)) & 1  # [2^n, n]
    needed = sizes[:, :, None] + (sizes @ sets.T)[:, None, :]  # by a class and those before it
    displaced = needed > np.asarray(sram_bytes) + 0.5  # [M, n, 2^n]
    behind = _behind(shares, displaced, sets)
    classes = np.arange(tenants)
    missed = displaced[:, classes, before]  # [M, n!, n]
    ahead_s = ((shares * load_s)[:, None, :] * behind[:, classes, before]).sum(axis=2)  # H, [M, n!]
    cost_s = service_s[:, None, :] + missed * load_s[:, None, :]
    orders = recency_probabilities(shares)[:, :, None]
    weight = orders * shares[:, None, :]
    then_s = ahead_s[:, after]  # [M, n!, n]
    mean_s = (weight * cost_s).sum(axis=(1, 2))
    covariance = (weight * (cost_s - mean_s[:, None, None]) * then_s).sum(axis=(1, 2))
    fresh = None
    if rate is not None:
        decay = weight * np.exp(-_stable(rate, mean_s)[:, None, None] * cost_s)
        fresh = _fresh(decay, weight, then_s)
    return Service(
        mean_s=mean_s,
        second_s2=(weight * cost_s**2).sum(axis=(1, 2)),
        covariance_s2=covariance,
        fresh_s=fresh,
        ahead_s=(orders * then_s).sum(axis=1) - (weight * then_s).sum(axis=(1, 2))[:, None],
        miss=(orders * missed).sum(axis=1) * (shares > 0),
    )


def _behind(
    shares: Float64, displaced: npt.NDArray[np.bool_], sets: npt.NDArray[np.int64]
) -> Float64:
    """V_j(A): for how many requests j, behind the set A, will find no room, [M, n, 2^n]."""
    found = np.zeros(displaced.shape)
    for subset in reversed(range(len(sets))):
        others = np.flatnonzero(sets[subset] == 0)
        left = shares[:, others].sum(axis=1)  # 1 - q(A)
        more = displaced[:, others, subset].astype(np.float64)
        for i in others:
            more += shares[:, i, None] * found[:, others, subset | (1 << int(i))]
        with np.errstate(divide="ignore", invalid="ignore"):
            found[:, others, subset] = np.where(left[:, None] > 0, more / left[:, None], 0.0)
    return found
