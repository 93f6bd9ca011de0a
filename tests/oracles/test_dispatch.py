"""Deciders of backends against trying everything, and against an integer program."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from edgewise.dispatch.memory import kept_bytes
from edgewise.dispatch.problem import HOME, OBJECTIVES, Assignment, Objective, Problem, totals
from edgewise.dispatch.search import decide
from edgewise.dispatch.synthetic import random_problem
from edgewise.errors import Infeasible

CLOSE = 1e-9  # sums of few terms, in another order
SEEDS = range(24)


def small(seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    operators = int(rng.integers(2, 6))
    return random_problem(
        rng,
        operators=operators,
        backends=int(rng.integers(1, 4)),
        distinct=2 if seed % 3 == 0 else operators,
        switch_ratio=(0.02, 0.3, 1.0, 3.0)[seed % 4],
        segments=seed % 3,
        missing_ratio=0.15,
    )


def every_assignment(problem: Problem) -> Iterator[Assignment]:
    """All sequences of backends with all sets of segments that do not overlap."""
    numbers = range(len(problem.segments))
    for chosen in itertools.chain.from_iterable(
        itertools.combinations(numbers, k) for k in range(len(problem.segments) + 1)
    ):
        covers = [t for s in chosen for t in _span(problem, s)]
        if len(set(covers)) != len(covers):
            continue
        whole = {t: s for s in chosen for t in _span(problem, s)}
        pieces = sorted(
            {whole.get(t, -1 - t): t for t in reversed(range(problem.num_operators))}.values()
        )
        sizes = np.diff([*pieces, problem.num_operators])
        for backends in itertools.product(range(len(problem.backends)), repeat=len(pieces)):
            yield Assignment(backend=np.repeat(np.array(backends), sizes), segments=chosen)


def _span(problem: Problem, number: int) -> range:
    return range(problem.segments[number].start, problem.segments[number].stop)


@pytest.mark.parametrize("seed", SEEDS)
def test_methods_and_limits_find_what_trying_everything_finds(seed: int) -> None:
    problem = small(seed)
    tried = [(a, totals(problem, a), kept_bytes(problem, a)) for a in every_assignment(problem)]
    tried = [(a, t, kept) for a, t, kept in tried if math.isfinite(t.latency_s)]
    times = sorted(t.latency_s for _, t, _ in tried)
    sizes = sorted(kept for *_, kept in tried)
    quantile = (0.0, 0.05, 0.2, 0.5)[seed % 4]
    cap_s = times[int(quantile * (len(times) - 1))]
    budget = sizes[int(quantile * (len(sizes) - 1))]

    for objective in OBJECTIVES:
        found = {
            "viterbi": decide(problem, objective=objective, method="viterbi"),
            "best": decide(problem, objective=objective),
            "cap": decide(problem, objective=objective, cap_s=cap_s),
            "budget": decide(problem, objective=objective, memory_bytes=budget),
        }
        least = {
            "viterbi": min(t.of(objective) for a, t, _ in tried if not a.segments),
            "best": min(t.of(objective) for _, t, _ in tried),
            "cap": min(t.of(objective) for _, t, _ in tried if t.latency_s <= cap_s * (1 + CLOSE)),
            "budget": min(t.of(objective) for _, t, kept in tried if kept <= budget),
        }

        for name, decision in found.items():
            assert decision.totals.of(objective) == pytest.approx(least[name], rel=CLOSE), name
            assert decision.exact
        assert found["cap"].totals.latency_s <= cap_s * (1 + 2 * CLOSE)
        assert kept_bytes(problem, found["budget"].assignment) <= budget


@pytest.mark.parametrize("seed", SEEDS)
def test_limits_that_nothing_meets_come_with_the_closest(seed: int) -> None:
    problem = small(seed)
    tried = [totals(problem, a).latency_s for a in every_assignment(problem)]

    with pytest.raises(Infeasible, match="the fastest takes") as refused:
        decide(problem, cap_s=0.999 * min(tried))

    closest = refused.value.closest
    assert closest.totals.latency_s == pytest.approx(min(tried), rel=CLOSE)  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("objective", ["latency", "energy"])
def test_limits_find_what_an_integer_program_finds(seed: int, objective: Objective) -> None:
    problem = random_problem(
        np.random.default_rng(seed), operators=14, distinct=5, segments=4, switch_ratio=0.5
    )
    free = decide(problem, objective=objective)
    budget = 0.45 * kept_bytes(problem, free.assignment)
    fastest, thrifty = (
        decide(problem, objective=o).totals.latency_s for o in ("latency", "energy")
    )
    cap_s = 0.7 * fastest + 0.3 * thrifty

    within_budget = decide(problem, objective=objective, memory_bytes=budget)
    within_cap = decide(problem, objective=objective, cap_s=cap_s)

    program = _arcs(problem)
    for decision, resource, limit in (
        (within_budget, "kept", budget),
        (within_cap, "latency", cap_s),
    ):
        least = _integer_program(program, objective, resource, limit)
        assert decision.exact
        assert decision.totals.of(objective) == pytest.approx(least, rel=1e-6)  # the solver's gap


Arc = tuple[tuple[object, ...], tuple[object, ...], float, float, float]


def _arcs(problem: Problem) -> list[Arc]:
    """From, to, seconds, joules, bytes kept: of every switch, operator and segment."""
    assert problem.op_j is not None
    assert problem.switch_j is not None
    assert problem.gap_j is not None
    backends = range(len(problem.backends))
    away = [name != HOME for name in problem.backends]
    arcs: list[Arc] = []
    for t, (seconds, joules) in enumerate(zip(problem.op_s, problem.op_j, strict=True)):
        for b in backends:
            arcs.append(
                (
                    ("in", t, b),
                    ("out", t + 1, b),
                    seconds[b],
                    joules[b],
                    problem.weight_bytes[t] * away[b],
                )
            )
            for a in backends if t else [b]:
                source = ("out", t, a) if t else ("begin",)
                arcs.append(
                    (
                        source,
                        ("in", t, b),
                        problem.switch_s[t, a, b] + problem.gap_s[t],
                        problem.switch_j[t, a, b] + problem.gap_j[t],
                        0.0,
                    )
                )
    for segment in problem.segments:
        assert segment.cost_j is not None
        for b in backends:
            ends = ("in", segment.start, b), ("out", segment.stop, b)
            arcs.append(
                (*ends, segment.cost_s[b], segment.cost_j[b], segment.weight_bytes * away[b])
            )
    end = problem.num_operators
    last_s, last_j = problem.gap_s[end], problem.gap_j[end]
    arcs += [(("out", end, b), ("end",), last_s, last_j, 0.0) for b in backends]
    return arcs


def _integer_program(arcs: list[Arc], objective: Objective, resource: str, limit: float) -> float:
    """Least cost of one unit of flow from begin to end with at most so much of the resource."""
    places = {place: i for i, place in enumerate({p for a in arcs for p in a[:2]})}
    flow = np.zeros((len(places), len(arcs)))
    for i, (source, target, *_) in enumerate(arcs):
        flow[places[source], i] += 1
        flow[places[target], i] -= 1
    net = np.zeros(len(places))
    net[places["begin",]], net[places["end",]] = 1, -1
    columns = dict(
        zip(("latency", "energy", "kept"), np.array([a[2:] for a in arcs]).T, strict=True)
    )
    scale = columns[objective].max()
    found = milp(
        columns[objective] / scale,
        integrality=np.ones(len(arcs)),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(flow, net, net),
            LinearConstraint(columns[resource] / limit, -np.inf, 1.0),
        ],
        options={"mip_rel_gap": 0.0},
    )
    assert found.success, found.message
    return float(found.fun * scale)
