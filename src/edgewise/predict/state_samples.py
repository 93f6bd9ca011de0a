"""Costs of all units, measured or simulated, in many states of one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edgewise.errors import ProfileError

if TYPE_CHECKING:
    from edgewise.device.simulated.device import Campaign

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateSamples:
    """What predictors are fitted to.

    Attributes:
        features: Names of the columns of ``states``, of `edgewise.device.state.FEATURES`.
        states: [N, F], one row per state; NaN where a feature is not known.
        units: [U], ``"stage:0"``, …, then ``"head:0"``, …; stages first, both in order.
        seconds: [N, R, U], R repeats in each state; NaN where a repeat is missing.
        provenance: ``"measured"``, ``"simulated"`` or ``"estimated"``.
        joules: [N, R, U] or ``None`` where there is no meter.
        elapsed_s: How long taking them took, seconds; ``None`` when unknown.
    """

    features: tuple[str, ...]
    states: Float64
    units: tuple[str, ...]
    seconds: Float64
    provenance: str
    joules: Float64 | None = None
    elapsed_s: float | None = None

    def __post_init__(self) -> None:
        if self.states.ndim != 2 or self.states.shape[1] != len(self.features):
            raise ProfileError(
                f"expected states [N, {len(self.features)}], found {list(self.states.shape)}"
            )
        wanted = (len(self.states), len(self.units))
        if self.seconds.ndim != 3 or (self.seconds.shape[0], self.seconds.shape[2]) != wanted:
            raise ProfileError(
                f"expected seconds [{wanted[0]}, R, {wanted[1]}], found {list(self.seconds.shape)}"
            )
        if self.joules is not None and self.joules.shape != self.seconds.shape:
            raise ProfileError(
                f"expected joules {list(self.seconds.shape)}, found {list(self.joules.shape)}"
            )

    @classmethod
    def simulated(cls, campaign: Campaign, *, with_energy: bool = True) -> StateSamples:
        """What a simulated campaign recorded, with its joules or without."""
        return cls(
            features=campaign.features,
            states=campaign.states,
            units=campaign.units,
            seconds=campaign.seconds,
            provenance="simulated",
            joules=campaign.joules if with_energy else None,
            elapsed_s=campaign.elapsed_s,
        )

    @property
    def num_states(self) -> int:
        """How many states."""
        return len(self.states)

    def take(self, rows: npt.NDArray[np.integer]) -> StateSamples:
        """Some of the states."""
        return StateSamples(
            features=self.features,
            states=self.states[rows],
            units=self.units,
            seconds=self.seconds[rows],
            provenance=self.provenance,
            joules=None if self.joules is None else self.joules[rows],
            elapsed_s=None,
        )
