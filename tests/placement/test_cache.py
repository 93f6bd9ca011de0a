"""Miss probabilities and what they leave behind, against brute force."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from edgewise.errors import ConfigError
from edgewise.placement.cache import mixed_service, recency_probabilities


def rows(*values: Any) -> tuple[Any, ...]:
    return tuple(np.array([v], dtype=np.float64) for v in values)


def chain_of_orders(
    q: Any, s: Any, load: Any, sizes: Any, room: float, *, rate: float
) -> dict[str, Any]:
    """All that `Service` says of LRU, by the Markov chain over orders and linear algebra."""
    n = len(q)
    orders = list(itertools.permutations(range(n)))
    place = {o: k for k, o in enumerate(orders)}
    chain = np.zeros((len(orders), len(orders)))
    cost = np.zeros((len(orders), n))
    after = np.zeros((len(orders), n), dtype=int)
    missed = np.zeros((len(orders), n), dtype=bool)
    for k, order in enumerate(orders):
        for a in range(n):
            before = order[: order.index(a)]
            missed[k, a] = sum(sizes[b] for b in before) + sizes[a] > room
            cost[k, a] = s[a] + missed[k, a] * load[a]
            after[k, a] = place[(a, *(b for b in order if b != a))]
            chain[k, after[k, a]] += q[a]
    law = np.linalg.lstsq(
        np.vstack([chain.T - np.eye(len(orders)), np.ones(len(orders))]),
        np.r_[np.zeros(len(orders)), 1.0],
        rcond=None,
    )[0]
    weight = law[:, None] * np.asarray(q)
    mean = (weight * cost).sum()
    # H solves the Poisson equation: H - chain H = (mean of the next cost) - mean.
    next_cost = (cost * q).sum(axis=1)
    ahead = np.linalg.lstsq(
        np.vstack([np.eye(len(orders)) - chain, law]), np.r_[next_cost - mean, 0.0], rcond=None
    )[0]
    idle = weight * np.exp(-rate * cost)
    return {
        "miss": (law[:, None] * missed).sum(axis=0),
        "mean_s": mean,
        "second_s2": (weight * cost**2).sum(),
        "covariance_s2": (weight * cost * ahead[after]).sum(),
        "fresh_s": (idle * ahead[after]).sum() / idle.sum(),
        "ahead_s": (law[:, None] * ahead[after]).sum(axis=0),
    }


@pytest.mark.parametrize(
    ("shares", "sizes", "expected"),
    [
        ([0.5, 0.3, 0.2], [4, 3, 3], [0.161, 0.325, 0.514]),
        ([0.4, 0.3, 0.2, 0.1], [3.5] * 4, [0.284, 0.392, 0.559, 0.765]),
        ([0.25] * 4, [2.5] * 4, [0.25] * 4),
        ([0.4, 0.2, 0.2, 0.1, 0.1], [2] * 5, [0.030, 0.127, 0.127, 0.358, 0.358]),
    ],
)
def test_lru_misses_are_those_that_another_simulator_counted(
    shares: list[float], sizes: list[float], expected: list[float]
) -> None:
    q, f = rows(shares, np.array(sizes) * 1e6)

    found = mixed_service(q, f * 0, f * 0 + 1, f, sram_bytes=8e6, model="lru")

    assert found.miss[0] == pytest.approx(expected, abs=0.001)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_everything_said_of_lru_agrees_with_linear_algebra_on_its_chain(n: int) -> None:
    rng = np.random.default_rng(n)
    for _ in range(5):
        q, s, load = rng.dirichlet(np.ones(n)), rng.uniform(1, 9, n), rng.uniform(1, 20, n)
        sizes = rng.uniform(1e6, 5e6, n)
        rate = 0.6 / float(q @ (s + load))
        exact = chain_of_orders(q, s, load, sizes, 8e6, rate=rate)

        found = mixed_service(
            *rows(q, s, load, sizes), sram_bytes=8e6, model="lru", rate=np.array([rate])
        )

        for name, value in exact.items():
            assert np.asarray(getattr(found, name))[0] == pytest.approx(value, abs=1e-9), name


def test_lru_of_models_that_never_fit_together_is_the_token_policy() -> None:
    q, s, load, sizes = rows([0.2, 0.3, 0.5], [3, 5, 8], [9, 17, 19], [5e6, 6e6, 7e6])
    rate = np.array([0.02])

    lru = mixed_service(q, s, load, sizes, sram_bytes=8e6, model="lru", rate=rate)
    token = mixed_service(q, s, load, sizes, sram_bytes=8e6, model="token", rate=rate)

    for name in ("mean_s", "second_s2", "covariance_s2", "fresh_s", "ahead_s", "miss"):
        assert getattr(lru, name) == pytest.approx(getattr(token, name)), name


def test_token_covariance_is_that_of_a_counted_sequence() -> None:
    q, s, load = np.array([0.6, 0.3, 0.1]), np.array([3.0, 8.0, 22.0]), np.array([9.0, 17.0, 19.0])
    who = np.random.default_rng(0).choice(3, size=400_000, p=q)
    cost = s[who[1:]] + load[who[1:]] * (who[1:] != who[:-1])
    counted = np.cov(cost[1:], cost[:-1])

    found = mixed_service(*rows(q, s, load, load), sram_bytes=0.0, model="token")

    assert float(found.mean_s[0]) == pytest.approx(cost.mean(), rel=0.005)
    assert float(found.second_s2[0]) == pytest.approx((cost**2).mean(), rel=0.01)
    assert float(found.covariance_s2[0]) == pytest.approx(counted[0, 1], rel=0.03)


def test_the_papers_misses_vanish_where_all_fit_and_where_one_is_alone() -> None:
    q, s, load = np.array([[0.5, 0.5]] * 2 + [[1.0, 0.0]]), np.ones((3, 2)), np.ones((3, 2))
    sizes = np.array([[3e6, 3e6], [6e6, 6e6], [6e6, 6e6]])

    found = mixed_service(q, s, load, sizes, sram_bytes=8e6, model="paper", rate=np.full(3, 0.1))

    assert found.miss.tolist() == [[0, 0], [0.5, 0.5], [0, 0]]
    assert found.fresh_s is not None
    assert found.fresh_s[[0, 2]] == pytest.approx(0)
    assert found.covariance_s2[[0, 2]] == pytest.approx(0)


def test_pinned_models_never_miss_and_their_services_are_independent() -> None:
    q, s, load = rows([0.5, 0.5], [1, 9], [5, 5])

    found = mixed_service(q, s, load, load, sram_bytes=1.0, model="pinned", rate=np.array([0.1]))

    assert not found.miss.any()
    assert found.covariance_s2 == pytest.approx(0)
    assert found.fresh_s == pytest.approx(0)


@pytest.mark.parametrize("model", ["token", "lru", "pinned", "paper"])
def test_a_tenant_without_a_prefix_changes_nothing(model: Any) -> None:
    small = rows([0.4, 0.6], [3, 8], [9, 17], [5e6, 4e6])
    large = rows([0.4, 0, 0.6], [3, 0, 8], [9, 0, 17], [5e6, 7e6, 4e6])
    rate = np.array([0.05])

    two = mixed_service(*small, sram_bytes=8e6, model=model, rate=rate)
    three = mixed_service(*large, sram_bytes=8e6, model=model, rate=rate)

    assert three.mean_s == pytest.approx(two.mean_s)
    assert three.covariance_s2 == pytest.approx(two.covariance_s2)
    assert three.fresh_s == pytest.approx(two.fresh_s)
    assert three.miss[0].tolist() == pytest.approx([two.miss[0, 0], 0, two.miss[0, 1]])


def test_very_rare_tenants_keep_all_probabilities_finite() -> None:
    q, s, load, sizes = rows([1 - 2e-13, 1e-13, 1e-13], [3, 3, 3], [9, 9, 9], [4e6] * 3)

    found = mixed_service(q, s, load, sizes, sram_bytes=8e6, model="lru", rate=np.array([0.1]))

    assert recency_probabilities(q).sum() == pytest.approx(1)
    assert np.isfinite(found.covariance_s2).all()
    assert found.miss[0, 0] == pytest.approx(0, abs=1e-9)
    assert found.miss[0, 1] == pytest.approx(0.5)


def test_nobody_on_the_accelerator_costs_nothing() -> None:
    nothing = np.zeros((1, 3))

    for model in ("token", "lru", "pinned", "paper"):
        found = mixed_service(
            nothing, nothing, nothing, nothing, sram_bytes=8e6, model=model, rate=np.zeros(1)
        )
        assert float(found.mean_s[0]) == 0
        assert found.fresh_s == pytest.approx(0)


def test_too_many_tenants_for_exact_lru_are_refused_with_a_way_out() -> None:
    many = np.full((1, 9), 1 / 9)

    with pytest.raises(ConfigError, match="at most 7 tenants, found 9"):
        mixed_service(many, many, many, many, sram_bytes=1.0, model="lru")
