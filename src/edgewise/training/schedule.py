"""How the learning rate goes over a training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from edgewise.errors import ConfigError, nearest_names

ScheduleKind = Literal["milestones", "every", "cosine", "one-cycle"]
_ONE_CYCLE_START = 0.04  # of the highest rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The learning rate as a share of its highest value.

    ``milestones``  multiplied by ``decay`` at shares of the training (the paper's CIFAR runs)
    ``every``       multiplied by ``decay`` every so many epochs (the paper's ImageNet runs)
    ``cosine``      falls to zero along half a cosine
    ``one-cycle``   rises for the first part, then falls along half a cosine

    Attributes:
        kind: Which of these.
        milestones: Shares of the training, ascending.
        every_epochs: Epochs between two steps down.
        decay: What each step multiplies by.
        rise: Share of the training in which ``one-cycle`` rises.
    """

    kind: ScheduleKind = "milestones"
    milestones: tuple[float, ...] = (0.5, 0.75)
    every_epochs: int = 30
    decay: float = 0.1
    rise: float = 0.3

    def __post_init__(self) -> None:
        if self.kind not in get_args(ScheduleKind):
            raise ConfigError(
                f"unknown schedule {self.kind!r}",
                help=nearest_names(self.kind, get_args(ScheduleKind)),
            )
        if self.every_epochs < 1 or not 0 < self.decay <= 1 or not 0 < self.rise < 1:
            raise ConfigError(
                f"expected steps at least one epoch apart, a decay in (0, 1] and a rise in (0, 1),"
                f" found {self.every_epochs}, {self.decay} and {self.rise}"
            )

    def ratio(self, epochs_done: float, epochs: int) -> float:
        """The learning rate's share after part of the training.

        Args:
            epochs_done: From 0 to ``epochs``, in parts of an epoch.
            epochs: Of the whole training.

        Example:
            >>> [Schedule().ratio(e, 8) for e in (0.0, 3.9, 4.0, 6.0)]
            [1.0, 1.0, 0.1, 0.010000000000000002]
        """
        progress = epochs_done / epochs
        if self.kind == "milestones":
            return float(self.decay ** sum(progress >= m for m in self.milestones))
        if self.kind == "every":
            return float(self.decay ** int(epochs_done // self.every_epochs))
        if self.kind == "one-cycle" and progress < self.rise:
            return _ONE_CYCLE_START + (1 - _ONE_CYCLE_START) * progress / self.rise
        left = progress
        if self.kind == "one-cycle":
            left = (progress - self.rise) / (1 - self.rise)
        return 0.5 * (1 + math.cos(math.pi * min(left, 1.0)))
