"""What going from one backend to another costs: two calls on two backends against two on one.

As the paper does it: an operator runs on the source, then on the target, and what that takes
beyond each alone is the switch. Three things are added. A call on the source stands before each
timed pair, so that a cost has a direction. The target reads what the source has just made. And
several sizes are measured, so that a cost can grow with the bytes that are handed over.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edgewise.clock import Clock, MonotonicClock
from edgewise.profiles.operators import OperatorShape, SwitchCost
from edgewise.profiling.operator_energy import EnergyMeter, measure_energy

if TYPE_CHECKING:
    import torch

Float64 = npt.NDArray[np.float64]
Call = Callable[["torch.Tensor"], "torch.Tensor"]

# An activation: as wide as its input, no weights. 4 KiB, 64 KiB, 0.5 MiB and 2.4 MiB.
SWITCH_SHAPES: tuple[OperatorShape, ...] = tuple(
    OperatorShape(kind="activation", m=m, k=n, n=n, function="silu")
    for m, n in ((1, 1024), (16, 1024), (128, 1024), (128, 4864))
)
TYPICAL_BYTES = 64 * 1024

_RESAMPLES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchSamples:
    """Times of pairs of calls between B backends at one size: R rounds.

    Attributes:
        size_bytes: What is handed over.
        pairs_s: [R, B, B], seconds, from row to column; on the diagonal two calls of one backend.
    """

    size_bytes: int
    pairs_s: Float64

    def beyond_s(self, source: int, target: int, rounds: npt.NDArray[np.int64]) -> Float64:
        """What a pair takes beyond each backend alone, by medians over rounds.

        Args:
            source: Number of the backend that runs first.
            target: Of the other.
            rounds: Which rounds count, [..., R].

        Returns:
            Seconds, [...]; negative where noise is larger than the cost.
        """
        pair, first, second = (
            np.median(self.pairs_s[:, a, b][rounds], axis=-1)
            for a, b in ((source, target), (source, source), (target, target))
        )
        return np.asarray(pair - (first + second) / 2)


def sample_switches(  # noqa: PLR0913 - each is one knob of a campaign
    calls: Sequence[Call],
    tensor: torch.Tensor,
    *,
    size_bytes: int,
    rounds: int = 200,
    warmups: int = 3,
    time_cap_s: float = math.inf,
    clock: Clock | None = None,
    rng: np.random.Generator | None = None,
) -> SwitchSamples:
    """Time every ordered pair of backends, in random order in each round.

    Args:
        calls: The same operator on each backend. [B].
        tensor: What goes in, and as large as what comes out.
        size_bytes: Its size.
        rounds: How many at most.
        warmups: Rounds before them that are thrown away.
        time_cap_s: Ends earlier after this time, seconds, but not before ten rounds.
        clock: The machine's by default.
        rng: Orders the pairs.
    """
    now_s = (clock or MonotonicClock()).now_s
    rng = rng or np.random.default_rng(0)
    pairs = list(itertools.product(range(len(calls)), repeat=2))
    found = np.empty((rounds, len(calls), len(calls)))
    end_s, done = now_s() + time_cap_s, 0
    for number in range(-warmups, rounds):
        for index in rng.permutation(len(pairs)):
            a, b = pairs[index]
            source, target = calls[a], calls[b]
            source(tensor)
            start_s = now_s()
            target(source(tensor))
            found[number, a, b] = now_s() - start_s  # a warm-up is overwritten later
        done = number + 1
        if done >= min(rounds, 10) and now_s() >= end_s:
            break
    return SwitchSamples(size_bytes=size_bytes, pairs_s=found[:done])


def fit_switches(
    backends: Sequence[str],
    samples: Sequence[SwitchSamples],
    *,
    rng: np.random.Generator | None = None,
) -> tuple[list[SwitchCost], dict[str, str]]:
    """Fit each directed cost, affine in the bytes, neither part below zero.

    Least absolute deviations, each size weighted by how well it is known. The interval is of the
    fitted cost at 64 KiB, over bootstrap draws of rounds.

    Args:
        backends: Names. [B].
        samples: One for each size.
        rng: Draws of the bootstrap.

    Returns:
        Costs without energy, and what must be said about pairs: that noise was larger than the
        cost at some size.
    """
    rng = rng or np.random.default_rng(0)
    sizes = np.array([float(each.size_bytes) for each in samples])  # [S]
    rounds = [len(each.pairs_s) for each in samples]
    all_rounds = [np.arange(count) for count in rounds]
    draws = [rng.integers(0, count, size=(_RESAMPLES, count)) for count in rounds]
    costs, notes = [], {}
    for a, b in itertools.permutations(range(len(backends)), 2):
        measured = np.array(
            [each.beyond_s(a, b, k) for each, k in zip(samples, all_rounds, strict=True)]
        )  # [S]
        drawn = np.array([each.beyond_s(a, b, k) for each, k in zip(samples, draws, strict=True)])
        width_s = np.maximum(drawn.std(axis=1), 1e-8)
        fixed_s, per_byte_s = fit_affine(sizes, measured[:, None], 1 / width_s)[:, 0]
        at_s = np.array([1.0, TYPICAL_BYTES]) @ fit_affine(sizes, drawn, 1 / width_s)
        low_s, high_s = np.quantile(at_s, [0.025, 0.975])
        costs.append(
            SwitchCost(
                source=backends[a],
                target=backends[b],
                fixed_s=_rounded(fixed_s),
                per_byte_s=_rounded(per_byte_s),
                interval_s=(_rounded(low_s), _rounded(high_s)),
                typical_bytes=TYPICAL_BYTES,
                samples=sum(rounds),
            )
        )
        below = [
            f"{value * 1e6:.1f} µs at {size:.0f} bytes"
            for size, value in zip(sizes, measured, strict=True)
            if value < 0
        ]
        if below:
            notes[f"switch {backends[a]} -> {backends[b]}"] = (
                f"measured {', '.join(below)}: noise is larger than the cost, which counts as zero"
                " there"
            )
    return costs, notes


def fit_affine(sizes: Float64, values: Float64, weights: Float64) -> Float64:
    """Least absolute deviations of a + b·size with a, b >= 0, for several sets of values at once.

    The loss is piecewise linear, so a best fit is a vertex: it passes through two points, or
    through one with a or b at zero, or both are zero. All vertices are tried.

    Args:
        sizes: [S], at least one above zero.
        values: [S, R].
        weights: Of each size. [S].

    Returns:
        a and b of each set. [2, R].

    Source:
        P. Bloomfield, W. L. Steiger, Least Absolute Deviations (1983), ch. 1: some best fit of two
        coefficients passes through two of the points.

    Example:
        >>> fit_affine(np.array([1.0, 2.0, 4.0]), np.array([[3.0], [5.0], [9.0]]), np.ones(3)).T
        array([[1., 2.]])
    """
    count = len(sizes)
    zero = np.zeros(values.shape[1])
    vertices = [(zero, zero)]
    for i in range(count):
        vertices.append((values[i], zero))
        if sizes[i] > 0:
            vertices.append((zero, values[i] / sizes[i]))
    for i, j in itertools.combinations(range(count), 2):
        if sizes[i] != sizes[j]:
            slope = (values[j] - values[i]) / (sizes[j] - sizes[i])
            vertices.append((values[i] - slope * sizes[i], slope))
    fits = np.array(vertices)  # [V, 2, R]
    # A vertex that is below zero by rounding alone is the one beside it, which is tried too.
    allowed = (fits >= 0).all(axis=1)  # [V, R]
    residuals = np.abs(fits[:, 0, None] + fits[:, 1, None] * sizes[:, None] - values)  # [V, S, R]
    losses = np.where(allowed, (weights[:, None] * residuals).sum(axis=1), np.inf)
    best = losses.argmin(axis=0)
    return np.asarray(fits[best, :, np.arange(values.shape[1])].T)


def with_energy(  # noqa: PLR0913
    costs: Sequence[SwitchCost],
    calls: Mapping[str, Sequence[Call]],
    tensors: Sequence[torch.Tensor],
    samples: Sequence[SwitchSamples],
    *,
    meter: EnergyMeter,
    pairs: int = 8,
    clock: Clock | None = None,
) -> list[SwitchCost]:
    """Add energies, at the smallest and the largest size.

    A window of pairs holds both directions, so their sum is what can be measured: beyond half the
    energy of pairs on each backend alone. It is divided as the latencies of the two directions
    are.

    Args:
        costs: With their latencies.
        calls: By backend, the operator at each size.
        tensors: What goes in at each size.
        samples: Times at each size.
        meter: What is read.
        pairs: Of windows, for each energy.
        clock: The machine's by default.

    Returns:
        The costs; without energy where one could not be measured.
    """
    ends = (0, len(samples) - 1)
    names = list(calls)
    beyond: dict[frozenset[str], list[float | None]] = {}

    def energy_j(a: str, b: str, size: int) -> float | None:
        first, second, tensor = calls[a][size], calls[b][size], tensors[size]
        at = names.index(a), names.index(b)
        return measure_energy(
            lambda: second(first(tensor)),
            meter=meter,
            call_s=float(np.median(samples[size].pairs_s[:, at[0], at[1]])),
            pairs=pairs,
            clock=clock,
        ).energy_j

    alone = {(name, size): energy_j(name, name, size) for name in names for size in ends}
    for a, b in itertools.combinations(names, 2):
        both = []
        for size in ends:
            parts = energy_j(a, b, size), alone[a, size], alone[b, size]
            known = [each for each in parts if each is not None]
            both.append(known[0] - (known[1] + known[2]) / 2 if len(known) == 3 else None)
        beyond[frozenset((a, b))] = both
    found = []
    sizes = np.array([float(samples[size].size_bytes) for size in ends])
    by_pair = {(each.source, each.target): each for each in costs}
    for each in costs:
        small_j, large_j = beyond[frozenset((each.source, each.target))]
        if small_j is None or large_j is None:
            found.append(each)
            continue
        back = by_pair[each.target, each.source]
        shares = [_share(each.at_s(size), back.at_s(size)) for size in sizes]
        values = np.array([[small_j * shares[0]], [large_j * shares[1]]])
        fixed_j, per_byte_j = fit_affine(sizes, values, np.ones(2))[:, 0]
        found.append(replace(each, fixed_j=_rounded(fixed_j), per_byte_j=_rounded(per_byte_j)))
    return found


def _share(one_s: float, other_s: float) -> float:
    return one_s / (one_s + other_s) if one_s + other_s > 0 else 0.5


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
