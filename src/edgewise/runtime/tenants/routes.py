"""A plan as it runs: the way of every tenant's requests, and what they are expected to take."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from edgewise.placement.plan import Placement, Share, TenantPrediction
from edgewise.runtime.tenants.pool import CpuPool
from edgewise.runtime.tenants.records import QueueRule, TenantModel

if TYPE_CHECKING:
    from edgewise.runtime.tenants.request import Request

_EMA = 0.1  # weight of the newest observation, as Band and Frigate have it


@dataclass(slots=True, kw_only=True)
class Expected:
    """What a request of one route takes: predicted by the plan, corrected by what is observed.

    Attributes:
        service_s: On the accelerator, without reloading.
        load_s: Reloading after a miss.
        miss: Share of misses.
        cpu_s: Its suffix.
        soonest_cpu_s: Its suffix to the nearest exit, where it may leave early; ``None`` else.
        least_s: The plan's own prediction for an idle machine that has its parameters loaded.
    """

    service_s: float
    load_s: float
    miss: float
    cpu_s: float
    soonest_cpu_s: float | None
    least_s: float

    @classmethod
    def of(cls, predicted: TenantPrediction, *, soonest_cpu_s: float | None = None) -> Expected:
        """As planned."""
        own_s = predicted.cpu_s if soonest_cpu_s is None else soonest_cpu_s
        return cls(
            service_s=predicted.service_s,
            load_s=predicted.load_s,
            miss=predicted.miss,
            cpu_s=predicted.cpu_s,
            soonest_cpu_s=soonest_cpu_s,
            least_s=predicted.service_s + own_s,
        )

    def saw_accelerator(
        self, service_s: float, load_s: float | None, *, missed: bool | None
    ) -> None:
        """Follow one observation."""
        self.service_s += _EMA * (service_s - (load_s or 0.0) - self.service_s)
        if missed is not None:
            self.miss += _EMA * (missed - self.miss)
        if missed and load_s is not None:
            self.load_s += _EMA * (load_s - self.load_s)

    def saw_cpu(self, cpu_s: float) -> None:
        """Follow one observation."""
        self.cpu_s += _EMA * (cpu_s - self.cpu_s)


@dataclass(slots=True, eq=False, kw_only=True)
class Route:
    """The way of a tenant's requests under one plan.

    Attributes:
        plan: Number of the plan.
        tenant: Whose.
        share: What the plan gives it.
        key: Of its prefix on the accelerator; ``None`` without one.
        pool: Of its cores; ``None`` without a suffix.
        expected: What a request takes.
        problem: Why no request can be answered; ``""`` where they can.
    """

    plan: int
    tenant: TenantModel
    share: Share
    key: str | None
    pool: CpuPool | None
    expected: Expected
    problem: str = ""


@dataclass(slots=True, eq=False, kw_only=True)
class LivePlan:
    """A plan with requests under way.

    Attributes:
        number: Rising from 0.
        placement: What was asked for.
        routes: By tenant.
        in_flight: Requests that have not ended.
        is_retired: Whether another plan has taken over.
    """

    number: int
    placement: Placement
    routes: dict[str, Route] = field(default_factory=dict)
    in_flight: int = 0
    is_retired: bool = False

    @property
    def keys(self) -> set[str]:
        """Prefixes that it needs."""
        return {r.key for r in self.routes.values() if r.key is not None and not r.problem}

    @property
    def pools(self) -> list[CpuPool]:
        """Pools that it uses."""
        return [r.pool for r in self.routes.values() if r.pool is not None]


def prefix_key(tenant: str, place: int) -> str:
    """What a prefix is called on the accelerator."""
    return f"{tenant}/{place}"


def predicted_response_s(  # noqa: PLR0913 - the state of the whole machine
    route: Route,
    *,
    lengths: Mapping[str, int],
    routes: Iterable[Route],
    running_left_s: float,
    resident: str | None,
    rule: QueueRule,
) -> float:
    """What a request that came now would take, from what waits.

    Everything in the line of its own prefix is ahead of it, and of every other line as much as the
    rule lets pass before its own turn is over: all under ``fcfs``, ``burst`` requests for each of
    its turns else. Each turn of a line reloads once. Whatever comes later is not counted.

    Args:
        route: Of the request.
        lengths: Requests that wait for each prefix.
        routes: By which their times are known.
        running_left_s: Of the request that the accelerator serves.
        resident: The prefix served last.
        rule: Of the accelerator's queue.

    Returns:
        Seconds from now; waiting at the cores is taken as the larger of what the accelerator lets
        through and what the cores have before them.
    """
    ahead = 0
    end_s = 0.0
    if route.key is not None:
        ahead = lengths.get(route.key, 0)
        turns = math.ceil((ahead + 1) / rule.burst)
        expected = {r.key: r.expected for r in routes if r.key is not None}
        total_s = running_left_s
        others = False
        for key, waiting in lengths.items():
            other = expected.get(key)
            if key == route.key or other is None:
                continue
            others = True
            passing = waiting if rule.discipline == "fcfs" else min(waiting, turns * rule.burst)
            total_s += passing * other.service_s
            loads = other.miss * passing
            if rule.discipline != "fcfs":
                loads = min(loads, math.ceil(passing / rule.burst))
            total_s += loads * other.load_s
        own = route.expected
        loads = own.miss * (ahead + 1)
        if rule.discipline != "fcfs":
            loads = turns * (own.miss > 0) if others else float(resident != route.key) * own.miss
        end_s = total_s + (ahead + 1) * own.service_s + loads * own.load_s
    if route.pool is None:
        return end_s
    soonest_s = route.expected.soonest_cpu_s
    own_s = route.expected.cpu_s if soonest_s is None else soonest_s
    # Who is ahead leaves early, too, where others would be late: `deadline_with_room`.
    each_s = own_s / max(route.pool.workers, 1)
    before = len(route.pool) + max(0, route.pool.running - route.pool.workers + 1)
    return max(end_s, (before + ahead) * each_s) + own_s


def deadline_with_room(request: Request, now_s: float) -> float | None:
    """When a suffix with exits must have answered, for those behind it to be in time as well.

    Each request alone would use all of its time and leave none to the next. So it ends early enough
    that those who wait can still answer at their nearest exit; who cannot be helped does not count.

    Args:
        request: Whose suffix begins now; the engine's lock is held.
        now_s: Now.

    Returns:
        Seconds from when it was due; ``None`` where it has no deadline.
    """
    pool, soonest_s = request.route.pool, request.route.expected.soonest_cpu_s
    if pool is None or soonest_s is None or request.deadline_s is None:
        return request.deadline_s
    workers = max(pool.workers, 1)
    end_s = request.deadline_at_s
    for k, other in enumerate(pool.line):
        turn_s = (k // workers + 1) * soonest_s
        if other.deadline_at_s >= now_s + soonest_s + turn_s:
            end_s = min(end_s, other.deadline_at_s - turn_s)
    return end_s - request.due_s
