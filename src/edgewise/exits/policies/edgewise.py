"""The latency-aware router with margins learnt from recent residuals."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Literal, get_args

from edgewise.errors import ConfigError, nearest_names
from edgewise.exits.policy import LATE, REJECT, Policy, PolicyInputs, Step
from edgewise.exits.router import Publisher, RouterTable, default_horizons_s, seed_margins
from edgewise.predict import HorizonMargins
from edgewise.predict.state_costs import REGIMES, StateCosts, UnitCosts

OnInfeasible = Literal["run_anyway", "reject"]

# Range of the error rate of a single margin: a window of hundreds of units says nothing beyond.
_LEAST_MISSES = 0.004
_MOST_MISSES = 0.05
# Windows from states like the present one differ less, so that lower quantiles still say something.
_MOST_MISSES_BY_STATE = 0.3
# A table takes as long to compute as a small unit to run. After a request in time whose units took
# about what they take lately the next one would hardly differ: it waits for so many.
_PUBLISH_EVERY = 8
_REMARKABLE_RATIO = 1.25


def make(  # noqa: PLR0913 - each is one knob
    inputs: PolicyInputs,
    *,
    target_dsr: float = 0.98,
    window: int = 512,
    requests: int = 48,
    gain: float = 1.0,
    on_infeasible: OnInfeasible = "run_anyway",
    save: str | None = None,
    energy_budget_j: float | None = None,
) -> Policy:
    """Make the router.

    Args:
        inputs: Costs and validated accuracy.
        target_dsr: Share of feasible requests to answer in time: the quantile of recent residuals
            that predictions are raised to starts here and is adapted to reach it.
        window: How many recent units the residuals come from.
        requests: And of how many recent requests at most.
        gain: How fast the quantile is adapted; 0 keeps it where it starts.
        on_infeasible: What a request gets whose budget not even the soonest exit can meet.
        save: ``"energy"`` leaves early when an answer is surely right although time remains.
        energy_budget_j: What a request may use, joules: it runs on only where both budgets are
            predicted to hold. It needs a predictor that predicts energy.

    Raises:
        ConfigError: An argument is out of its range.
    """
    if not 0.5 <= target_dsr < 1.0:
        raise ConfigError(f"expected a target DSR from 0.5 up to 1, found {target_dsr!r}")
    if not 0.0 <= gain <= 10.0:
        raise ConfigError(f"expected a gain from 0 to 10, found {gain!r}")
    if on_infeasible not in get_args(OnInfeasible):
        raise ConfigError(
            f"unknown outcome {on_infeasible!r} for a budget that no exit can meet",
            help=nearest_names(str(on_infeasible), get_args(OnInfeasible)),
        )
    if energy_budget_j is not None and not 0 < energy_budget_j < math.inf:
        raise ConfigError(f"expected an energy budget above 0 J, found {energy_budget_j!r}")
    router = Edgewise(
        inputs,
        target_dsr=target_dsr,
        window=window,
        requests=requests,
        gain=gain,
        on_infeasible=on_infeasible,
        energy_budget_j=energy_budget_j,
    )
    if save is None:
        return router
    from edgewise.exits.policies.edgewise_saving import add_saving  # it imports this module

    return add_saving(router, inputs, save=save)


class Edgewise(Policy):
    """Reads one published table per decision; learns after each answer.

    A request takes several decisions, each of which may err, and the window mixes calm and busy
    moments; so the quantile that reaches a share of requests is not that share. It is steered by
    the outcome instead: each miss raises it at once, each request in time lowers it a little, and
    it rests where misses are as frequent as asked.

    Source:
        Gibbs and Candès, Adaptive Conformal Inference Under Distribution Shift (2021), eq. 2, here
        on the logarithm of the error rate so that it stays above zero.
    """

    name = "edgewise"

    def __init__(  # noqa: PLR0913 - each is one knob
        self,
        inputs: PolicyInputs,
        *,
        target_dsr: float,
        window: int,
        requests: int,
        gain: float,
        on_infeasible: OnInfeasible,
        energy_budget_j: float | None = None,
    ) -> None:
        self._reject = on_infeasible == "reject"
        horizons_s = default_horizons_s(inputs.costs)
        # While the device changes, only windows of about the present speed count, so there must be
        # more of them; what they remember is a speed, not a neighbour that has left long ago.
        self._by_regime = {
            regime: HorizonMargins(
                horizons_s,
                level=target_dsr,
                size=window if regime == "steady" else 2 * window,
                max_groups=requests if regime == "steady" else max(160, requests),
            )
            for regime in REGIMES
        }
        for margins in self._by_regime.values():
            seed_margins(margins, inputs.costs)
        self._margins = self._by_regime["steady"]
        self._allowed_misses = 1.0 - target_dsr
        self._gain = gain
        self._better = [inputs.better_exits(p) for p in range(inputs.num_exits + 1)]
        self._publisher = Publisher(inputs, horizons_s=horizons_s, energy_budget_j=energy_budget_j)
        self._lock = threading.Lock()
        self._unpublished = 0
        self.table: RouterTable = self._publisher.publish(self._margins)

    def decide(self, position: int, now_s: float, start_s: float, deadline_s: float) -> int:  # noqa: ARG002
        """Look one table up; no allocation, lock, file or runtime."""
        table = self.table
        action = table.decide(position, deadline_s - now_s)
        if action != LATE:
            return action
        return REJECT if self._reject and not position else table.soonest(position)

    def observe(self, steps: Sequence[Step], *, met: bool, feasible: bool | None = None) -> None:
        """Add a request's residuals, steer the quantile, and publish a new table where it matters.

        A miss that was foreseen says nothing about margins and does not steer.

        When another thread is publishing, this request's residuals are left out: the window holds
        hundreds, and nobody waits.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            if steps:
                self._learn(steps)
            if feasible or met:
                self._steer(self._by_regime[steps[0].regime] if steps else self._margins, met=met)
            self._unpublished += 1
            if not met or self._unpublished >= _PUBLISH_EVERY or self._remarkable(steps):
                self._publish()
        finally:
            self._lock.release()

    def _remarkable(self, steps: Sequence[Step]) -> bool:
        most = _REMARKABLE_RATIO * self.table.ratio
        least = self.table.ratio / _REMARKABLE_RATIO
        return not all(
            least * step.predicted_s <= step.observed_s <= most * step.predicted_s for step in steps
        )

    def _publish(self) -> None:
        self.table = self._publisher.publish(self._margins)
        self._unpublished = 0

    def _learn(self, steps: Sequence[Step]) -> None:
        # Each regime learns from the windows that started in it, wherever they ended.
        regimes = [step.regime for step in steps]
        for regime in dict.fromkeys(regimes):
            margins = self._by_regime[regime]
            margins.begin_group()
            for step in steps[regimes.index(regime) :]:
                margins.add(
                    step.predicted_s,
                    step.observed_s,
                    whole_s=step.whole_s,
                    starts=step.regime == regime,
                )

    def _steer(self, margins: HorizonMargins, *, met: bool) -> None:
        by_state = self._publisher.is_repriced
        # Each regime sees a part of the requests only, and must not take as many times longer.
        gain = self._gain * (len(REGIMES) if by_state else 1)
        most = _MOST_MISSES_BY_STATE if by_state else _MOST_MISSES
        allowed = self._allowed_misses
        missed = (1.0 - margins.level) * math.exp(gain * (allowed - (not met)))
        missed = min(max(most, allowed), max(min(_LEAST_MISSES, allowed), missed))
        margins.level = 1.0 - missed

    def reprice(self, costs: StateCosts) -> None:
        """Publish a table for a new state, with the margins of its regime.

        A prediction for a device that is becoming slower is soon too low, and one for a device that
        is becoming faster too high: each has residuals and margins of its own.
        """
        with self._lock:
            self._margins = self._by_regime[costs.regime]
            self._publisher.reprice(costs)
            self._publish()

    def unit_costs(self) -> UnitCosts:
        """As the published table has them."""
        return self.table.unit_costs

    def feasible(self, left_s: float) -> bool:
        """Whether some exit fits with its margin."""
        return self.table.decide(0, left_s) != LATE

    def expected_s(self, predicted_s: float) -> float:
        """Predictions times the ratio seen lately."""
        return predicted_s * self.table.ratio

    def explain(self, exit_index: int) -> str:
        """Say whether time or usefulness ended the request."""
        if exit_index == self._better[0][0]:
            return "the best exit fitted the budget"
        later = self._better[exit_index + 1]
        return (
            f"exit {min(later)} did not fit the time left" if later else "no later exit is better"
        )
