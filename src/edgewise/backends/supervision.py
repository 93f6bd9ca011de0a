"""How long a call to an accelerator may take, and how often a lost one may be restarted."""

from __future__ import annotations

import math
from collections import deque

from edgewise.backends.accelerator import AcceleratorLost, Prefix
from edgewise.clock import Clock
from edgewise.device.accelerator import Accelerator
from edgewise.errors import ConfigError

WATCHDOG_FACTOR = 20.0
WATCHDOG_LEAST_S = 1.0


def call_s(description: Accelerator, prefix: Prefix, *, sram_bytes: float | None = None) -> float:
    """Time of a call that need not load: t₀ + in/B + compute + overflow/B + out/B_out.

    Args:
        description: Of the device.
        prefix: With ``compute_s``; an unknown one counts as no time.
        sram_bytes: Memory it has; what its compiler said by default, else the device's.
    """
    room = prefix.sram_bytes if sram_bytes is None else sram_bytes
    return (
        description.fixed_s
        + prefix.input.nbytes / description.in_bytes_per_s
        + (prefix.compute_s or 0.0)
        + description.stream_s(prefix.weight_bytes, sram_bytes=room)
        + prefix.output.nbytes / description.out_bytes_per_s
    )


def watchdog_s(
    expected_s: float, *, factor: float = WATCHDOG_FACTOR, least_s: float = WATCHDOG_LEAST_S
) -> float:
    """Time after which a call counts as hung."""
    return max(least_s, factor * expected_s)


class RestartBudget:
    """So many restarts within so long; a device that needs more has a fault that they do not cure.

    Args:
        clock: Tells when.
        restarts: How many.
        within_s: Within which time, seconds.

    Raises:
        ConfigError: Fewer than no restarts, or no time.

    Source:
        Frigate gives its detectors 5 restarts in 60 s as well (watchdog.py).
    """

    def __init__(self, *, clock: Clock, restarts: int = 5, within_s: float = 60.0) -> None:
        if restarts < 0 or not (math.isfinite(within_s) and within_s > 0):
            raise ConfigError(
                f"expected a budget of restarts within a time above zero, found {restarts} within"
                f" {within_s} s"
            )
        self._clock = clock
        self._within_s = within_s
        self._restarts = restarts
        self._taken_s: deque[float] = deque(maxlen=restarts)

    @property
    def wait_s(self) -> float:
        """Time until a restart is allowed, seconds: 0 now, ``inf`` never."""
        if self._restarts == 0:
            return math.inf
        if len(self._taken_s) < self._restarts:
            return 0.0
        return max(0.0, self._taken_s[0] + self._within_s - self._clock.now_s())

    def take(self, what: str) -> None:
        """Use one up.

        Args:
            what: Of which device, for the message.

        Raises:
            AcceleratorLost: None is left; the message says when there is one again.
        """
        if self.wait_s == math.inf:
            raise AcceleratorLost(f"{what} is lost, and restarts are switched off")
        if self.wait_s > 0:
            raise AcceleratorLost(
                f"{what} was restarted {self._restarts} times within {self._within_s:g} s and is"
                f" lost again; the next try is in {math.ceil(self.wait_s)} s",
                help="check its cable, power and temperature; meanwhile plan for the CPU alone",
            )
        self._taken_s.append(self._clock.now_s())
