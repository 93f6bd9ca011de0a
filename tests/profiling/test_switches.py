from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.optimize import linprog

from edgewise.clock import VirtualClock
from edgewise.profiles.operators import SwitchCost
from edgewise.profiling.operator_energy import EnergyMeter
from edgewise.profiling.switches import (
    SWITCH_SHAPES,
    SwitchSamples,
    fit_affine,
    fit_switches,
    sample_switches,
    with_energy,
)

BACKENDS = ("a:x", "b:x")
TENSOR: Any = None  # the fakes hand on whatever they get
SIZES = tuple(shape.output_bytes for shape in SWITCH_SHAPES)
ALONE_S = (1e-4, 3e-4)
TRUE = {(0, 1): (2e-5, 4e-11), (1, 0): (5e-6, 0.0)}  # fixed seconds, seconds per byte


class Machine:
    """Two backends that pay for a change between them, on a virtual clock."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.rng = np.random.default_rng(3)
        self.last = 0
        self.size = 0
        self.calls = 0
        self.switches = 0
        self.noise_s = 0.0

    def backend(self, number: int) -> Callable[[Any], Any]:
        def call(tensor: Any) -> Any:
            cost_s = ALONE_S[number] + self.noise_s * self.rng.random()
            if self.last != number:
                fixed_s, per_byte_s = TRUE[self.last, number]
                cost_s += fixed_s + per_byte_s * self.size
                self.switches += 1
            self.last = number
            self.calls += 1
            self.clock.sleep_s(cost_s)
            return tensor

        return call


def _samples(machine: Machine, rounds: int = 40) -> list[SwitchSamples]:
    calls = [machine.backend(0), machine.backend(1)]
    found = []
    for size in SIZES:
        machine.size = size
        found.append(
            sample_switches(
                calls,
                TENSOR,
                size_bytes=size,
                rounds=rounds,
                clock=machine.clock,
            )
        )
    return found


def test_sizes_span_what_operators_hand_over() -> None:
    assert SIZES[0] == 4096
    assert SIZES[-1] == pytest.approx(2.5e6, rel=0.01)


def test_each_direction_is_found_as_it_was_made() -> None:
    costs, notes = fit_switches(BACKENDS, _samples(Machine()))
    found = {(c.source, c.target): (c.fixed_s, c.per_byte_s) for c in costs}

    assert found["a:x", "b:x"] == pytest.approx(TRUE[0, 1], rel=1e-3)
    assert found["b:x", "a:x"][0] == pytest.approx(TRUE[1, 0][0], rel=1e-3)
    assert found["b:x", "a:x"][1] == pytest.approx(0.0, abs=1e-14)
    assert not notes


def test_the_interval_holds_the_cost_under_noise_and_calls_that_were_disturbed() -> None:
    machine = Machine()
    machine.noise_s = 2e-5
    samples = _samples(machine, rounds=200)
    for each in samples:
        each.pairs_s[::10] += 1e-2  # another program ran
    costs, _ = fit_switches(BACKENDS, samples)
    there = next(c for c in costs if c.source == "a:x")

    assert there.interval_s is not None
    low_s, high_s = there.interval_s
    assert low_s <= 2e-5 + 4e-11 * 65536 <= high_s
    assert high_s - low_s < 1e-5
    assert there.samples == 800


def test_a_cost_below_zero_counts_as_zero_and_is_said() -> None:
    samples = [
        SwitchSamples(size_bytes=size, pairs_s=np.tile([[2.0, 1.9], [2.2, 2.0]], (20, 1, 1)))
        for size in SIZES
    ]
    costs, notes = fit_switches(BACKENDS, samples)

    assert [c.at_s(1e5) for c in costs] == pytest.approx([0.0, 0.2])
    assert list(notes) == ["switch a:x -> b:x"]


def test_time_ends_the_rounds_but_not_before_ten() -> None:
    machine = Machine()
    found = sample_switches(
        [machine.backend(0)],
        TENSOR,
        size_bytes=1,
        time_cap_s=1e-9,
        clock=machine.clock,
    )

    assert found.pairs_s.shape == (10, 1, 1)
    assert np.isfinite(found.pairs_s).all()


def _by_linear_programme(sizes: Any, values: Any, weights: Any) -> float:
    """Least weighted sum of absolute deviations with both coefficients at least zero."""
    count = len(sizes)
    eye = np.eye(count)
    line = np.column_stack([np.ones(count), sizes])
    upper = np.block([[line, -eye], [-line, -eye]])
    found = linprog([0, 0, *weights], A_ub=upper, b_ub=[*values, *-values], bounds=(0, None))
    assert found.success
    return float(found.fun)


@pytest.mark.parametrize("seed", range(20))
def test_the_fit_is_as_good_as_a_linear_programmes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = np.array([1.0, 4.0, 9.0, 25.0, 60.0])
    values = rng.normal(1.0, 2.0, 5) + rng.normal(0, 0.1) * sizes
    weights = rng.uniform(0.1, 2.0, 5)
    a, b = fit_affine(sizes, values[:, None], weights)[:, 0]

    assert min(a, b) >= 0
    loss = float((weights * np.abs(a + b * sizes - values)).sum())
    assert loss == pytest.approx(_by_linear_programme(sizes, values, weights))


def _meter(machine: Machine, per_switch_j: float) -> EnergyMeter:
    return EnergyMeter(
        note="a meter",
        kind="counter",
        period_s=1e-3,
        read=lambda: 1e-3 * machine.calls + per_switch_j * machine.switches + machine.clock.now_s(),
    )


def test_energy_of_both_directions_is_divided_as_their_latencies_are() -> None:
    machine = Machine()
    samples = _samples(machine)
    costs, _ = fit_switches(BACKENDS, samples)
    calls = {name: [machine.backend(k)] * len(SIZES) for k, name in enumerate(BACKENDS)}
    machine.size = 0
    costs = with_energy(
        costs, calls, [TENSOR] * len(SIZES), samples, meter=_meter(machine, 6e-3), pairs=2,
        clock=machine.clock,
    )  # fmt: skip
    small_j = [c.at_j(SIZES[0]) for c in costs]
    small_s = [c.at_s(SIZES[0]) for c in costs]

    assert sum(j for j in small_j if j is not None) == pytest.approx(12e-3, rel=1e-3)
    assert small_j[0] is not None
    assert small_j[0] / 12e-3 == pytest.approx(small_s[0] / sum(small_s), rel=1e-3)


def test_energy_is_unknown_where_work_draws_no_more_than_idling() -> None:
    machine = Machine()
    samples = _samples(machine)
    costs, _ = fit_switches(BACKENDS, samples)
    calls = {name: [machine.backend(k)] * len(SIZES) for k, name in enumerate(BACKENDS)}
    idle = EnergyMeter(
        note="m", kind="counter", period_s=1e-3, read=lambda: 5.0 * machine.clock.now_s()
    )
    found = with_energy(
        costs,
        calls,
        [TENSOR] * len(SIZES),
        samples,
        meter=idle,
        pairs=2,
        clock=machine.clock,
    )

    assert [c.fixed_j for c in found] == [None, None]


def test_every_ordered_pair_has_a_cost() -> None:
    pairs_s = np.ones((10, 3, 3))
    costs, _ = fit_switches("abc", [SwitchSamples(size_bytes=s, pairs_s=pairs_s) for s in SIZES])

    assert {(c.source, c.target) for c in costs} == set(itertools.permutations("abc", 2))
    assert all(isinstance(c, SwitchCost) for c in costs)
