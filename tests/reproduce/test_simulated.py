from __future__ import annotations

import numpy as np
import pytest

from edgewise.bench.simulation import look_back
from edgewise.exits import policy_names
from edgewise.reproduce import _simulated as sim
from edgewise.reproduce import claim_ids
from edgewise.reproduce.registry import Setup

pytest.importorskip("safetensors")

ORIN, RESNET = "jetson-orin-nano", "resnet50"


def test_what_claims_share_is_no_claim() -> None:
    assert not any("simulated" in claim for claim in claim_ids())


def test_every_policy_compared_exists() -> None:
    assert {player.policy for player in sim.PLAYERS.values()} <= set(policy_names())


def test_the_profile_is_that_of_the_highest_clocks() -> None:
    found = sim.case(ORIN, RESNET)
    top = np.array([[1.0, 1.0, 1.0, 0.0, 0.0]])

    true_s = found.device.costs_s(found.work, top)[0]
    # 60 rounds of about 1 % noise: their median is within half a percent.
    assert found.costs.stage_s == pytest.approx(true_s[:8], rel=0.005)
    assert found.costs.head_s == pytest.approx(true_s[8:], rel=0.005)


def test_at_locked_clocks_the_whole_network_takes_its_profile() -> None:
    found = sim.case(ORIN, RESNET)
    scene = found.scene(clocks="static", budget_s=1.0, seed=0, count=20)

    latency_s = look_back(scene).latency_s[:, -1]

    assert np.median(latency_s) == pytest.approx(found.costs.full_depth_s(), rel=0.01)


def test_no_request_waits_for_the_one_before() -> None:
    found = sim.case(ORIN, RESNET)
    scene = found.scene(clocks="dvfs", budget_s=0.016, seed=0, count=40)
    full = sim.play_player(sim.PLAYERS["full_depth"], found, scene)

    # With all heads passed by, alone in the world.
    assert full.latency_s == pytest.approx(look_back(scene).latency_s[:, -1])


def test_an_older_state_costs_deadlines_without_a_margin() -> None:
    found = sim.case(ORIN, RESNET)
    player = sim.Player(name="bare", policy="uniexit", options={"margin": "none"}, reads_state=True)
    by_age = {}
    for age_s in (0.0, 0.020):
        rows = sim.compare(
            found,
            [player],
            clocks="dvfs",
            budget_s=0.016,
            seeds=(0,),
            count=200,
            state_age_s=age_s,
        )
        by_age[age_s] = rows["bare"].mean("dsr")

    assert by_age[0.020] < by_age[0.0]


def test_two_comparisons_with_one_seed_agree_to_the_last_digit() -> None:
    found = sim.case(ORIN, RESNET)
    players = [sim.PLAYERS[name] for name in ("edgewise", "uniexit", "static_table")]

    first, second = (
        sim.compare(found, players, clocks="dvfs", budget_s=0.016, seeds=(3,), count=30)
        for _ in range(2)
    )

    assert sim.as_json(first) == sim.as_json(second)


def test_seeds_and_requests_come_from_the_setup() -> None:
    assert sim.seeds_of(Setup(seed=7, seeds=3)) == (7, 8, 9)
    assert sim.seeds_of(Setup(quick=True)) == (0,)
    assert len(sim.seeds_of(Setup())) == 5
    assert sim.count_of(Setup(limit=12)) == 12


def test_an_interval_is_shown_over_several_seeds_only() -> None:
    found = sim.case(ORIN, RESNET)
    player = sim.PLAYERS["static_table"]

    def figure(seeds: tuple[int, ...]) -> tuple[float | None, float | None]:
        rows = sim.compare(found, [player], clocks="dvfs", budget_s=0.016, seeds=seeds, count=30)
        shown = sim.percent("x", rows["static_table"], "dsr")
        return shown.low, shown.high

    assert figure((0,)) == (None, None)
    low, high = figure((0, 1, 2))
    assert low is not None
    assert high is not None
    assert low < high
