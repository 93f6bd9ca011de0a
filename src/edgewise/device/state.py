"""The machine's state at one instant: named quantities, each with a quality.

Names are ``part.what_unit``: ``cpu.frequency_ratio``, ``gpu.utilisation_ratio``,
``thermal.gpu-thermal_celsius``, ``power.VDD_IN_w``, ``energy.package-0_j``. What is not known has
no value and a reason; it is never zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, Self

from edgewise.device.files import Quality

FEATURES = (
    "cpu.frequency_ratio",
    "gpu.frequency_ratio",
    "emc.frequency_ratio",
    "cpu.utilisation_ratio",
    "gpu.utilisation_ratio",
    "cpu.quota_ratio",
)
"""What costs are predicted from, in this order: each from 0 to 1, clocks as a share of their
highest, utilisation that of other programs where it can be told apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """One value, or the reason why there is none.

    Attributes:
        value: In the unit that the name ends with; ``None`` unless ``quality`` is ``"ok"``, or
            ``"stale"`` where the last good value is kept.
        quality: ``"ok"``; ``"stale"`` (was good, is too old); ``"masked"`` (switched off or
            offline now); ``"unsupported"``; ``"denied"``.
        reason: Why it is not ``"ok"``; empty where it is.
    """

    value: float | None
    quality: Quality
    reason: str = ""

    @classmethod
    def ok(cls, value: float) -> Self:
        """A good value."""
        return cls(value=value, quality="ok")

    @classmethod
    def missing(cls, quality: Quality, reason: str) -> Self:
        """No value."""
        return cls(value=None, quality=quality, reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState:
    """All quantities of one instant.

    Attributes:
        at_s: When it was read, on the clock of who read it, seconds.
        quantities: By name.
    """

    at_s: float
    quantities: Mapping[str, Quantity]

    def value(self, name: str) -> float | None:
        """The value of a quantity that is ``"ok"``; ``None`` for any other."""
        found = self.quantities.get(name)
        return found.value if found is not None and found.quality == "ok" else None

    def reason(self, name: str) -> str:
        """Why a quantity has no good value; empty where it has one."""
        found = self.quantities.get(name)
        return "no sensor reads it" if found is None else found.reason


class StateSource(Protocol):
    """Who knows the present state: a monitor, a recording being played, a simulated device."""

    def latest(self) -> DeviceState:
        """The newest state; reads one reference, no file and no lock."""
        ...
