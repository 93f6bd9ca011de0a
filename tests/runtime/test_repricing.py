"""States in, tables out: what policies are told and when."""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt
import pytest

from edgewise.device.state import DeviceState, Quantity
from edgewise.errors import ProfileError
from edgewise.exits import Policy, PolicyInputs, make_policy
from edgewise.predict import CostTable
from edgewise.predict.state_costs import StateCosts
from edgewise.runtime.repricing import Repricer

CLOCK = "cpu.frequency_ratio"
COSTS = CostTable.from_costs([1.0, 1.0, 1.0], [0.5, 0.5, 0.5])


def state(at_s: float, ratio: float | None) -> DeviceState:
    found = Quantity.missing("unsupported", "no clock") if ratio is None else Quantity.ok(ratio)
    return DeviceState(at_s=at_s, quantities={CLOCK: found})


class ByClock:
    """Costs in proportion to the cycle time."""

    def predict(self, state: DeviceState) -> StateCosts:
        ratio = state.value(CLOCK)
        if ratio is None:
            raise ProfileError(state.reason(CLOCK))
        return StateCosts(
            at_s=state.at_s, stage_s=COSTS.stage_s / ratio, head_s=COSTS.head_s / ratio
        )

    def vector(self, state: DeviceState) -> npt.NDArray[np.float64]:
        return np.array([state.value(CLOCK)], dtype=float)


class Listener(Policy):
    """Keeps what it was told."""

    name = "listener"

    def __init__(self) -> None:
        self.told: list[StateCosts] = []

    def decide(self, position: int, now_s: float, start_s: float, deadline_s: float) -> int:
        raise NotImplementedError

    def reprice(self, costs: StateCosts) -> None:
        self.told.append(costs)


def test_a_policy_is_told_of_states_that_cost_something_else() -> None:
    listener = Listener()
    repricer = Repricer(ByClock(), [listener])
    for step, ratio in enumerate((1.0, 1.0, 0.9995, 0.5)):
        repricer.on_state(state(step, ratio))
    assert [float(c.stage_s[0]) for c in listener.told] == [1.0, 2.0]


def test_a_policy_that_comes_later_is_told_with_the_next_state() -> None:
    first, second = Listener(), Listener()
    repricer = Repricer(ByClock(), [first])
    repricer.on_state(state(0.0, 1.0))
    repricer.add(second)
    repricer.on_state(state(1.0, 1.0))
    assert len(second.told) == 1


def test_a_device_that_slows_down_is_told_apart_from_one_that_recovers() -> None:
    listener = Listener()
    repricer = Repricer(ByClock(), [listener])
    for step, ratio in enumerate((1.0, 0.9, 0.8, 0.7, 0.8, 0.9, 1.0, 1.0, 1.0, 1.0, 1.0)):
        repricer.on_state(state(0.01 * step, ratio))
    regimes = [costs.regime for costs in listener.told]
    assert regimes[1:4] == ["slower"] * 3
    assert "faster" in regimes[4:]
    assert regimes[-1] == "steady"


def test_a_state_that_cannot_be_priced_leaves_the_last_costs_in_force(
    caplog: pytest.LogCaptureFixture,
) -> None:
    listener = Listener()
    repricer = Repricer(ByClock(), [listener])
    repricer.on_state(state(0.0, 0.5))
    with caplog.at_level(logging.WARNING):
        repricer.on_state(state(1.0, None))
        repricer.on_state(state(2.0, None))
    assert len(listener.told) == 1
    assert repricer.problem == "no clock"
    assert len(caplog.records) == 1  # said once, not a hundred times a second
    repricer.on_state(state(3.0, 1.0))
    assert not repricer.problem
    assert len(listener.told) == 2


def test_costs_that_were_handed_out_are_never_changed() -> None:
    policy = make_policy(
        "edgewise",
        PolicyInputs(costs=COSTS, segments=frozenset({(k, k + 1) for k in range(3)})),
    )
    repricer = Repricer(ByClock(), [policy])
    repricer.on_state(state(0.0, 0.5))
    began = policy.unit_costs()
    repricer.on_state(state(1.0, 1.0))
    assert began.seconds["head:0"] == 1.0
    assert policy.unit_costs().seconds["head:0"] == 0.5
