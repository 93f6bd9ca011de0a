"""A virtual clock with callbacks: what a monitor's thread does every 10 ms, without a thread."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from edgewise.clock import VirtualClock
from edgewise.errors import ConfigError


@dataclass(order=True, slots=True)
class _Tick:
    due_s: float
    order: int
    number: int = field(compare=False)
    start_s: float = field(compare=False)
    period_s: float = field(compare=False)
    callback: Callable[[float], object] = field(compare=False)
    stopped: bool = field(default=False, compare=False)


class SimulatedClock(VirtualClock):
    """A clock that moves only when told to, and calls on its way.

    Ticks are counted, not added up: tick ``n`` of a callback that began at ``t`` is due at exactly
    ``t + n * period``. Callbacks due at the same instant are called in the order they came in.

    Example:
        >>> clock, seen = SimulatedClock(), []
        >>> stop = clock.every(0.01, seen.append)
        >>> clock.sleep_s(0.035)
        >>> seen, clock.now_s()
        ([0.01, 0.02, 0.03], 0.035)
    """

    def __init__(self, start_s: float = 0.0) -> None:
        super().__init__(start_s)
        self._due: list[_Tick] = []
        self._registered = 0
        self._calling = False

    def every(self, period_s: float, callback: Callable[[float], object]) -> Callable[[], None]:
        """Call something each time a period has passed, first one period from now.

        Args:
            period_s: Seconds, above zero.
            callback: Called with the instant it is due, while the clock reads that instant. It
                may not sleep.

        Returns:
            What ends it when called.

        Raises:
            ConfigError: The period is not a finite time above zero.
        """
        if not (math.isfinite(period_s) and period_s > 0):
            raise ConfigError(f"expected a period above zero seconds, found {period_s!r}")
        start_s = self._now_s
        tick = _Tick(start_s + period_s, self._registered, 1, start_s, period_s, callback)
        self._registered += 1
        heapq.heappush(self._due, tick)

        def stop() -> None:
            tick.stopped = True

        return stop

    def sleep_s(self, duration_s: float) -> None:
        """Move the clock forward, calling what falls due; negative leaves it where it is."""
        self.sleep_until_s(self._now_s + max(0.0, duration_s))

    def sleep_until_s(self, at_s: float) -> None:
        """Move the clock to an instant, calling what falls due; an earlier one leaves it.

        Raises:
            ConfigError: A callback sleeps.
        """
        if self._calling:
            raise ConfigError(
                "a callback of a simulated clock may not sleep: the clock is already moving",
                help="do the work at once, or register another callback with every()",
            )
        while self._due and self._due[0].due_s <= at_s:
            tick = self._due[0]
            if tick.stopped:
                heapq.heappop(self._due)
                continue
            self._now_s = due_s = tick.due_s
            tick.number += 1
            tick.due_s = tick.start_s + tick.number * tick.period_s
            heapq.heapreplace(self._due, tick)
            self._calling = True
            try:
                tick.callback(due_s)
            finally:
                self._calling = False
        self._now_s = max(self._now_s, at_s)
