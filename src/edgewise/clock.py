"""Time, passed in: a real clock for running, a virtual one for tests and simulation."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Tells the present instant in seconds from an arbitrary origin; never steps back."""

    def now_s(self) -> float:
        """Return the present instant, seconds."""
        ...

    def sleep_s(self, duration_s: float) -> None:
        """Return after ``duration_s`` seconds of this clock have passed."""
        ...


class MonotonicClock:
    """The machine's monotonic clock. Wall-clock changes do not move it."""

    # A static method of C code: a call costs one attribute look-up, no Python frame.
    now_s = staticmethod(time.perf_counter)

    def sleep_s(self, duration_s: float) -> None:
        """Sleep for ``duration_s`` seconds; a negative duration returns at once."""
        if duration_s > 0:
            time.sleep(duration_s)


class VirtualClock:
    """A clock that moves only when told to, so that tests and simulations are exact.

    Example:
        >>> clock = VirtualClock()
        >>> clock.sleep_s(0.25)
        >>> clock.now_s()
        0.25
    """

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        """Return the present instant, seconds."""
        return self._now_s

    def sleep_s(self, duration_s: float) -> None:
        """Move the clock forward; a negative duration leaves it where it is."""
        self._now_s += max(0.0, duration_s)
