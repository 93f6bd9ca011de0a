"""Keeps policies' cost tables in step with the device: once per state, off the request path."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgewise.device.state import DeviceState
from edgewise.errors import EdgeError
from edgewise.predict.fallback import Trend
from edgewise.predict.state_costs import StateCosts

_log = logging.getLogger(__name__)


class PredictsCosts(Protocol):
    """What turns a state into costs, such as a `FittedPredictor`."""

    def predict(self, state: DeviceState) -> StateCosts:
        """Costs of all units in a state."""
        ...

    def vector(self, state: DeviceState) -> npt.NDArray[np.float64]:
        """[F], the features it reads."""
        ...


class Repriced(Protocol):
    """What is told costs, such as a `Policy`."""

    def reprice(self, costs: StateCosts) -> None:
        """Take over what units cost in a new state of the device."""
        ...


class Repricer:
    """Predicts all units at once for each new state, and tells the policies.

    It is called on the monitor's thread. A request reads the table that a policy published last:
    one reference.

    Args:
        predictor: Of the model that the policies decide for.
        policies: Who is told.
        trend: Says whether the device is becoming slower or faster, and whether it is volatile.
        min_change_ratio: Costs that changed less than this, in the same regime, are not published.

    Attributes:
        problem: Why the last state could not be priced; empty where it could. The costs of the
            state before it stay in force, and residuals go on correcting them.
    """

    def __init__(
        self,
        predictor: PredictsCosts,
        policies: Iterable[Repriced] = (),
        *,
        trend: Trend | None = None,
        min_change_ratio: float = 0.002,
    ) -> None:
        self._predictor = predictor
        self._policies = list(policies)
        self._trend = trend if trend is not None else Trend()
        self._min_change_ratio = min_change_ratio
        self._published: StateCosts | None = None
        self.problem = ""

    def add(self, policy: Repriced) -> None:
        """Tell one more policy, from the next state on; that state is published in any case."""
        self._policies.append(policy)
        self._published = None

    def on_state(self, state: DeviceState) -> None:
        """Price a state and publish it, if it differs from the last one."""
        try:
            costs = self._predictor.predict(state)
        except EdgeError as error:
            if not self.problem:
                _log.warning("costs are no longer predicted: %s", error.message)
            self.problem = error.message
            return
        self.problem = ""
        whole_s = float(costs.stage_s.sum() + costs.head_s[-1])
        self._trend.add(state.at_s, self._predictor.vector(state), whole_s)
        costs = dataclasses.replace(costs, regime=self._trend.regime, volatile=self._trend.volatile)
        if self._published is not None and not self._differs(costs, self._published):
            return
        self._published = costs
        for policy in self._policies:
            policy.reprice(costs)

    def _differs(self, costs: StateCosts, before: StateCosts) -> bool:
        if (costs.regime, costs.volatile) != (before.regime, before.volatile):
            return True
        limit = self._min_change_ratio
        return bool(
            (np.abs(costs.stage_s - before.stage_s) > limit * before.stage_s).any()
            or (np.abs(costs.head_s - before.head_s) > limit * before.head_s).any()
        )
