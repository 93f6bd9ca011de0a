from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edgewise.device.accelerator import load_accelerator
from edgewise.placement.problem import Assumptions, Problem, Tenant
from edgewise.placement.response import evaluate
from edgewise.placement.scores import UNSTABLE, Scores
from edgewise.placement.study import synthetic_profile

CORAL = load_accelerator("coral-usb")


def problem(
    tenants: int, seed: int, *, cv2: float = 1.0, load: float = 0.7, **more: Any
) -> Problem:
    generator = np.random.default_rng(seed)
    found = Problem.of(
        [
            Tenant(
                name=f"t{i}",
                profile=synthetic_profile(generator, CORAL.name, places=5 + i),
                rate_per_s=1.0,
                weight=float(generator.uniform(0, 3)),
                arrival_cv2=cv2,
            )
            for i in range(tenants)
        ],
        CORAL,
        cores=5,
        **more,
    )
    whole_s = found.service_s[np.arange(tenants), found.last]
    return found.with_rates(load * generator.dirichlet(np.ones(tenants)) / whole_s)


@pytest.mark.parametrize("tenants", [1, 2, 4])
@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"objective": "mean"}, id="mean"),
        pytest.param({"objective": "weighted"}, id="weighted"),
        pytest.param({"assumptions": Assumptions(miss="paper")}, id="the paper's misses"),
        pytest.param({"assumptions": Assumptions(miss="lru")}, id="lru"),
        pytest.param({"assumptions": Assumptions(miss="pinned")}, id="no misses"),
        pytest.param({"residency": "pinned"}, id="fixed shares"),
        pytest.param({"assumptions": Assumptions(correlated=False)}, id="uncorrelated"),
        pytest.param({"assumptions": Assumptions(tandem=False)}, id="no tandem"),
        pytest.param({"cv2": 0.3}, id="even arrivals"),
        pytest.param({"cv2": 2.5}, id="bursts"),
        pytest.param({"load": 2.0}, id="overload"),
    ],
)
def test_a_rank_is_the_score_that_evaluate_gives(tenants: int, more: dict[str, Any]) -> None:
    asked = problem(tenants, seed=tenants, **more)
    scores = Scores(asked)
    generator = np.random.default_rng(9)
    places = np.stack([generator.integers(0, p + 1, 60) for p in asked.last], axis=1)
    places *= generator.random(places.shape) < 0.7
    anyhow = generator.integers(0, 5 // tenants + 1, places.shape)

    for cores in (scores.split(places), scores.proportional(places), anyhow):
        found = evaluate(asked, places, cores, shares_bytes=scores.shares_bytes(places))
        expected = found.score + np.where(found.stable, 0.0, UNSTABLE)
        # Rounding alone: sums are taken in another order.
        assert scores.rank(places, cores) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("objective", ["p99", "max-min"])
def test_objectives_that_are_no_sums_are_evaluated_in_full(objective: Any) -> None:
    asked = problem(2, seed=1, objective=objective)
    places, cores = np.array([[0, 3], [5, 6]]), np.array([[2, 2], [0, 0]])

    assert Scores(asked).rank(places, cores) == pytest.approx(evaluate(asked, places, cores).score)


def test_no_split_is_better_than_the_optimal_one() -> None:
    asked = problem(3, seed=4)
    scores = Scores(asked)
    generator = np.random.default_rng(2)
    places = np.stack([generator.integers(0, p + 1, 200) for p in asked.last], axis=1)

    best = scores.rank(places, scores.split(places))

    for _ in range(20):
        other = generator.multinomial(5, [1 / 3] * 3, 200)
        assert (best <= scores.rank(places, other) * (1 + 1e-12)).all()
    assert (best <= scores.rank(places, scores.proportional(places)) * (1 + 1e-12)).all()


def test_what_cannot_run_ranks_after_all_that_can() -> None:
    slow = problem(2, seed=3, load=0.01)
    slow = replace(slow, cpu_s=slow.cpu_s * 1e4)  # seconds that dwarf the price of overload
    scores = Scores(slow)
    places = np.array([[0, 0], [0, 0]])

    runs, starved = scores.rank(places, np.array([[2, 3], [0, 5]]))

    assert runs < UNSTABLE < starved
