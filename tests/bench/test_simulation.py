from __future__ import annotations

import numpy as np
import pytest

from edgewise.bench.simulation import (
    Played,
    Scene,
    arrivals,
    look_back,
    over_seeds,
    play,
    play_oracle,
    replayed_model,
    static_costs,
    summarise,
)
from edgewise.device.simulated import SimulatedClock
from edgewise.device.state import DeviceState, Quantity
from edgewise.errors import ConfigError, ShapeError
from edgewise.exits import PolicyInputs, make_policy
from edgewise.model import Validation

STAGES, CLASSES, IMAGES = 4, 3, 40
STAGE_S, HEAD_S = 2.0, 1.0


class SlowingDevice:
    """Twice as slow in every second stretch of 100 s; each request has its own disturbance."""

    def __init__(self, *, noise: float = 0.0, seed: int = 0) -> None:
        self.noise, self.seed = noise, seed

    def factor(self, at_s: float) -> float:
        return 2.0 if int(at_s // 100.0) % 2 else 1.0

    def cost_s(self, unit: str, start_s: float, *, request: int) -> float:
        kind, place = unit.split(":")
        rng = np.random.default_rng((self.seed, request, int(place), kind == "head"))
        base_s = STAGE_S if kind == "stage" else HEAD_S
        return base_s * self.factor(start_s) * (1.0 + self.noise * rng.random())

    def energy_j(self, unit: str, start_s: float, duration_s: float) -> float:  # noqa: ARG002
        return 3.0 * duration_s

    def state(self, at_s: float) -> DeviceState:
        ratio = Quantity.ok(1.0 / self.factor(at_s))
        return DeviceState(at_s=at_s, quantities={"cpu.frequency_ratio": ratio})


def recorded() -> Validation:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, CLASSES, IMAGES)
    logits = rng.normal(size=(2, IMAGES, CLASSES))
    logits[1, np.arange(IMAGES), labels] += 10.0  # the deeper one is always right
    return Validation(logits=logits, labels=labels, source="made up")


def make_scene(*, budget_s: float, noise: float = 0.0, count: int = 60, seed: int = 0) -> Scene:
    model, answers, labels = replayed_model(
        recorded(), depths=[0.5, 1.0], temperatures=[1.0, 1.0], flops=[1.0] * STAGES, name="chain"
    )
    names = [f"stage:{k}" for k in range(STAGES)] + [f"head:{k}" for k in range(STAGES)]
    rng = np.random.default_rng(seed)
    return Scene(
        open_world=lambda: (SimulatedClock(), SlowingDevice(noise=noise, seed=seed)),
        model=model,
        costs=static_costs(np.array([[STAGE_S] * STAGES + [HEAD_S] * STAGES]), names=names),
        answers=answers,
        labels=labels,
        arrivals_s=arrivals(count, spacing_s=80.0, rng=rng),
        images=rng.integers(0, len(labels), count),
        budget_s=budget_s,
    )


def run(scene: Scene, name: str) -> Played:
    singles = frozenset((k, k + 1) for k in range(STAGES))
    inputs = PolicyInputs.of(scene.model, scene.costs, segments=singles)
    return play(scene, make_policy(name, inputs))


def test_the_same_seed_plays_the_same_requests_to_the_last_digit() -> None:
    first, second = (run(make_scene(budget_s=9.5, noise=0.2), "edgewise") for _ in range(2))

    assert (first.exit_index == second.exit_index).all()
    assert (first.latency_s == second.latency_s).all()
    assert (first.energy_j == second.energy_j).all()


def test_another_seed_plays_others() -> None:
    first = run(make_scene(budget_s=9.5, noise=0.2), "full_depth")
    second = run(make_scene(budget_s=9.5, noise=0.2, seed=1), "full_depth")

    assert (first.latency_s != second.latency_s).all()


def test_a_policy_that_knows_no_state_is_late_when_the_device_is_slow() -> None:
    scene = make_scene(budget_s=9.5)  # the whole network takes 9 s or 18 s

    played = run(scene, "full_depth")

    device = SlowingDevice()
    slow = np.array([device.factor(at_s) > 1 for at_s in scene.arrivals_s])
    assert 0.2 < slow.mean() < 0.8
    # A request that begins just before the device slows down is late, too.
    assert not played.met[slow].any()
    assert played.met[~slow].mean() > 0.7


def test_each_policy_meets_the_same_noise() -> None:
    """Full depth and hindsight run the same units of the same requests."""
    scene = make_scene(budget_s=100.0, noise=0.5)

    full, hindsight = run(scene, "full_depth"), look_back(scene)

    assert full.latency_s == pytest.approx(hindsight.latency_s[:, -1])
    assert full.energy_j == pytest.approx(hindsight.energy_j)


def test_hindsight_is_the_deepest_exit_in_time_by_brute_force() -> None:
    scene = make_scene(budget_s=9.5, noise=0.5)

    found = look_back(scene)

    for request, arrival_s in enumerate(scene.arrivals_s):
        best, now_s = -1, arrival_s
        device = SlowingDevice(noise=0.5)
        for k in range(STAGES):
            now_s += device.cost_s(f"stage:{k}", now_s, request=request)
            if now_s + device.cost_s(f"head:{k}", now_s, request=request) - arrival_s <= 9.5:
                best = k
        assert found.exit_index[request] == best


def test_no_policy_has_both_more_in_time_and_deeper_answers_than_hindsight() -> None:
    scene = make_scene(budget_s=9.5, noise=0.5)
    hindsight = look_back(scene)

    for name in ("edgewise", "static_table", "spinn"):
        played = run(scene, name)
        assert not (played.met & (played.exit_index > hindsight.exit_index)).any()


def test_the_oracle_meets_every_feasible_deadline_at_its_own_depth() -> None:
    scene = make_scene(budget_s=9.5, noise=0.5)
    hindsight = look_back(scene)

    row = summarise(scene, play_oracle(scene, hindsight), hindsight)

    assert (row.dsr, row.depth_of_oracle, row.premature_ratio) == (1.0, 1.0, 0.0)


def test_requests_without_a_feasible_exit_are_counted_apart() -> None:
    scene = make_scene(budget_s=3.5)  # the first exit takes 3 s, and 6 s when slow
    hindsight = look_back(scene)

    row = summarise(scene, play_oracle(scene, hindsight), hindsight)

    assert 0.3 < row.feasible_ratio < 0.7
    assert row.dsr == 1.0
    assert row.dsr_all == pytest.approx(row.feasible_ratio)


def test_a_deadline_that_nothing_meets_is_refused() -> None:
    scene = make_scene(budget_s=0.5)
    hindsight = look_back(scene)

    with pytest.raises(ConfigError, match="ever in time"):
        summarise(scene, play_oracle(scene, hindsight), hindsight)


def test_a_request_that_arrives_while_another_runs_waits() -> None:
    scene = make_scene(budget_s=9.5)
    crowded = Scene(
        **{
            name: getattr(scene, name)
            for name in Scene.__dataclass_fields__
            if name != "arrivals_s"
        },
        arrivals_s=np.array([0.0, 1.0, 30.0]),
    )

    played = run(crowded, "full_depth")

    assert played.latency_s == pytest.approx([9.0, 17.0, 9.0])


def test_the_state_is_told_every_ten_milliseconds_while_requests_run() -> None:
    scene = make_scene(budget_s=9.5, count=1)
    told: list[float] = []
    singles = frozenset((k, k + 1) for k in range(STAGES))
    inputs = PolicyInputs.of(scene.model, scene.costs, segments=singles)

    play(scene, make_policy("full_depth", inputs), on_state=lambda s: told.append(s.at_s))

    steps = np.diff(told)
    assert steps == pytest.approx(np.full(len(steps), 0.010))
    assert told[0] == 0.0
    assert told[-1] > scene.arrivals_s[0] + 8.9


def test_answers_are_those_of_the_exit_with_the_nearest_depth() -> None:
    model, answers, labels = replayed_model(
        recorded(), depths=[0.5, 1.0], temperatures=[2.0, 1.0], flops=[1.0] * STAGES, name="chain"
    )

    kept = recorded()
    assert answers[0] == pytest.approx(kept.logits[0, 1::2] / 2.0)
    assert answers[3] == pytest.approx(kept.logits[1, 1::2])
    assert (labels == kept.labels[1::2]).all()
    assert model.validation is not None
    assert (model.validation.labels == kept.labels[::2]).all()


def test_recordings_of_another_number_of_exits_are_refused() -> None:
    with pytest.raises(ShapeError, match="expected as many depths"):
        replayed_model(recorded(), depths=[1.0], temperatures=[1.0], flops=[1.0] * 4, name="chain")


def test_a_profile_lists_units_in_the_order_they_run() -> None:
    samples = np.array([[1.0, 2.0, 10.0, 20.0], [1.0, 2.0, 10.0, 20.0]])

    costs = static_costs(samples, names=["stage:0", "stage:1", "head:0", "head:1"])

    assert costs.medians.tolist() == [1.0, 10.0, 2.0, 20.0]
    assert costs.remaining_s(0, 1) == 23.0
    assert costs.provenance == "simulated"


def test_arrivals_are_spread_over_all_phases_of_a_period() -> None:
    found = arrivals(4000, spacing_s=0.1, rng=np.random.default_rng(0))

    counts, _ = np.histogram(found % 0.42, bins=14, range=(0.0, 0.42))
    assert (np.diff(found) > 0.0499).all()
    # Mean 286 in each of 14 parts; a share of it covers chance.
    assert counts.min() > 0.7 * 4000 / 14


def test_the_interval_over_seeds_is_students() -> None:
    stats = pytest.importorskip("scipy.stats")
    values = [0.97, 0.98, 0.99, 0.985, 0.975]

    found = over_seeds(values)

    low, high = stats.t.interval(0.95, 4, loc=np.mean(values), scale=stats.sem(values))
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-3)
