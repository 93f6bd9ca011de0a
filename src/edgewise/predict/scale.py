"""A fast corrector: one factor on all predictions, from the units that have just run."""

from __future__ import annotations

import math

from edgewise.errors import ConfigError


class ScaleFactor:
    """Observed over predicted time, lately; multiplies predictions of what comes next.

    Units that ran on clocks never profiled are all off by about one factor, so one of them tells
    the others. Update: s ← s^(1 − w)·r^w, r the newest ratio within its limits. On the logarithm,
    because twice as slow and twice as fast are equally far from right.

    Reading and setting one float is atomic: threads may share it, and of two that update at the
    same time one may be lost.

    Attributes:
        value: The factor; 1 before anything ran.

    Args:
        weight: w of a ratio not below the factor; 1 takes the last unit's ratio, as SPINN does.
        falling_weight: w of a ratio below it; ``weight`` by default. Smaller means that good news
            is believed slowly: a factor too high costs depth, one too low the deadline.
        least: Ratios below are taken as this.
        most: Ratios above are taken as this: a unit that the scheduler held up for long says
            nothing about clocks.

    Raises:
        ConfigError: An argument is out of range.

    Source:
        After SPINN (Laskaridis et al., MobiCom 2020), whose scheduler multiplies profiled latencies
        by measured / profiled time; weights and limits are ours.

    Example:
        >>> scale = ScaleFactor()
        >>> scale.add(predicted_s=0.002, observed_s=0.005)
        >>> scale.value
        2.5
    """

    def __init__(
        self,
        *,
        weight: float = 1.0,
        falling_weight: float | None = None,
        least: float = 0.25,
        most: float = 8.0,
    ) -> None:
        falling = weight if falling_weight is None else falling_weight
        if not (0 < weight <= 1 and 0 < falling <= 1):
            raise ConfigError(
                f"expected weights above zero and up to 1, found {weight!r} and {falling!r}"
            )
        if not 0 < least <= 1 <= most < math.inf:
            raise ConfigError(f"expected limits around 1, found {least!r} and {most!r}")
        self._rising = weight
        self._falling = falling
        self._least = least
        self._most = most
        self.value = 1.0

    def add(self, predicted_s: float, observed_s: float) -> None:
        """Take a unit that ran into account; one without a finite ratio is left out.

        Args:
            predicted_s: What it was predicted to take, the factor not applied.
            observed_s: What it took.
        """
        if not (0.0 < predicted_s < math.inf and 0.0 <= observed_s < math.inf):
            return
        ratio = min(self._most, max(self._least, observed_s / predicted_s))
        weight = self._rising if ratio >= self.value else self._falling
        # A weight of 1 needs no logarithm, and is exact.
        self.value = ratio if weight == 1.0 else self.value ** (1.0 - weight) * ratio**weight

    def reset(self) -> None:
        """Forget what ran."""
        self.value = 1.0
