from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import pytest

from edgewise.backends import load_program
from edgewise.bench.background import Load
from edgewise.bench.evaluate import Sample
from edgewise.bench.quota import CpuQuota, PlayedQuota
from edgewise.bench.throttle import (
    LEVELS,
    Repetition,
    Request,
    ThrottleScene,
    default_scene,
    mean_over,
    play_throttled,
    summarise_throttled,
)
from edgewise.clock import MonotonicClock
from edgewise.errors import ConfigError, EdgeError
from edgewise.frontends.outline import outline_model
from edgewise.model import Validation
from edgewise.predict import CostTable
from edgewise.runtime import Session

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="co-runners need Linux")

NAMES = ("edgewise", "full_depth", "oracle")
CALM = ThrottleScene(duration_s=0.1, quotas=(), loads=())


class PretendedQuota(CpuQuota):
    """Steps a number instead of a control group."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float | None] = []
        self.exempted: list[int] = []

    def set_ratio(self, ratio: float | None) -> None:
        self.ratio = ratio
        self.seen.append(ratio)

    def exempt(self, pids: Iterable[int]) -> None:
        self.exempted += pids

    def exempt_thread(self) -> bool:
        return False


def make_sessions(cost_s: float = 2e-4) -> dict[str, Session]:
    rng = np.random.default_rng(0)
    model = outline_model(3).with_heads(
        {},
        accuracy=dict(enumerate((0.6, 0.7, 0.8))),
        validation=Validation(logits=rng.normal(size=(3, 40, 10)), labels=rng.integers(0, 10, 40)),
    )
    clock = MonotonicClock()
    program = load_program(model, "null", clock=clock, cost_s=lambda _: cost_s)
    costs = CostTable.from_costs([cost_s] * 3, [cost_s] * 2 + [0.0])
    return {
        name: Session(program, costs, policy=name.partition("+")[0], clock=clock) for name in NAMES
    }


def sample() -> Sample:
    return Sample(inputs=np.zeros((7, 3, 8, 8), np.float32), labels=np.arange(7), source="zeros")


def play(
    scene: ThrottleScene, *, repetitions: int = 1, quota: CpuQuota | None = None
) -> list[Repetition]:
    return play_throttled(
        make_sessions, sample(), scene=scene, repetitions=repetitions, budget_s=0.05, quota=quota
    )


def request(policy: str, *, depth: float = 1.0, met: bool = True, right: bool = True) -> Request:
    return Request(policy=policy, at_s=0.0, depth_ratio=depth, latency_s=0.01, met=met, right=right)


def repetition(*requests: Request) -> Repetition:
    return Repetition(requests=requests, quotas=(), loads=())


def test_the_quota_goes_down_and_up_twice_and_co_runners_come_between_and_with_it() -> None:
    scene = default_scene(1.0, cores=2)

    assert [ratio for _, ratio in scene.quotas] == [*LEVELS, *LEVELS]
    assert min(LEVELS) == 0.25
    assert scene.duration_s == 21.0
    alone = [load.kind for a, b, load in scene.loads if 7.0 <= a < b <= 14.0]
    assert alone == ["map", "audio", "cpu"]
    assert [load.kind for a, _, load in scene.loads if a > 14.0] == ["map", "audio"]
    assert all(b <= scene.duration_s for _, b, _ in scene.loads)
    assert default_scene(1.0, cores=2, with_quota=False).quotas == ()


def test_every_input_goes_to_every_policy_in_an_order_that_rotates() -> None:
    (played,) = play(CALM)

    names = [r.policy for r in played.requests]
    rounds = [names[i : i + len(NAMES)] for i in range(0, len(names), len(NAMES))]
    assert len(rounds) > 3
    assert all(sorted(turn) == sorted(NAMES) for turn in rounds)
    assert {turn[0] for turn in rounds} == set(NAMES)
    assert all(r.depth_ratio == 1.0 for r in played.requests if r.policy == "full_depth")


def test_each_repetition_begins_anew_and_inside_what_was_asked_for() -> None:
    entered: list[Mapping[str, Session]] = []

    @contextlib.contextmanager
    def around(sessions: Mapping[str, Session]) -> Iterator[None]:
        entered.append(sessions)
        yield

    shares: list[float] = []
    play_throttled(
        make_sessions,
        sample(),
        scene=CALM,
        repetitions=2,
        budget_s=0.05,
        quota=None,
        around=around,
        on_progress=shares.append,
    )

    assert len(entered) == 2
    assert entered[0]["edgewise"].policy is not entered[1]["edgewise"].policy
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_quota_and_co_runners_are_played_and_end_with_the_repetition() -> None:
    quota = PretendedQuota()
    load = Load("cpu", duty_ratio=0.1, engine="builtin")
    scene = ThrottleScene(
        duration_s=1.0, quotas=((0.0, 1.0), (0.1, 0.25)), loads=((0.0, 30.0, load),)
    )

    (played,) = play(scene, quota=quota)

    assert [step.ratio for step in played.quotas] == [1.0, 0.25]
    assert quota.seen == [1.0, 0.25]
    assert quota.ratio == 0.25
    assert [span.label for span in played.loads] == [load.label]
    assert len(quota.exempted) == 1
    assert not load.is_running
    assert not [t for t in threading.enumerate() if t.name in {"edgewise-load", "edgewise-quota"}]


def test_a_co_runner_that_cannot_start_ends_the_comparison_with_its_reason() -> None:
    good = Load("cpu", duty_ratio=0.1, engine="builtin")
    scene = ThrottleScene(
        duration_s=0.3,
        quotas=(),
        loads=((0.0, 9.0, good), (0.0, 9.0, Load("cpu", cpus=[1023]))),
    )
    with pytest.raises(EdgeError, match="refused the load"):
        play(scene)
    assert not good.is_running


def test_a_policy_that_fails_leaves_no_load_and_no_thread() -> None:
    load = Load("cpu", duty_ratio=0.1, engine="builtin")

    def stop(share: float) -> None:
        if share > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play_throttled(
            make_sessions,
            sample(),
            scene=ThrottleScene(duration_s=0.5, quotas=((0.0, 0.5),), loads=((0.0, 9.0, load),)),
            repetitions=1,
            budget_s=0.05,
            quota=PretendedQuota(),
            on_progress=stop,
        )

    assert not load.is_running
    assert not [t for t in threading.enumerate() if t.name in {"edgewise-load", "edgewise-quota"}]


def test_a_scene_with_quotas_needs_one_to_step() -> None:
    with pytest.raises(ConfigError, match="there is none"):
        play(ThrottleScene(duration_s=0.1, quotas=((0.0, 0.5),), loads=()))
    with pytest.raises(ConfigError, match="at least one repetition"):
        play(CALM, repetitions=0)


def test_a_repetition_is_one_observation_whatever_its_number_of_requests() -> None:
    rows = summarise_throttled(
        [
            repetition(request("a", met=False), request("a"), request("oracle", depth=1.0)),
            repetition(*[request("a", depth=0.5, right=False)] * 8, request("oracle", depth=0.8)),
        ]
    )

    row = next(r for r in rows if r.policy == "a")
    assert row.requests == 10
    assert row.dsr.value == pytest.approx((0.5 + 1.0) / 2)
    assert row.mean_depth_ratio.value == pytest.approx(0.75)
    assert row.depth_of_oracle is not None
    assert row.depth_of_oracle.value == pytest.approx((1.0 + 0.5 / 0.8) / 2)
    assert row.accuracy.value == pytest.approx(0.5)
    assert row.right_in_time.value == pytest.approx((0.5 + 0.0) / 2)
    assert 0.0 <= row.dsr.low < row.dsr.value < row.dsr.high <= 1.0


def test_without_hindsight_depth_is_not_compared_with_it() -> None:
    (row,) = summarise_throttled([repetition(request("a"))])

    assert row.depth_of_oracle is None
    assert row.dsr.low == -np.inf  # one repetition says nothing of how they differ


def test_the_interval_covers_the_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    found = [mean_over(rng.normal(10.0, 1.0, 5).tolist()) for _ in range(2000)]
    covered = np.mean([e.low <= 10.0 <= e.high for e in found])

    assert abs(covered - 0.95) < 0.015  # three standard errors of 2000 trials


def test_the_time_line_is_json_with_columns_by_policy() -> None:
    played = Repetition(
        requests=(request("a"), request("b", met=False), request("a", depth=0.25)),
        quotas=(PlayedQuota(at_s=0.5, ratio=0.25),),
        loads=(),
    )
    line = json.loads(json.dumps(played.time_line(), allow_nan=False))

    assert line["policies"]["a"]["depth_ratio"] == [1.0, 0.25]
    assert line["policies"]["b"]["met"] == [False]
    assert line["quotas"] == [{"at_s": 0.5, "ratio": 0.25}]
