"""What all units cost in the present state: one record per state, read by policies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]

Regime = Literal["steady", "slower", "faster"]
REGIMES: tuple[Regime, ...] = ("steady", "slower", "faster")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnitCosts:
    """What runtimes look up while a request runs: predictions of single units by name.

    Attributes:
        seconds: By name; a unit that is not in it takes its static median. Never changed.
        whole_s: What the whole network is predicted to take, in any unit that does not change
            meanwhile: by it, predictions made in different states are compared.
        regime: In which they were predicted.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    whole_s: float = 1.0
    regime: Regime = "steady"


STATIC = UnitCosts()
"""Where only static medians are known."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateCosts:
    """Predicted medians of every unit, now.

    Attributes:
        at_s: Of the state they were predicted for, seconds.
        stage_s: [S], seconds of each single stage.
        head_s: [S], seconds of each exit's head.
        regime: Whether the machine has lately become slower or faster, by predicted seconds.
        volatile: Whether the paper's two indicators call the state volatile.
        stage_j: [S], joules, or ``None`` where energy is not predicted.
        head_j: [S], joules, or ``None``.
    """

    at_s: float
    stage_s: Float64
    head_s: Float64
    regime: Regime = "steady"
    volatile: bool = False
    stage_j: Float64 | None = None
    head_j: Float64 | None = None
