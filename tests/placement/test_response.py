from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edgewise.device.accelerator import load_accelerator
from edgewise.placement.problem import PAPER, Problem, Tenant
from edgewise.placement.response import (
    evaluate,
    ideal_s,
    response_quantile_s,
    response_tail,
)
from edgewise.placement.study import random_mixes, synthetic_profile

CORAL = load_accelerator("coral-usb")


def mixes(count: int, **more: Any) -> list[Problem]:
    return random_mixes(count, CORAL, seed=5, **more)


def test_two_tenants_under_the_papers_formulas_done_by_hand() -> None:
    problem = replace(mixes(1)[0], assumptions=PAPER).with_rates([3.0, 1.0])
    places, cores = (7, 9), (2, 2)

    found = evaluate(problem, np.array([places]), np.array([cores]))

    s = [problem.service_s[i, places[i]] for i in (0, 1)]
    t = [problem.load_s[i, places[i]] for i in (0, 1)]
    sizes = sum(problem.prefix_bytes[i, places[i]] for i in (0, 1))
    assert sizes > CORAL.sram_bytes
    q, alpha = (0.75, 0.25), (0.25, 0.75)
    mean = sum(q[i] * (s[i] + alpha[i] * t[i]) for i in (0, 1))
    second = sum(
        q[i] * ((1 - alpha[i]) * s[i] ** 2 + alpha[i] * (s[i] + t[i]) ** 2) for i in (0, 1)
    )
    busy = 4.0 * mean
    assert busy < 1
    wait = 4.0 * second / (2 * (1 - busy))
    for i in (0, 1):
        suffix = problem.cpu_wait_s[i, places[i], 2] + problem.cpu_s[i, places[i], 2]
        assert found.response_s[0, i] == pytest.approx(wait + s[i] + alpha[i] * t[i] + suffix)
    assert found.score[0] == pytest.approx(
        0.75 * found.response_s[0, 0] + 0.25 * found.response_s[0, 1]
    )


def test_candidates_do_not_influence_each_other() -> None:
    problem = mixes(3)[2]
    generator = np.random.default_rng(0)
    places = generator.integers(0, 11, (20, len(problem.rates)))
    cores = np.ones_like(places)

    together = evaluate(problem, places, cores)
    alone = [evaluate(problem, places[[m]], cores[[m]]).score[0] for m in range(20)]

    assert together.score == pytest.approx(alone, rel=1e-12)


def test_an_unstable_queue_gives_infinite_times_and_a_price() -> None:
    problem = mixes(1)[0]
    places = problem.last[None]
    calm = evaluate(problem, places, 0 * places)

    flooded = [problem.with_rates(problem.rates * k) for k in (20, 40)]
    scores = [evaluate(p, places, 0 * places) for p in flooded]

    assert calm.stable.all()
    assert not any(s.stable.any() for s in scores)
    assert all(np.isinf(s.response_s).all() for s in scores)
    assert calm.score[0] < scores[0].score[0] < scores[1].score[0] < math.inf


def test_a_suffix_without_a_core_is_unstable() -> None:
    problem = mixes(1)[0]

    found = evaluate(problem, 0 * problem.last[None], 0 * problem.last[None])

    assert not found.stable[0]
    assert np.isinf(found.response_s).all()


def test_more_cores_than_there_are_cannot_run() -> None:
    problem = mixes(1)[0].with_rates([0.1, 0.1])
    places = 0 * problem.last[None]

    assert evaluate(problem, places, np.array([[2, 2]])).stable[0]
    assert not evaluate(problem, places, np.array([[3, 2]])).stable[0]


@pytest.mark.parametrize("q", [0.5, 0.95, 0.99])
@pytest.mark.parametrize("many", [3, 700], ids=["few candidates", "many candidates"])
def test_a_quantile_is_where_the_tail_falls_to_the_rest(q: float, many: int) -> None:
    problem = mixes(2)[1]
    generator = np.random.default_rng(1)
    places = generator.integers(0, 11, (many, len(problem.rates)))
    found = evaluate(problem, places, np.ones_like(places))
    finite = np.isfinite(found.response_s)

    time_s = response_quantile_s(found, q)

    # The tail may jump where a share of requests does not wait at all.
    assert (response_tail(found, time_s * (1 + 1e-6)) <= 1 - q + 1e-9)[finite].all()
    assert (response_tail(found, time_s * (1 - 1e-6)) >= 1 - q - 1e-9)[finite].all()
    assert np.isinf(time_s[~finite]).all()


def test_weights_and_deadlines_change_what_counts() -> None:
    generator = np.random.default_rng(2)
    tenants = [
        Tenant(
            name=name,
            profile=synthetic_profile(generator, CORAL.name),
            rate_per_s=1.0,
            weight=weight,
            deadline_s=deadline,
        )
        for name, weight, deadline in (("a", 3.0, 0.05), ("b", 1.0, None))
    ]
    places, cores = np.array([[0, 0]]), np.array([[2, 2]])

    def score(objective: Any) -> tuple[float, Any]:
        problem = Problem.of(tenants, CORAL, cores=4, objective=objective)
        found = evaluate(problem, places, cores)
        return float(found.score[0]), found

    weighted, found = score("weighted")
    assert weighted == pytest.approx(found.response_s[0] @ [0.75, 0.25])
    worst, found = score("max-min")
    ideal = ideal_s(Problem.of(tenants, CORAL, cores=4))
    assert ideal[0] == 0.05
    assert worst == pytest.approx((found.response_s[0] / ideal).max())
    late, found = score("deadline-miss")
    tail = response_tail(found, np.array([[0.05, np.inf]]))[0]
    assert late == pytest.approx(tail.mean() + 1e-3 * found.response_s[0].mean())
    slow, found = score("p99")
    assert slow == pytest.approx(response_quantile_s(found, 0.99)[0].mean())


def test_an_arrival_process_that_is_even_waits_less_and_a_bursty_one_more() -> None:
    [problem] = mixes(1)
    places = problem.last[None]

    def wait(cv2: float) -> float:
        tenants = [replace(t, arrival_cv2=cv2) for t in problem.tenants]
        other = Problem.of(tenants, CORAL, cores=4)
        return float(evaluate(other, places, 0 * places).accelerator_wait_s[0])

    assert wait(0.2) < wait(1.0) < wait(3.0)
