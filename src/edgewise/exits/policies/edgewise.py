"""The latency-aware router with margins learnt from recent residuals."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Literal

from edgewise.exits.policy import REJECT, Policy, PolicyInputs, Step
from edgewise.exits.router import (
    INFEASIBLE,
    Publisher,
    RouterTable,
    default_horizons_s,
    seed_margins,
)
from edgewise.predict import HorizonMargins

OnInfeasible = Literal["run_anyway", "reject"]


def make(
    inputs: PolicyInputs,
    *,
    level: float = 0.98,
    window: int = 512,
    on_infeasible: OnInfeasible = "run_anyway",
) -> Edgewise:
    """Make the router.

    Args:
        inputs: Costs and validated accuracy.
        level: Quantile of recent residuals that a prediction is raised to.
        window: How many recent units the residuals come from.
        on_infeasible: What a request gets whose budget even the first exit cannot meet.
    """
    return Edgewise(inputs, level=level, window=window, on_infeasible=on_infeasible)


class Edgewise(Policy):
    """Reads one published table per decision; learns after each answer."""

    name = "edgewise"

    def __init__(
        self, inputs: PolicyInputs, *, level: float, window: int, on_infeasible: OnInfeasible
    ) -> None:
        self._inputs = inputs
        self._reject = on_infeasible == "reject"
        horizons_s = default_horizons_s(inputs.costs)
        self._margins = HorizonMargins(horizons_s, level=level, size=window)
        seed_margins(self._margins, inputs.costs)
        self._best = inputs.best_exits()
        self._publisher = Publisher(
            inputs.costs,
            best_exits=self._best,
            segments=inputs.segments,
            horizons_s=horizons_s,
        )
        self._lock = threading.Lock()
        self.table: RouterTable = self._publisher.publish(self._margins)

    def decide(self, position: int, now_s: float, arrival_s: float, deadline_s: float) -> int:  # noqa: ARG002
        """Look one table up; no allocation, lock, file or runtime."""
        action = self.table.decide(position, deadline_s - now_s)
        if action == INFEASIBLE:
            return REJECT if self._reject else 1  # the first exit answers soonest
        return action

    def observe(self, steps: Sequence[Step]) -> None:
        """Add a request's residuals and publish a new table.

        When another thread is publishing, this request's residuals are left out: the window holds
        hundreds, and nobody waits.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            for step in steps:
                self._margins.add(step.predicted_s, step.observed_s)
            self.table = self._publisher.publish(self._margins)
        finally:
            self._lock.release()

    def feasible(self, left_s: float) -> bool:
        """Whether some exit fits with its margin."""
        return self.table.decide(0, left_s) != INFEASIBLE

    def expected_s(self, predicted_s: float) -> float:
        """Static medians times the ratio seen lately."""
        return predicted_s * self.table.ratio

    def explain(self, exit_index: int) -> str:
        """Say whether time or usefulness ended the request."""
        if exit_index == self._best[-1]:
            return "the best exit fitted the budget"
        later = [k for k in self._best if k > exit_index]
        return f"exit {later[0]} did not fit the time left" if later else "no later exit is better"
