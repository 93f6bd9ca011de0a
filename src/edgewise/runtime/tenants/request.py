"""One request on its way, and the ticket that its sender holds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from edgewise.backends.piece import Array
from edgewise.runtime.tenants.records import Done, Outcome, TenantAnswer

if TYPE_CHECKING:
    from edgewise.runtime.tenants.routes import Route

Where = Literal["accelerator", "cpu", "running", "ended"]


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """What is known of a request; changed under the engine's lock only.

    Attributes:
        number: Rising over all tenants.
        route: The plan's way for it.
        x: What its next step is given; ``None`` once it has ended.
        due_s: When it should have been sent.
        deadline_s: Counted from then; ``None`` for none.
        queued_s: When it joined the line it is in.
        on_done: Told of its end.
        where: In which line, or running, or ended.
        cancelled: Whether its sender wants no answer any more.
        answer: Its end.
    """

    number: int
    route: Route
    x: Array | None
    due_s: float
    deadline_s: float | None
    queued_s: float
    on_done: Done | None
    where: Where = "running"
    cancelled: bool = False
    accelerator_wait_s: float | None = None
    service_s: float | None = None
    load_s: float | None = None
    missed: bool | None = None
    cpu_wait_s: float | None = None
    cpu_s: float | None = None
    exit_index: int | None = None
    answer: TenantAnswer | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def has_ended(self) -> bool:
        """Whether its answer is there."""
        return self.where == "ended"

    @property
    def key(self) -> str:
        """Of the prefix it needs; only where its route has one."""
        return self.route.key or ""

    @property
    def priority(self) -> int:
        """Of its tenant."""
        return self.route.tenant.priority

    @property
    def deadline_at_s(self) -> float:
        """The instant of its deadline."""
        return float("inf") if self.deadline_s is None else self.due_s + self.deadline_s

    def end(
        self,
        outcome: Outcome,
        now_s: float,
        *,
        output: Array | None = None,
        reason: str = "",
        retry_after_s: float | None = None,
    ) -> TenantAnswer:
        """Write down how it ended and let go of its arrays."""
        self.where, self.x = "ended", None
        self.answer = TenantAnswer(
            tenant=self.route.tenant.name,
            number=self.number,
            outcome=outcome,
            output=output,
            reason=reason,
            retry_after_s=retry_after_s,
            due_s=self.due_s,
            done_s=now_s,
            plan=self.route.plan,
            accelerator_wait_s=self.accelerator_wait_s,
            service_s=self.service_s,
            load_s=self.load_s,
            missed=self.missed,
            cpu_wait_s=self.cpu_wait_s,
            cpu_s=self.cpu_s,
            exit_index=self.exit_index,
        )
        return self.answer


class Ticket:
    """A request that was submitted."""

    __slots__ = ("_cancel", "_request")

    def __init__(self, request: Request, cancel: Callable[[Request], bool]) -> None:
        self._request = request
        self._cancel = cancel

    @property
    def number(self) -> int:
        """Of the request."""
        return self._request.number

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self._request.ended.is_set()

    def result(self, timeout_s: float | None = None) -> TenantAnswer:
        """Wait for its end.

        Args:
            timeout_s: How long at most; ``None`` for as long as it takes.

        Raises:
            TimeoutError: It has not ended; it goes on.
        """
        if not self._request.ended.wait(timeout_s):
            raise TimeoutError(f"request {self.number} has not ended within {timeout_s:g} s")
        answer = self._request.answer
        assert answer is not None  # noqa: S101 - set before the event
        return answer

    def cancel(self) -> bool:
        """Give the request up.

        Returns:
            Whether it ends as ``cancelled``: at once while it waits, after its present step while
            it runs. ``False`` where it had ended before.
        """
        return self._cancel(self._request)
