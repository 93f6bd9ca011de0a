"""What an engine has seen: counts since its start, and the last moments for live tables."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from edgewise.runtime.tenants.rates import RateEstimator
from edgewise.runtime.tenants.records import TenantAnswer
from edgewise.runtime.tenants.routes import Route

WINDOW_S = 10.0
_KEPT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSnapshot:
    """One tenant at an instant; counts are since the engine's start.

    Attributes:
        tenant: Its name.
        rate_per_s: Requests per second lately; ``None`` until two have come.
        rate_changed: Whether its rate changed since somebody acknowledged it.
        arrival_cv2: C_a² of its arrivals lately; ``None`` until some have come.
        waiting: Requests in a line.
        running: Requests in hand.
        answered: Ended with an output.
        refused: Sent away at once.
        cancelled: Given up by their sender.
        failed: Ended by an error.
        dropped: Left over when the engine closed.
        late: Of those answered, after their deadline.
        response_s: Mean over the last `WINDOW_S` seconds; ``None`` without an answer in them.
        p95_s: 95 % quantile of the same.
        longest_wait_s: For the accelerator, since the start.
        load_s: Total time that its requests spent reloading parameters, as far as told.
        cpu_busy: Share of its workers' time in use lately; ``None`` without a suffix.
        plan: Number of the plan that new requests run under.
        problem: Why it cannot be served; ``""`` where it can.
    """

    tenant: str
    rate_per_s: float | None
    rate_changed: bool
    arrival_cv2: float | None
    waiting: int
    running: int
    answered: int
    refused: int
    cancelled: int
    failed: int
    dropped: int
    late: int
    response_s: float | None
    p95_s: float | None
    longest_wait_s: float
    load_s: float
    cpu_busy: float | None
    plan: int
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot:
    """An engine at an instant.

    Attributes:
        at_s: On its clock.
        plan: Number of the plan that new requests run under.
        tenants: In the engine's order.
        accelerator_busy: Share of time in use lately; ``None`` without a device.
        lost: Why the accelerator is away; ``""`` where it is there.
    """

    at_s: float
    plan: int
    tenants: tuple[TenantSnapshot, ...]
    accelerator_busy: float | None
    lost: str


@dataclass(slots=True)
class TenantWatch:
    """Counts of one tenant; for one thread at a time.

    Attributes:
        rate: Of all that was submitted, refused ones too.
        waiting: Requests in a line now.
        running: Requests in hand now.
        ended: By outcome.
    """

    rate: RateEstimator = field(default_factory=RateEstimator)
    waiting: int = 0
    running: int = 0
    ended: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("answered", "refused", "cancelled", "failed", "dropped"), 0
        )
    )
    late: int = 0
    longest_wait_s: float = 0.0
    load_s: float = 0.0
    # Of answers: done, response, suffix.
    _recent: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def end(self, answer: TenantAnswer, *, deadline_s: float | None) -> None:
        """Count an end."""
        self.ended[answer.outcome] += 1
        self.longest_wait_s = max(self.longest_wait_s, answer.accelerator_wait_s or 0.0)
        self.load_s += answer.load_s or 0.0
        if answer.outcome == "answered":
            self._recent.append((answer.done_s, answer.response_s, answer.cpu_s or 0.0))
            self.late += deadline_s is not None and answer.response_s > deadline_s

    def responses(self, start_s: float, stop_s: float) -> npt.NDArray[np.float64]:
        """Response times of what was answered in a span, as far as remembered."""
        return np.array([r for done, r, _ in self._recent if start_s <= done <= stop_s])

    def cpu_busy_s(self, start_s: float) -> float:
        """Suffix time of what was answered since an instant."""
        return sum(cpu for done, _, cpu in self._recent if done >= start_s)

    def snapshot(self, route: Route, *, since_s: float, now_s: float) -> TenantSnapshot:
        """Say how a tenant is doing.

        Args:
            route: Of its new requests.
            since_s: When the span begins that figures of late are of.
            now_s: Now.
        """
        responses = self.responses(since_s, now_s)
        busy = None
        if route.pool is not None:
            spent_s = self.cpu_busy_s(since_s)
            busy = busy_ratio([spent_s], span_s=now_s - since_s, servers=route.share.workers)
        return TenantSnapshot(
            tenant=route.tenant.name,
            rate_per_s=self.rate.rate_per_s(now_s),
            rate_changed=self.rate.changed,
            arrival_cv2=self.rate.arrival_cv2(),
            waiting=self.waiting,
            running=self.running,
            **self.ended,
            late=self.late,
            response_s=float(responses.mean()) if responses.size else None,
            p95_s=float(np.quantile(responses, 0.95)) if responses.size else None,
            longest_wait_s=self.longest_wait_s,
            load_s=self.load_s,
            cpu_busy=busy,
            plan=route.plan,
            problem=route.problem,
        )


def busy_ratio(spent_s: Iterable[float], *, span_s: float, servers: int = 1) -> float:
    """Share of a span that servers were in use, at most 1."""
    return min(1.0, sum(spent_s) / max(span_s * servers, 1e-9))
