"""When requests come: instants fixed before the first is sent, so that none waits for another.

With a closed loop a slow answer delays the next request and hides its own delay (coordinated
omission); here latency counts from the instant that a request was due.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgewise.placement.simulate import periodic_arrivals, stepped_arrivals
from edgewise.placement.workload import Rate, Workload

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrivals:
    """All requests of a workload in order of time.

    Attributes:
        due_s: When each comes, seconds since the start, [R].
        tenant: Whose it is: an index into the workload's tenants, [R].
        duration_s: How long the workload lasts.
    """

    due_s: Float64
    tenant: npt.NDArray[np.int64]
    duration_s: float

    def of(self, tenant: int) -> Float64:
        """Instants of one tenant."""
        found: Float64 = self.due_s[self.tenant == tenant]
        return found


def schedule(workload: Workload, *, duration_s: float | None = None) -> Arrivals:
    """Draw all requests of a workload.

    Each tenant has a stream of chance of its own, by the workload's seed and its name: another
    tenant more changes nobody's instants.

    Args:
        workload: Tenants, rates and seed.
        duration_s: How long; the workload's horizon by default.
    """
    duration_s = workload.horizon_s if duration_s is None else duration_s
    own = [
        instants_s(
            t.rate,
            duration_s=duration_s,
            rng=np.random.default_rng([workload.seed, zlib.crc32(t.name.encode())]),
        )
        for t in workload.tenants
    ]
    due_s = np.concatenate(own)
    tenant = np.repeat(np.arange(len(own)), [len(each) for each in own])
    order = np.argsort(due_s, kind="stable")
    return Arrivals(due_s=due_s[order], tenant=tenant[order], duration_s=duration_s)


def instants_s(rate: Rate, *, duration_s: float, rng: np.random.Generator) -> Float64:
    """Draw one tenant's requests, seconds since the start, in order.

    Periodic requests start at a phase of their own, as unsynchronised cameras do. A trace is
    played once and ends where it ends.

    Args:
        rate: How often.
        duration_s: Up to when.
        rng: Chance.
    """
    if rate.kind == "trace":
        instants = np.asarray(rate.instants_s, dtype=np.float64)
        return instants[instants < duration_s]
    if rate.kind == "periodic":
        return periodic_arrivals(rate.per_s, duration_s, rng, jitter_ratio=rate.jitter_ratio)
    return stepped_arrivals(rate.steps or ((0.0, rate.per_s),), duration_s, rng)
