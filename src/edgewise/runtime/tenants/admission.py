"""Which requests may join: a bounded line, and those that are predicted to meet their deadline."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from edgewise.runtime.tenants.records import Outcome
from edgewise.runtime.tenants.request import Request
from edgewise.runtime.tenants.routes import Route
from edgewise.runtime.tenants.watch import TenantWatch
from edgewise.units import format_duration


class Verdict(NamedTuple):
    """What becomes of a request that was handed in.

    Attributes:
        outcome: How it ends at once; ``None`` where it may join.
        reason: Why, for people.
        retry_after_s: When it may be sent again; ``None`` where nothing is known.
    """

    outcome: Outcome | None
    reason: str = ""
    retry_after_s: float | None = None


class Admission:
    """Judges requests as they come; under the engine's lock.

    Args:
        max_waiting: Requests of one tenant that may wait.
        by_deadline: Whether those that are predicted to be late are refused.
        predict_s: What a request of a route that came at an instant would take.
    """

    def __init__(
        self, *, max_waiting: int, by_deadline: bool, predict_s: Callable[[Route, float], float]
    ) -> None:
        self._max_waiting = max_waiting
        self._by_deadline = by_deadline
        self._predict_s = predict_s

    def judge(self, request: Request, watch: TenantWatch, now_s: float) -> Verdict:
        """Say whether a request may join.

        Args:
            request: As handed in.
            watch: Of its tenant.
            now_s: Now.
        """
        route = request.route
        if route.problem:
            return Verdict("failed", route.problem)
        if watch.waiting >= self._max_waiting:
            retry_s = self._predict_s(route, now_s)
            reason = f"{watch.waiting} requests of {route.tenant.name!r} wait, and no more may"
            return Verdict("refused", f"{reason}; try again in {format_duration(retry_s)}", retry_s)
        if self._by_deadline and request.deadline_s is not None:
            return self._judge_deadline(request, request.deadline_s, watch, now_s)
        return Verdict(None)

    def _judge_deadline(
        self, request: Request, deadline_s: float, watch: TenantWatch, now_s: float
    ) -> Verdict:
        left_s = request.deadline_at_s - now_s
        # Where nothing is ahead of it, only the plan may judge: what was observed may be an
        # outlier, and refusing everybody would let nothing correct it.
        least_s = request.route.expected.least_s
        idle = not watch.waiting and not watch.running
        predicted_s = least_s if idle else self._predict_s(request.route, now_s)
        if predicted_s <= left_s:
            return Verdict(None)
        reason = (
            f"an answer is predicted in {format_duration(predicted_s)}, the deadline leaves"
            f" {format_duration(max(left_s, 0.0))}"
        )
        if least_s > deadline_s:
            return Verdict(
                "refused", f"{reason}: not even an idle machine meets it under this plan"
            )
        retry_s = max(predicted_s - deadline_s, 0.0)
        return Verdict("refused", f"{reason}; try again in {format_duration(retry_s)}", retry_s)
