"""Play a plan request by request on a virtual clock: the oracle of the formulas, and a what-if.

It reads the same tables of a `Problem` as `response.evaluate`, so what differs between the two is
the queueing alone. No clock, no runtime: a stretch of arrivals goes in, every request's times come
out.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from edgewise.device.accelerator import CachePolicy
from edgewise.errors import ConfigError, ShapeError
from edgewise.placement.problem import Problem

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

BATCHES = 20
_STUDENT_95 = 2.093  # two-sided, 19 degrees of freedom


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOrder:
    """In which order the accelerator serves.

    Attributes:
        discipline: ``fcfs``: as they came. ``switch-aware``: the tenant last served first, at most
            ``burst`` in a row while another is ready; then the ready tenant of the best priority,
            in turn among equals. ``exhaustive``: the same without a limit.
        burst: Requests in a row, at least 1.
        threshold: Another tenant is ready when so many of its requests wait...
        timeout_s: ... or when its oldest has waited so long. 0 for at once.
        within: Which of a tenant's own requests goes first: the oldest, or the one with the
            earliest deadline (they differ where ``slack_s`` of `simulate` does).
    """

    discipline: Literal["fcfs", "switch-aware", "exhaustive"] = "fcfs"
    burst: int = 16
    threshold: int = 1
    timeout_s: float = 0.0
    within: Literal["arrival", "deadline"] = "arrival"

    def __post_init__(self) -> None:
        if self.burst < 1 or self.threshold < 1 or not self.timeout_s >= 0:
            raise ConfigError(
                "expected burst and threshold of at least 1 and a timeout of zero or more, found"
                f" {self.burst}, {self.threshold} and {self.timeout_s}"
            )


FCFS = QueueOrder()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TenantTimes:
    """What one tenant's requests met, in order of arrival, warm-up left out.

    Attributes:
        tenant: Its name.
        arrival_s: Instants, [N].
        accelerator_wait_s: Until its prefix began, [N]; 0 without one.
        accelerator_s: The prefix, reloading included, [N].
        missed: Whether it had to reload, [N].
        cpu_wait_s: Until its suffix began, [N].
        cpu_s: The suffix, [N].
        response_s: From arrival to the answer, [N].
    """

    tenant: str
    arrival_s: Float64 = field(repr=False)
    accelerator_wait_s: Float64 = field(repr=False)
    accelerator_s: Float64 = field(repr=False)
    missed: Bool = field(repr=False)
    cpu_wait_s: Float64 = field(repr=False)
    cpu_s: Float64 = field(repr=False)
    response_s: Float64 = field(repr=False)

    @property
    def mean_s(self) -> float:
        """Mean response time."""
        return float(self.response_s.mean())

    @property
    def half_width_s(self) -> float:
        """Of the 95 % confidence interval of the mean: `BATCHES` batch means, Student's t."""
        return _half_width(self.response_s)

    @property
    def miss(self) -> float:
        """Share that had to reload."""
        return float(self.missed.mean())

    @property
    def max_wait_s(self) -> float:
        """Longest wait for the accelerator."""
        return float(self.accelerator_wait_s.max())

    def quantile_s(self, q: float | Sequence[float]) -> Float64:
        """Quantiles of the response time.

        Args:
            q: 0 to 1.
        """
        return np.asarray(np.quantile(self.response_s, q))

    def late(self, deadline_s: float) -> float:
        """Share that took longer.

        Args:
            deadline_s: From arrival.
        """
        return float((self.response_s > deadline_s).mean())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimulationResult:
    """What a plan gave.

    Attributes:
        tenants: One each, in the problem's order; a tenant without requests has empty arrays.
        accelerator_busy: Share of the time that it served or loaded.
        cpu_busy: Of each tenant's workers, [n]; 0 without a suffix.
        mean_s: Mean response time over all requests.
        half_width_s: Of its 95 % confidence interval, by batch means.
        requests: How many count.
        horizon_s: Stretch of arrivals, warm-up included.
        seed: It was made with.
    """

    tenants: tuple[TenantTimes, ...]
    accelerator_busy: float
    cpu_busy: Float64
    mean_s: float
    half_width_s: float
    requests: int
    horizon_s: float
    seed: int


def poisson_arrivals(rate_per_s: float, horizon_s: float, rng: np.random.Generator) -> Float64:
    """Instants of a Poisson stream.

    Args:
        rate_per_s: λ.
        horizon_s: No arrival after it.
        rng: Of the numbers.
    """
    return np.sort(rng.uniform(0.0, horizon_s, rng.poisson(rate_per_s * horizon_s)))


def periodic_arrivals(
    rate_per_s: float, horizon_s: float, rng: np.random.Generator, *, jitter_ratio: float = 0.0
) -> Float64:
    """Instants of a camera: evenly spaced from a random phase, each late by a random part.

    Args:
        rate_per_s: λ.
        horizon_s: No arrival after it.
        rng: Of the numbers.
        jitter_ratio: Greatest lateness as a share of the period, uniform.
    """
    count = math.ceil(rate_per_s * horizon_s)
    late = rng.uniform(0.0, 1.0) + jitter_ratio * rng.uniform(0.0, 1.0, count)
    instants = np.sort((np.arange(count) + late) / rate_per_s)
    return instants[instants <= horizon_s]


def stepped_arrivals(
    steps: Sequence[tuple[float, float]], horizon_s: float, rng: np.random.Generator
) -> Float64:
    """Instants of a Poisson stream whose rate changes in steps.

    Args:
        steps: (from when, λ from then on), rising in time; before the first nothing arrives.
        horizon_s: No arrival after it.
        rng: Of the numbers.
    """
    ends = [start for start, _ in steps[1:]] + [horizon_s]
    pieces = [
        start + poisson_arrivals(rate, max(min(end, horizon_s) - start, 0.0), rng)
        for (start, rate), end in zip(steps, ends, strict=True)
    ]
    return np.concatenate(pieces)


def simulate(  # noqa: PLR0913 - an experiment's whole circumstances
    problem: Problem,
    places: Sequence[int] | Int64,
    cores: Sequence[int] | Int64,
    *,
    requests: int = 100_000,
    horizon_s: float | None = None,
    seed: int = 0,
    arrivals: Sequence[Float64 | None] | None = None,
    shares_bytes: Sequence[float] | Float64 | None = None,
    policy: CachePolicy | None = None,
    order: QueueOrder = FCFS,
    slack_s: Sequence[Float64] | None = None,
    warm_up_ratio: float = 0.05,
) -> SimulationResult:
    """Play one plan.

    Suffix times are constant, or gamma with the problem's C_s² where that is not 0.

    Args:
        problem: Costs and rates.
        places: p, [n].
        cores: k, [n].
        requests: About how many in all, where neither horizon nor instants are given.
        horizon_s: Stretch of arrivals instead.
        seed: Of arrivals and suffix times.
        arrivals: Each tenant's instants, ascending; Poisson at its rate for ``None``.
        shares_bytes: Accelerator memory of each tenant, [n], for pinned residency.
        policy: Of the accelerator's memory; what the problem assumes by default.
        order: Of the accelerator's queue.
        slack_s: From arrival to deadline of every request, by tenant, for ``within="deadline"``;
            each tenant's own deadline by default.
        warm_up_ratio: Share of the stretch at whose start arrivals do not count.

    Raises:
        ConfigError: A tenant with a suffix has no worker.
        ShapeError: Instants and slacks do not fit each other.
    """
    rng = np.random.default_rng(seed)
    stretch = horizon_s if horizon_s is not None else requests / float(problem.rates.sum())
    given = arrivals if arrivals is not None else [None] * len(problem.tenants)
    instants = [
        poisson_arrivals(float(rate), stretch, rng) if own is None else np.asarray(own, np.float64)
        for rate, own in zip(problem.rates, given, strict=True)
    ]
    if arrivals is not None and horizon_s is None:
        stretch = max((float(a[-1]) for a in instants if len(a)), default=0.0) or stretch
    rows = np.arange(len(problem.tenants))
    p = np.asarray(places)
    k = np.minimum(np.asarray(cores), problem.cores)
    service_s, load_s, held_bytes = _accelerator_costs(problem, p, shares_bytes)
    kept = policy or ("token" if problem.miss_model == "paper" else problem.miss_model)
    slack = _slacks(problem, instants, slack_s)

    users = [int(i) for i in rows if p[i] > 0]
    run = _accelerator(
        problem,
        instants,
        users,
        (service_s, load_s, held_bytes),
        kept=kept,
        order=order,
        slack=slack,
    )
    times = []
    cpu_busy = np.zeros(len(rows))
    for i in rows:
        ready_s = instants[i] + run.wait_s[i] + run.service_s[i]
        workers = int(problem.workers[i, p[i], k[i]])
        cpu_s = float(problem.cpu_s[i, p[i], k[i]])
        if cpu_s > 0 and workers < 1:
            raise ConfigError(f"tenant {problem.tenants[i].name!r} has no core for its suffix")
        spent_s = _suffix_times(cpu_s, float(problem.cpu_cv2[i, p[i]]), len(ready_s), rng)
        cpu_wait_s = _pool(ready_s, spent_s, max(workers, 1))
        cpu_busy[i] = spent_s.sum() / max(workers, 1) / stretch
        counts = instants[i] >= warm_up_ratio * stretch
        times.append(
            TenantTimes(
                tenant=problem.tenants[i].name,
                arrival_s=instants[i][counts],
                accelerator_wait_s=run.wait_s[i][counts],
                accelerator_s=run.service_s[i][counts],
                missed=run.missed[i][counts],
                cpu_wait_s=cpu_wait_s[counts],
                cpu_s=spent_s[counts],
                response_s=(ready_s - instants[i] + cpu_wait_s + spent_s)[counts],
            )
        )
    by_time = np.argsort(np.concatenate([t.arrival_s for t in times]), kind="stable")
    responses = np.concatenate([t.response_s for t in times])[by_time]
    return SimulationResult(
        tenants=tuple(times),
        accelerator_busy=sum(float(s.sum()) for s in run.service_s) / stretch,
        cpu_busy=cpu_busy,
        mean_s=float(responses.mean()) if len(responses) else math.nan,
        half_width_s=_half_width(responses),
        requests=len(responses),
        horizon_s=stretch,
        seed=seed,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Run:
    """Of every tenant's requests on the accelerator, in order of arrival."""

    wait_s: list[Float64]
    service_s: list[Float64]
    missed: list[Bool]


def _accelerator_costs(
    problem: Problem, places: Int64, shares_bytes: Sequence[float] | Float64 | None
) -> tuple[Float64, Float64, Float64]:
    """s_i, T_i and what each holds, [n]."""
    rows = np.arange(len(places))
    sizes = problem.prefix_bytes[rows, places]
    service_s = problem.service_s[rows, places]
    if problem.residency == "pinned" and problem.accelerator is not None:
        room = np.zeros(len(rows)) if shares_bytes is None else np.asarray(shares_bytes)
        stream_s = np.maximum(sizes - room, 0.0) / problem.accelerator.in_bytes_per_s
        service_s = problem.base_s[rows, places] + np.where(places > 0, stream_s, 0.0)
    held = np.minimum(sizes, problem.sram_bytes[rows, places])
    return service_s, problem.load_s[rows, places], held


def _slacks(
    problem: Problem, instants: Sequence[Float64], slack_s: Sequence[Float64] | None
) -> list[Float64]:
    if slack_s is None:
        return [
            np.full(len(a), math.inf if t.deadline_s is None else t.deadline_s)
            for t, a in zip(problem.tenants, instants, strict=True)
        ]
    found = [np.asarray(s, np.float64) for s in slack_s]
    for tenant, slack, own in zip(problem.tenants, found, instants, strict=True):
        if len(slack) != len(own):
            raise ShapeError(f"tenant {tenant.name!r}: {len(slack)} slacks for {len(own)} arrivals")
    return found


def _accelerator(  # noqa: PLR0913 - one queue's circumstances
    problem: Problem,
    instants: Sequence[Float64],
    users: Sequence[int],
    costs: tuple[Float64, Float64, Float64],
    *,
    kept: str,
    order: QueueOrder,
    slack: Sequence[Float64],
) -> _Run:
    n = len(instants)
    service_s, load_s, held_bytes = costs
    run = _Run(
        wait_s=[np.zeros(len(a)) for a in instants],
        service_s=[np.zeros(len(a)) for a in instants],
        missed=[np.zeros(len(a), dtype=bool) for a in instants],
    )
    if not users:
        return run
    when = np.concatenate([instants[i] for i in users])
    who = np.concatenate([np.full(len(instants[i]), i) for i in users])
    by_time = np.argsort(when, kind="stable")
    when, who = when[by_time], who[by_time]
    room = float(problem.accelerator.sram_bytes) if problem.accelerator else 0.0
    if order.discipline == "fcfs":
        missed = _misses(who, n, held_bytes, room, kept=kept)
        spent_s = service_s[who] + missed * load_s[who]
        wait_s = _lindley(when, spent_s)
    else:
        due_s = when + np.concatenate([slack[i] for i in users])[by_time]
        begins_s, missed = _in_turns(
            when,
            who,
            due_s if order.within == "deadline" else when,
            (service_s, load_s),
            memory=_Memory(held_bytes, room, kept),
            priorities=[t.priority for t in problem.tenants],
            order=order,
        )
        spent_s = service_s[who] + missed * load_s[who]
        wait_s = begins_s - when
    for i in users:
        own = who == i
        run.wait_s[i], run.service_s[i], run.missed[i] = wait_s[own], spent_s[own], missed[own]
    return run


def _misses(who: Int64, tenants: int, held_bytes: Float64, room: float, *, kept: str) -> Bool:
    """Which requests of a sequence must reload, [N]; memory is empty at first."""
    if kept == "pinned":
        return np.zeros(len(who), dtype=bool)
    if kept == "token":
        return np.concatenate([[True], who[1:] != who[:-1]])
    # What lies before a model in order of recency is what was asked for since its own last time.
    at = np.arange(len(who))
    last = np.empty((tenants, len(who)), dtype=np.int64)
    for j in range(tenants):
        seen = np.where(who == j, at, -1)
        last[j, 0] = -1
        last[j, 1:] = np.maximum.accumulate(seen)[:-1]
    own = last[who, at]
    since = (last > own) * held_bytes[:, None]  # [n, N]
    found: Bool = (own < 0) | (since.sum(axis=0) + held_bytes[who] > room + 0.5)
    return found


def _lindley(when: Float64, service_s: Float64) -> Float64:
    """Waits of a single server in order of arrival, [N]: W' = max(0, W + S - A), unrolled.

    Source:
        D. V. Lindley, "The theory of queues with a single server" (1952).
    """
    if len(when) == 0:
        return np.zeros(0)
    walk = np.concatenate([[0.0], np.cumsum(service_s[:-1] - np.diff(when))])
    found: Float64 = walk - np.minimum.accumulate(walk)
    return found


def _suffix_times(mean_s: float, cv2: float, count: int, rng: np.random.Generator) -> Float64:
    if mean_s == 0 or cv2 == 0:
        return np.full(count, mean_s)
    return rng.gamma(1 / cv2, mean_s * cv2, count)


def _pool(ready_s: Float64, spent_s: Float64, workers: int) -> Float64:
    """Waits in front of k workers, [N], in the order of ``ready_s``'s instants."""
    if len(ready_s) == 0 or spent_s[0] == 0:
        return np.zeros(len(ready_s))
    by_time = np.argsort(ready_s, kind="stable")
    ready, spent = ready_s[by_time], spent_s[by_time]
    waits = np.empty(len(ready))
    if workers == 1 or (spent == spent[0]).all():
        # Equal services end in the order they began: worker n mod k takes request n.
        for w in range(workers):
            waits[w::workers] = _lindley(ready[w::workers], spent[w::workers])
    else:
        free = [0.0] * workers
        for n, (at, takes) in enumerate(zip(ready.tolist(), spent.tolist(), strict=True)):
            begins = max(at, free[0])
            heapq.heapreplace(free, begins + takes)
            waits[n] = begins - at
    found = np.empty(len(ready))
    found[by_time] = waits
    return found


class _Memory:
    """Whose parameters are there, request by request."""

    def __init__(self, held_bytes: Float64, room: float, kept: str) -> None:
        self.held = held_bytes.tolist()
        self.room = room
        self.kept = kept
        self.recent: list[int] = []  # the most recent first

    def miss(self, tenant: int) -> bool:
        """Serve a request and say whether its parameters had to be loaded."""
        if self.kept == "pinned":
            return False
        if self.kept == "token":
            missed = self.recent != [tenant]
            self.recent = [tenant]
            return missed
        missed = True
        if tenant in self.recent:
            needed = self.held[tenant]
            for other in self.recent:
                if other == tenant:
                    break
                needed += self.held[other]
            missed = needed > self.room + 0.5
            self.recent.remove(tenant)
        self.recent.insert(0, tenant)
        return missed


def _in_turns(  # noqa: C901, PLR0912, PLR0913, PLR0915 - one loop: calls would cost half its time
    when: Float64,
    who: Int64,
    rank: Float64,
    costs: tuple[Float64, Float64],
    *,
    memory: _Memory,
    priorities: Sequence[int],
    order: QueueOrder,
) -> tuple[Float64, Bool]:
    """When each request begins, and whether it reloads, where the resident tenant goes first."""
    n = len(costs[0])
    arrival, owner, key = when.tolist(), who.tolist(), rank.tolist()
    serve, load = costs[0].tolist(), costs[1].tolist()
    queues: list[list[tuple[float, int]]] = [[] for _ in range(n)]
    oldest: list[deque[int]] = [deque() for _ in range(n)]  # by arrival, the served ones lazily out
    begun = [False] * len(arrival)
    begins = [0.0] * len(arrival)
    missed = [False] * len(arrival)
    in_turn = [
        sorted(range(n), key=lambda j, r=r: (priorities[j], (j - r - 1) % n))  # type: ignore[misc]
        for r in range(n)
    ]
    limit = order.burst if order.discipline == "switch-aware" else len(arrival)
    threshold, timeout_s = order.threshold, order.timeout_s
    at_once = threshold == 1 or timeout_s == 0
    now, arrived, left, resident, streak = 0.0, 0, len(arrival), 0, 0
    total = len(arrival)
    while left:
        while arrived < total and arrival[arrived] <= now:
            j = owner[arrived]
            heapq.heappush(queues[j], (key[arrived], arrived))
            oldest[j].append(arrived)
            arrived += 1
        chosen = resident if queues[resident] and streak < limit else -1
        soonest = math.inf
        if chosen < 0:
            for j in in_turn[resident]:
                if j == resident or not queues[j]:
                    continue
                if not at_once and len(queues[j]) < threshold:
                    waiting = oldest[j]
                    while begun[waiting[0]]:
                        waiting.popleft()
                    overdue = arrival[waiting[0]] + timeout_s
                    if overdue > now:
                        soonest = min(soonest, overdue)
                        continue
                chosen = j
                break
            else:
                if queues[resident]:  # its turn is over, but nobody else is ready
                    chosen = resident
        if chosen < 0:
            soonest = min(soonest, arrival[arrived] if arrived < total else math.inf)
            if soonest == math.inf:  # arrivals are over, too few wait, and no timeout comes
                at_once = True
            else:
                now = soonest
            continue
        _, request = heapq.heappop(queues[chosen])
        begun[request] = True
        streak = streak + 1 if chosen == resident else 1
        resident = chosen
        begins[request] = now
        missed[request] = memory.miss(chosen)
        now += serve[chosen] + (load[chosen] if missed[request] else 0.0)
        left -= 1
    return np.array(begins), np.array(missed, dtype=bool)


def _half_width(values: Float64) -> float:
    """95 % half width of a mean over dependent values: batch means.

    Source:
        A. M. Law, Simulation Modeling and Analysis, ch. 9; any text on simulation.
    """
    size = len(values) // BATCHES
    if size == 0:
        return math.nan
    means = values[: size * BATCHES].reshape(BATCHES, size).mean(axis=1)
    return float(_STUDENT_95 * means.std(ddof=1) / math.sqrt(BATCHES))
