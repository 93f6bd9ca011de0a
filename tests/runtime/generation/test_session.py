"""Tokens follow the device's state as requests do: depth, predictions, floors and causes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edgewise.device.monitor import Monitor
from edgewise.device.sensor import Sensor
from edgewise.device.state import DeviceState, Quantity
from edgewise.errors import Infeasible
from edgewise.exits import Policy
from edgewise.predict.fitted import FittedPredictor
from edgewise.predict.fitting import fit_kind
from edgewise.predict.state_costs import StateCosts
from edgewise.predict.state_samples import StateSamples
from edgewise.runtime.generation import Token
from edgewise.runtime.repricing import Repricer

QUOTA = "cpu.quota_ratio"
# With the fake's costs a token takes 15, 25, 35 and 44 ms at its four exits, 1 ms less at the first
# three where nothing is filled.
NEEDS_S = (0.015, 0.025, 0.035, 0.044)


def layers(tokens: list[Token]) -> list[int]:
    return [t.exit_layer for t in tokens]


def state(ratio: float | None, at_s: float = 0.0) -> DeviceState:
    found = Quantity.missing("stale", "too old") if ratio is None else Quantity.ok(ratio)
    return DeviceState(at_s=at_s, quantities={QUOTA: found})


class ByQuota:
    """The fake's costs with filling, in inverse proportion to the quota."""

    def __init__(self, session: Any) -> None:
        self.table = session.costs.propagate

    def predict(self, state: DeviceState) -> StateCosts:
        (ratio,) = self.vector(state)
        return StateCosts(
            at_s=state.at_s, stage_s=self.table.stage_s / ratio, head_s=self.table.head_s / ratio
        )

    def vector(self, state: DeviceState) -> npt.NDArray[np.float64]:
        return np.array([state.value(QUOTA)], dtype=float)


def follow(session: Any) -> Repricer:
    repricer = Repricer(ByQuota(session))
    repricer.add(session)
    return repricer


def test_a_state_changes_depth_and_predictions_before_any_token_has_been_late(fakes: Any) -> None:
    session = fakes.session()
    repricer = follow(session)
    generation = session.generate("a", tpot_budget_s=0.046, max_tokens=9)
    calm = [next(generation) for _ in range(4)]
    repricer.on_state(state(0.5, 1.0))
    fakes.decoder_of(session).slower = lambda _: 2.0
    slow = [next(generation) for _ in range(3)]
    repricer.on_state(state(1.0, 2.0))
    fakes.decoder_of(session).slower = lambda _: 1.0
    back = list(generation)

    assert layers(calm) == [4] * 4
    assert layers(slow) == [1] * 3  # 30 ms; the second exit takes 50
    assert layers(back) == [4, 4]
    for token in (*calm, *slow, *back):
        assert token.predicted_s == pytest.approx(token.observed_s)
    assert generation.summary.dsr == 1.0
    assert generation.summary.depth_histogram == {1: 3, 4: 6}
    assert generation.summary.mean_depth == pytest.approx(27 / 9)


@pytest.mark.parametrize(("kv", "layer"), [("propagate", 2), ("defer", 2), ("mask", 3)], ids=str)
@pytest.mark.parametrize("first_used", ["in that state", "before it"])
def test_every_kv_policy_follows_with_its_own_heads(
    fakes: Any, kv: Any, layer: int, first_used: str
) -> None:
    session = fakes.session()
    if first_used == "before it":
        session.policy(kv)
    follow(session).on_state(state(0.5))
    fakes.decoder_of(session).slower = lambda _: 2.0
    # The third exit takes 70 ms with filling, 68 without.
    tokens = list(session.generate("a", tpot_budget_s=0.069, max_tokens=2, kv=kv))

    assert layers(tokens) == [4, layer]


def test_a_policy_that_was_made_is_told_once_with_what_filling_costs(fakes: Any) -> None:
    class Listener(Policy):
        name = "listener"

        def __init__(self) -> None:
            self.told: list[StateCosts] = []

        def decide(self, position: int, now_s: float, start_s: float, deadline_s: float) -> int:
            raise NotImplementedError

        def reprice(self, costs: StateCosts) -> None:
            self.told.append(costs)

    listener = Listener()
    session = fakes.session(policy=listener)
    session.policy("mask")
    follow(session).on_state(state(0.5))
    session.policy("verify")

    assert [c.head_s.tolist() for c in listener.told] == [
        pytest.approx((2 * session.costs.propagate.head_s).tolist())
    ]


def test_growth_with_the_text_goes_on_in_every_state(fakes: Any) -> None:
    session = fakes.session(growth_ratio=0.01)
    decoder = fakes.decoder_of(session)
    follow(session).on_state(state(0.5))
    decoder.slower = lambda _: 2.0 * (1.0 + 0.01 * decoder.answered)
    tokens = list(session.generate("a", tpot_budget_s=0.092, max_tokens=90))[1:]
    best = [
        max(k for k, s in enumerate(NEEDS_S, 1) if (2 * s + 20e-6) * (1 + 0.01 * n) <= 0.092)
        for n in range(1, 90)
    ]

    assert layers(tokens) == best
    assert len(set(best)) > 2


def test_floors_are_those_of_the_present_state(fakes: Any) -> None:
    session = fakes.session()
    repricer = follow(session)
    assert session.generate("ab", tpot_budget_s=0.020, on_infeasible="raise") is not None
    repricer.on_state(state(0.5))

    assert session.floor_s() == pytest.approx(0.030)
    assert session.floor_s(kv="mask") == pytest.approx(0.028)
    assert session.floor_s(kv="verify") == session.full_depth_s() == pytest.approx(0.088)
    with pytest.raises(Infeasible) as per_token:
        session.generate("ab", tpot_budget_s=0.020, on_infeasible="raise")
    assert per_token.value.closest == pytest.approx(0.030)
    # The prompt's first token takes 80 ms at full depth, and then the soonest exit 30.
    with pytest.raises(Infeasible) as first:
        session.generate("ab", ttft_budget_s=0.100, on_infeasible="raise")
    assert first.value.closest == pytest.approx(0.110)
    summary = session.generate("ab").summary
    assert (summary.floor_s, summary.ttft_floor_s) == pytest.approx((0.030, 0.110))


def test_a_late_token_is_late_against_what_its_state_predicted(fakes: Any) -> None:
    session = fakes.session()
    follow(session).on_state(state(0.5))
    decoder = fakes.decoder_of(session)
    decoder.slower = lambda _: 2.0
    generation = session.generate("a", tpot_budget_s=0.032, max_tokens=2)
    next(generation)
    decoder.slower = lambda unit: 2.0 if unit != "head" else 12.0
    late = next(generation)

    assert (late.feasible, late.met) == (True, False)
    assert late.cause == "head:0 took 50 ms, 10 ms was predicted"
    assert (generation.summary.dsr, len(generation.summary.late)) == (0.0, 1)


def test_a_state_below_the_floor_says_so_and_does_not_blame_a_unit(fakes: Any) -> None:
    session = fakes.session()
    follow(session).on_state(state(0.25))
    fakes.decoder_of(session).slower = lambda _: 4.0
    late = list(session.generate("a", tpot_budget_s=0.032, max_tokens=2))[1]

    assert (late.exit_layer, late.feasible, late.met) == (1, False, False)
    assert "below the floor" in str(late.cause)


class QuotaSensor(Sensor):
    """Reads what a test sets."""

    name = "quota"
    ratio = 1.0

    def read(self, now_s: float) -> Mapping[str, Quantity]:  # noqa: ARG002
        return {QUOTA: Quantity.ok(self.ratio)}


def fitted(session: Any) -> FittedPredictor:
    table = session.costs.propagate
    quota = np.linspace(0.25, 1.0, 30)
    costs = np.concatenate((table.stage_s, table.head_s))
    num = table.num_exits
    samples = StateSamples(
        features=(QUOTA,),
        states=quota[:, None],
        units=(*(f"stage:{k}" for k in range(num)), *(f"head:{k}" for k in range(num))),
        seconds=costs / quota[:, None, None] * np.ones((30, 3, 1)),
        provenance="measured",
    )
    return fit_kind("physical", samples, seed=0)


def test_a_state_that_is_too_old_counts_as_the_slowest_until_a_new_one_is_read(
    fakes: Any,
) -> None:
    session = fakes.session()
    repricer = Repricer(fitted(session))
    repricer.add(session)
    monitor = Monitor([QuotaSensor()], clock=session.clock, on_state=[repricer.on_state])
    generation = session.generate("a", tpot_budget_s=0.070, max_tokens=9)
    monitor.step()
    known = [next(generation) for _ in range(3)]
    session.clock.sleep_s(10.0)
    monitor.step()  # what is read first after a gap may span it
    stale = [next(generation) for _ in range(2)]
    session.clock.sleep_s(0.01)
    monitor.step()
    again = [next(generation) for _ in range(2)]

    assert layers(known) == [4] * 3
    assert layers(stale) == [1] * 2  # the first exit takes 60 ms at the lowest quota seen
    assert layers(again) == [4] * 2


def test_the_first_token_says_what_its_budget_lacked(fakes: Any) -> None:
    def first(budget_s: float, slower: float = 1.0) -> Token:
        session = fakes.session()
        fakes.decoder_of(session).slower = lambda _: slower
        generation = session.generate("abcd", ttft_budget_s=budget_s, max_tokens=1)
        assert generation.summary.ttft_floor_s == pytest.approx(0.075)
        token: Token = next(generation)
        assert generation.summary.ttft_met == token.met
        return token

    # Three tokens of the prompt take 60 ms in one pass, always at full depth; then 15 to 44.
    below, enough, slow = first(0.070), first(0.076), first(0.120, slower=2.5)

    assert (below.exit_layer, below.feasible, below.met) == (1, False, False)
    assert below.cause == ("below the floor: prompt and soonest exit take 75 ms, 70 ms was given")
    assert (enough.exit_layer, enough.met, enough.cause) == (1, True, None)
    assert (slow.exit_layer, slow.met) == (1, False)
    assert slow.cause == "waited 150 ms for the prompt"


def test_exact_tokens_are_predicted_in_the_state_and_margins_do_not_count_it_again(
    fakes: Any,
) -> None:
    session = fakes.session()
    follow(session).on_state(state(0.5))
    fakes.decoder_of(session).slower = lambda _: 2.0
    tokens = list(session.generate("a", tpot_budget_s=0.092, max_tokens=9, kv="verify"))[1:]

    assert all(t.feasible and t.met for t in tokens)
    assert session.policy("verify").expected_s(1.0) == pytest.approx(1.0, rel=0.02)
