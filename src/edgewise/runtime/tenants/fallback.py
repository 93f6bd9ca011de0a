"""What runs while the accelerator is away: every model whole on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edgewise.placement.plan import Placement, make_placement
from edgewise.placement.problem import Problem, Tenant
from edgewise.runtime.tenants.records import TenantModel

_LEAST_PER_S = 1e-3  # a plan needs a rate above zero


def cpu_only(
    tenants: Sequence[TenantModel],
    rates_per_s: Mapping[str, float],
    *,
    cores: int,
    note: str = "",
) -> Placement:
    """Share the cores out by load: one for each tenant, the rest to the largest load per core.

    Args:
        tenants: The engine's.
        rates_per_s: By name.
        cores: How many there are. Where tenants are more, each gets one worker, and the engine
            lets only so many run at once.
        note: For the plan.

    Source:
        PropAlloc of SwapLess (arXiv:2602.17808).
    """
    problem = Problem.of(
        [
            Tenant(
                name=t.name,
                profile=t.profile,
                rate_per_s=max(rates_per_s.get(t.name, 0.0), _LEAST_PER_S),
                deadline_s=t.deadline_s,
                priority=t.priority,
            )
            for t in tenants
        ],
        None,
        cores=cores,
    )
    load = problem.rates * problem.cpu_s[:, 0, 1]  # erlangs of one-thread work
    held = np.ones(len(tenants), dtype=np.int64)
    for _ in range(cores - len(tenants)):
        held[int((load / held).argmax())] += 1
    notes = [note] if note else []
    if len(tenants) > cores:
        notes.append(f"{len(tenants)} tenants take turns on {cores} cores")
    return make_placement(
        problem, [0] * len(tenants), held.tolist(), method="cpu-only", notes=tuple(notes)
    )
