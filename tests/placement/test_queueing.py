"""Closed forms against other closed forms, exact numerical solutions and known tables."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import poisson

from edgewise.placement import queueing
from edgewise.placement.cache import mixed_service


def one(value: float) -> Any:
    return np.array(float(value))


def crommelin_wait_s(rate: float, service_s: float, servers: int) -> float:
    """Mean wait of M/D/k, exactly: the number in system every c seconds is a Markov chain.

    N' = max(N - k, 0) + Poisson(λ c) (Crommelin, 1932); Little's law on the number waiting.
    """
    size = 60 + 15 * servers
    arrivals = poisson.pmf(np.arange(size), rate * service_s)
    chain = np.zeros((size, size))
    for n in range(size):
        left = max(n - servers, 0)
        chain[n, left:] = arrivals[: size - left]
    chain[:, -1] += 1 - chain.sum(axis=1)
    system = chain.T - np.eye(size)
    system[-1] = 1.0  # the last equation follows from the others
    law = np.linalg.solve(system, np.r_[np.zeros(size - 1), 1.0])
    waiting = np.maximum(np.arange(size) - servers, 0) @ law
    return float(waiting / rate)


def exact_token_wait_s(shares: Any, service_s: Any, load_s: Any, busy: float) -> float:
    """Mean wait under ``token``, exactly, by the roots of the queue's transform.

    With φ_b(z) = E[exp(-z W); last class b], D_b = Λ - z - Λ q_b exp(-z s_b)(1 - exp(-z T_b)) the
    sum is analytic only if Σ v_b / D_b = 0 at the n - 1 positive roots of
    Σ Λ q_b exp(-z (s_b + T_b)) / D_b = 1, which lie between the roots of the D_b; v_b is the chance
    that a request of class b leaves an idle server.
    """
    q, s, load = (np.asarray(a, dtype=np.float64) for a in (shares, service_s, load_s))
    own = s + (1 - q) * load
    mean = float(q @ own)
    rate = busy / mean

    def denominators(z: float) -> Any:
        return rate - z - rate * q * np.exp(-z * s) * (1 - np.exp(-z * load))

    def characteristic(z: float) -> float:
        return float(1 - (rate * q * np.exp(-z * (s + load)) / denominators(z)).sum())

    poles = sorted(
        brentq(lambda z, b=b: denominators(z)[b], 1e-12, rate, xtol=1e-17) for b in range(len(q))
    )
    rows = []
    for low, high in itertools.pairwise(poles):
        margin = (high - low) * 1e-9
        root = brentq(characteristic, low + margin, high - margin, xtol=1e-15)
        rows.append(rate / denominators(root))
    system = np.array([*rows, np.ones(len(q))])
    idle = np.linalg.solve(system, np.r_[np.zeros(len(q) - 1), 1 - busy])
    ahead = q @ s + q @ load - q * load
    second = q @ (s**2 + (1 - q) * (2 * s * load + load**2))
    covariance = (q * own) @ ahead - mean**2
    delta = idle - q * (1 - busy)
    return float((rate * (second / 2 + covariance) + delta @ ahead) / (1 - busy))


@pytest.mark.parametrize("servers", [1, 2, 4, 8])
def test_cosmetatos_is_within_1_percent_of_the_exact_wait_from_half_load_on(servers: int) -> None:
    for busy in (0.5, 0.8, 0.9):
        exact = crommelin_wait_s(busy * servers, 1.0, servers)

        found = float(queueing.mdk_wait_s(one(busy * servers), one(1.0), np.array(servers)))

        assert found == pytest.approx(exact, rel=0.01)


def test_at_a_low_load_cosmetatos_errs_by_a_thousandth_of_the_service_time() -> None:
    for servers in (2, 4, 8):
        exact = crommelin_wait_s(0.3 * servers, 1.0, servers)

        found = float(queueing.mdk_wait_s(one(0.3 * servers), one(1.0), np.array(servers)))

        assert found == pytest.approx(exact, abs=1e-3)


def test_lee_longton_says_a_fifth_too_little_for_four_servers_at_a_low_load() -> None:
    exact = crommelin_wait_s(1.2, 1.0, 4)

    found = float(queueing.mdk_wait_s(one(1.2), one(1.0), np.array(4), method="lee-longton"))

    assert -0.28 < found / exact - 1 < -0.18


def test_erlang_c_agrees_with_its_textbook_sum() -> None:
    for servers in (1, 2, 5, 20):
        offered = 0.7 * servers
        terms = [offered**m / math.factorial(m) for m in range(servers)]
        last = offered**servers / math.factorial(servers) / (1 - 0.7)

        assert float(queueing.erlang_c(one(offered), np.array(servers))) == pytest.approx(
            last / (sum(terms) + last)
        )


def test_erlang_c_does_not_overflow_for_a_thousand_servers() -> None:
    assert 0 < float(queueing.erlang_c(one(950.0), np.array(1000))) < 1


def test_one_server_with_exponential_service_is_m_m_1() -> None:
    assert float(
        queueing.pool_wait_s(one(0.5), one(1.0), np.array(1), service_cv2=1.0)
    ) == pytest.approx(1.0)
    assert float(queueing.pollaczek_khinchine_s(one(0.5), one(1.0), one(2.0))) == pytest.approx(1.0)


def test_regular_arrivals_at_a_constant_server_never_wait() -> None:
    assert float(queueing.pool_wait_s(one(0.9), one(1.0), np.array(1), arrival_cv2=0.0)) == 0.0


def test_overloaded_queues_wait_for_ever() -> None:
    rate, time, servers = one(2.0), one(1.0), np.array(2)

    assert math.isinf(float(queueing.pollaczek_khinchine_s(rate, time, time)))
    assert math.isinf(float(queueing.mmk_wait_s(rate, time, servers)))
    assert math.isinf(float(queueing.pool_wait_s(rate, time, servers)))
    assert math.isinf(float(queueing.tandem_pool_wait_s(rate, one(0.1), time, servers)))
    assert math.isinf(float(queueing.tandem_pool_wait_s(one(1.0), one(1.0), one(0.5), servers)))


def test_overload_rises_with_utilisation_so_that_a_search_can_descend() -> None:
    found = queueing.overload(np.array([0.5, 1.0, 1.5, 3.0]))

    assert found[0] == 0
    assert (np.diff(found) > 0).all()


def test_a_pool_behind_a_slower_constant_server_never_waits() -> None:
    found = queueing.tandem_pool_wait_s(one(0.5), one(1.0), one(2.0), np.array(2))

    assert float(found) == 0.0


def test_two_stations_of_one_server_wait_as_the_slower_alone() -> None:
    rate, first, second = 0.6, 0.5, 1.2
    alone = rate * second**2 / 2 / (1 - rate * second)
    before = rate * first**2 / 2 / (1 - rate * first)

    found = queueing.tandem_pool_wait_s(one(rate), one(first), one(second), np.array(1))

    assert float(found) == pytest.approx(alone - before)


def _feed(share: float, busy: float, *, rate: float, first_s: float) -> queueing.Feed:
    mean = one(busy * share / rate)
    return queueing.Feed(
        share=one(share),
        first_s=one(first_s),
        caused_s=one(first_s),
        busy=one(busy),
        mean_s=mean,
        second_s2=mean**2,
    )


def test_a_tenant_with_all_requests_is_fed_as_if_alone() -> None:
    feed = _feed(1.0, 0.3, rate=0.6, first_s=0.5)

    fed = queueing.fed_pool_wait_s(one(0.6), one(1.2), np.array(1), feed)

    alone = queueing.tandem_pool_wait_s(one(0.6), one(0.5), one(1.2), np.array(1))
    assert float(fed) == pytest.approx(float(alone))


def test_a_rare_tenant_of_an_idle_accelerator_is_fed_by_a_poisson_stream() -> None:
    feed = _feed(1e-4, 1e-3, rate=0.6, first_s=1e-6)

    fed = queueing.fed_pool_wait_s(one(0.6), one(1.2), np.array(2), feed)

    plain = queueing.mdk_wait_s(one(0.6), one(1.2), np.array(2))
    assert float(fed) == pytest.approx(float(plain), rel=1e-3)


def test_no_pool_waits_whose_workers_are_faster_than_its_own_prefixes() -> None:
    feed = _feed(0.5, 0.8, rate=0.6, first_s=0.7)

    assert float(queueing.fed_pool_wait_s(one(0.6), one(1.3), np.array(2), feed)) == 0.0


@pytest.mark.parametrize("busy", [0.2, 0.5, 0.8])
def test_the_corrected_wait_is_within_2_percent_of_the_exact_one_where_the_paper_is_a_third_off(
    busy: float,
) -> None:
    rng = np.random.default_rng(7)
    worst = plain_worst = 0.0
    for number in range(40):
        n = int(rng.integers(2, 5))
        q = rng.dirichlet(np.full(n, 1.5)) * 0.94 + 0.06 / n
        if number % 3 == 0:
            q = np.array([0.9, 0.1])
        s, load = rng.uniform(2, 30, len(q)), rng.uniform(3, 20, len(q))
        rate = np.array([busy / (q @ (s + (1 - q) * load))])
        found = mixed_service(
            q[None], s[None], load[None], load[None], sram_bytes=0.0, model="token", rate=rate
        )
        exact = exact_token_wait_s(q, s, load, busy)
        ours = queueing.correlated_wait_s(
            rate, found.mean_s, found.second_s2, found.covariance_s2, fresh_s=found.fresh_s
        )
        plain = queueing.pollaczek_khinchine_s(rate, found.mean_s, found.second_s2)
        worst = max(worst, abs(float(ours[0]) / exact - 1))
        plain_worst = max(plain_worst, abs(float(plain[0]) / exact - 1))

    assert worst < 0.02
    assert plain_worst > 4 * worst


@pytest.mark.parametrize(
    ("shares", "service", "load", "busy", "simulated"),
    [
        ([0.9, 0.1], [3, 3], [16, 16], 0.2, 1.74),
        ([0.9, 0.1], [3, 3], [16, 16], 0.5, 7.80),
        ([0.9, 0.1], [3, 3], [16, 16], 0.8, 33.6),
        ([0.9, 0.1], [5, 40], [8, 16], 0.8, 71.2),
        ([0.5, 0.5], [5, 40], [8, 16], 0.8, 81.6),
    ],
)
def test_corrected_waits_agree_with_another_simulator(
    shares: list[float], service: list[float], load: list[float], busy: float, simulated: float
) -> None:
    q, s, t = (np.array([a], dtype=np.float64) for a in (shares, service, load))
    rate = busy / (q * (s + (1 - q) * t)).sum(axis=1)
    found = mixed_service(q, s, t, t, sram_bytes=0.0, model="token", rate=rate)

    wait = queueing.correlated_wait_s(
        rate, found.mean_s, found.second_s2, found.covariance_s2, fresh_s=found.fresh_s
    )

    assert float(wait[0]) == pytest.approx(simulated, rel=0.015)


def test_a_gamma_tail_of_one_exponential_wait_is_exponential() -> None:
    t = np.linspace(0, 5, 7)
    nothing = (one(0), one(0), one(2))

    found = queueing.gamma_tail(t, first=(one(0.6), one(0.9), one(2.0)), second=nothing)

    assert found == pytest.approx(0.6 * np.exp(-t * 0.6 / 0.9))


def test_tails_start_at_one_before_zero_and_stay_there_for_unstable_queues() -> None:
    wait = (one(0.5), one(1.0), one(2.0))
    for_ever = (one(1.0), one(math.inf), one(2.0))

    assert float(queueing.gamma_tail(one(-0.1), first=wait, second=wait)) == 1.0
    assert float(queueing.gamma_tail(one(9.0), first=wait, second=for_ever)) == 1.0
    assert float(queueing.gamma_tail(one(0.0), first=wait, second=wait)) == pytest.approx(0.75)


def test_the_sum_of_two_equal_exponential_waits_has_the_tail_that_integration_gives() -> None:
    t = np.linspace(0.0, 6.0, 5)

    found = queueing.waiting_tail(
        t, first_busy=one(1), first_s=one(1), second_busy=one(1), second_s=one(1)
    )

    assert found == pytest.approx(np.exp(-t) * (1 + t))
