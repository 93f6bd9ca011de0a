"""After EdgeML: a bandit that learns from outcomes which confidence threshold to use."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Sequence

import numpy as np

from edgewise.errors import ConfigError
from edgewise.exits.policy import LOOK, Float32, Policy, PolicyInputs, Step
from edgewise.exits.thresholds import LookEverywhere
from edgewise.scores import top1_confidence

# The last one lets nobody leave early.
_THRESHOLDS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.01)


def make(
    inputs: PolicyInputs,
    *,
    thresholds: Sequence[float] = _THRESHOLDS,
    period: int = 10,
    discount: float = 0.95,
    exploration: float = 0.3,
) -> Bandit:
    """Make the policy.

    Args:
        inputs: Temperatures.
        thresholds: Probabilities to choose from, one at a time for all exits.
        period: How many requests a choice holds.
        discount: Weight of older periods, per period; 1 forgets nothing.
        exploration: How much an unsure choice is preferred; 0 takes the best so far.

    Raises:
        ConfigError: An argument is out of its range.
    """
    if not thresholds or not all(0.0 <= t < math.inf for t in thresholds):
        raise ConfigError(f"expected at least one threshold of zero or more, found {thresholds!r}")
    if period < 1:
        raise ConfigError(f"expected a period of at least one request, found {period!r}")
    if not 0.0 < discount <= 1.0:
        raise ConfigError(f"expected a discount above 0 up to 1, found {discount!r}")
    if not 0.0 <= exploration < math.inf:
        raise ConfigError(f"expected an exploration of zero or more, found {exploration!r}")
    arms = Arms(len(thresholds), period=period, discount=discount, exploration=exploration)
    return Bandit(inputs, thresholds=tuple(thresholds), arms=arms)


class Arms:
    """Discounted upper confidence bounds over a few choices, one in force for a period.

    Attributes:
        current: The choice in force.

    Source:
        Garivier and Moulines, On Upper-Confidence Bound Policies for Switching Bandit Problems (ALT
        2011), the discounted form, on mean rewards of periods.
    """

    def __init__(self, num: int, *, period: int, discount: float, exploration: float) -> None:
        self.current = 0
        self._period, self._discount, self._exploration = period, discount, exploration
        self._count = np.zeros(num)
        self._sum = np.zeros(num)
        self._rewards: list[float] = []
        self._lock = threading.Lock()

    def add(self, arm: int, reward: float) -> None:
        """Add the reward of one request, 0 to 1; one that a former choice earned is ignored."""
        with self._lock:
            if arm != self.current:
                return
            self._rewards.append(reward)
            if len(self._rewards) >= self._period:
                self._end_period()

    def _end_period(self) -> None:
        self._count *= self._discount
        self._sum *= self._discount
        self._count[self.current] += 1.0
        self._sum[self.current] += sum(self._rewards) / len(self._rewards)
        self._rewards.clear()
        untried = np.flatnonzero(self._count == 0)
        if untried.size:
            self.current = int(untried[0])
            return
        spread = np.sqrt(np.log(max(self._count.sum(), 1.0)) / self._count)
        self.current = int(np.argmax(self._sum / self._count + self._exploration * spread))


class Bandit(LookEverywhere):
    """Looks at each exit; rewarded by the confidence of answers in time.

    Source:
        After EdgeML (Zhao et al., IoTDI 2021), whose agent updates exit thresholds from measured
        latency. Tabular and our own: no code of theirs is public, and the network is left out.
    """

    name = "bandit"

    def __init__(self, inputs: PolicyInputs, *, thresholds: tuple[float, ...], arms: Arms) -> None:
        super().__init__(inputs)
        self.arms = arms
        self.thresholds = thresholds
        self._arm = arms.current
        self._confidence = 0.0

    def begin(self) -> Policy:
        """A copy that keeps the choice in force and how sure its answer was."""
        fresh = copy.copy(self)
        fresh._arm, fresh._confidence = self.arms.current, 0.0  # noqa: SLF001 - of its own kind
        return fresh

    def decide(self, position: int, now_s: float, start_s: float, deadline_s: float) -> int:  # noqa: ARG002
        """Look everywhere, at the end too: the reward needs the confidence."""
        return LOOK if position else 1

    def accept(self, exit_index: int, logits: Float32) -> bool:
        """Whether the largest probability reaches the threshold in force."""
        sure = top1_confidence(logits[0], temperature=self._temperatures[exit_index])
        self._confidence = float(sure)
        return self._confidence >= self.thresholds[self._arm]

    def observe(
        self,
        steps: Sequence[Step],  # noqa: ARG002
        *,
        met: bool,
        feasible: bool | None = None,  # noqa: ARG002
    ) -> None:
        """Reward the choice: the answer's confidence where it was in time, else nothing."""
        self.arms.add(self._arm, self._confidence if met else 0.0)

    def explain_accepted(self, exit_index: int) -> str:  # noqa: ARG002
        """The threshold in force."""
        return "its probability reached the threshold in force"
