"""How far searches are from the optimum, over many problems. Pure: numbers in, rows out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from edgewise.device.accelerator import Accelerator
from edgewise.placement.problem import Problem, Tenant
from edgewise.placement.search import search
from edgewise.profiles.partition import PartitionProfile

UTILISATIONS = (0.2, 0.5, 0.8)
# Below this, two scores differ by rounding alone.
_NOISE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class GapRow:
    """One method against the optimum.

    Attributes:
        method: Which.
        problems: How many have a plan that can run.
        stuck: On how many of them the method found none.
        mean_gap_ratio: Mean of score / optimum - 1 over the others; ``None`` where it solved none.
        max_gap_ratio: The largest.
        above_1_percent_ratio: Share of them with a gap above 0.01.
    """

    method: str
    problems: int
    stuck: int
    mean_gap_ratio: float | None
    max_gap_ratio: float | None
    above_1_percent_ratio: float | None


def search_gaps(
    problems: Iterable[Problem], methods: Sequence[str], *, reference: str = "exact"
) -> tuple[GapRow, ...]:
    """Hold methods against the optimum.

    Args:
        problems: Those that no plan can serve are left out.
        methods: Of `search.method_names`.
        reference: The method that gives the optimum.
    """
    gaps: dict[str, list[float]] = {method: [] for method in methods}
    solvable = 0
    for problem in problems:
        optimum = search(problem, reference)
        if not optimum.stable:
            continue
        solvable += 1
        for method in methods:
            found = search(problem, method)
            gap = found.rank / optimum.rank - 1 if found.stable else np.inf
            gaps[method].append(0.0 if abs(gap) < _NOISE else gap)
    rows = []
    for method, found_gaps in gaps.items():
        solved = np.array([g for g in found_gaps if np.isfinite(g)])
        rows.append(
            GapRow(
                method=method,
                problems=solvable,
                stuck=solvable - len(solved),
                mean_gap_ratio=float(solved.mean()) if len(solved) else None,
                max_gap_ratio=float(solved.max()) if len(solved) else None,
                above_1_percent_ratio=float((solved > 0.01).mean()) if len(solved) else None,
            )
        )
    return tuple(rows)


def random_mixes(  # noqa: PLR0913 - what a mix is drawn from
    count: int,
    accelerator: Accelerator,
    *,
    seed: int,
    profiles: Sequence[PartitionProfile] = (),
    tenants: Sequence[int] = (2, 3, 4),
    cores: int = 4,
) -> list[Problem]:
    """Draw problems: so many tenants, each with the same load on the accelerator.

    A model all on the accelerator, never displaced, would keep it busy for ρ / n of the time, with
    ρ going round `UTILISATIONS`.

    Args:
        count: How many.
        accelerator: What they share.
        seed: Of the draw.
        profiles: Models to draw from, without replacement as long as there are enough; synthetic
            ones where empty.
        tenants: Numbers of tenants, in turn.
        cores: K.
    """
    generator = np.random.default_rng(seed)
    found = []
    for number in range(count):
        many = tenants[number % len(tenants)]
        busy = UTILISATIONS[number // len(tenants) % len(UTILISATIONS)]
        if profiles:
            picked = generator.choice(len(profiles), many, replace=many > len(profiles))
            chosen = [profiles[int(k)] for k in picked]
        else:
            chosen = [synthetic_profile(generator, accelerator.name) for _ in range(many)]
        problem = Problem.of(
            [Tenant(name=f"t{i}", profile=p, rate_per_s=1.0) for i, p in enumerate(chosen)],
            accelerator,
            cores=cores,
        )
        whole_s = problem.service_s[np.arange(many), problem.last]
        found.append(problem.with_rates(busy / many / whole_s))
    return found


def synthetic_profile(
    generator: np.random.Generator, accelerator: str = "", *, places: int = 10
) -> PartitionProfile:
    """Draw the costs of a convolutional network: work early, parameters late.

    1 to 40 MB of parameters, 20 to 400 ms on one core, 10 to 40 times faster on the accelerator
    but for its last layers, which gain little, as in SwapLess's figure 3.

    Args:
        generator: Source of chance.
        accelerator: Name of the device.
        places: P.
    """
    whole_s = generator.uniform(0.02, 0.4)
    weights = generator.uniform(1e6, 40e6)
    work = generator.dirichlet(np.full(places, 4.0))
    depth = np.concatenate([[0.0], np.cumsum(work)[:-1], [1.0]])
    speed = generator.uniform(10, 40) * np.linspace(1.0, generator.uniform(0.1, 1.0), places)
    late = depth ** generator.uniform(1.5, 3.0)
    boundary = generator.uniform(0.5, 1.5, places + 1) * np.geomspace(6e5, 2e4, places + 1)
    boundary[0], boundary[-1] = 150_528.0, 1_000.0
    left = np.maximum(1 - depth, 0.0)
    left[-1] = 0.0
    return PartitionProfile(
        model_id="synthetic",
        cuts=tuple(f"place-{p}" for p in range(places + 1)),
        depth_ratio=depth,
        prefix_bytes=np.round(weights * late),
        boundary_bytes=np.round(boundary),
        accelerator_s=np.concatenate([[0.0], np.cumsum(whole_s * np.diff(depth) / speed)]),
        threads=(1, 2, 4),
        cpu_s=whole_s * left[:, None] / np.array([1.0, 1.8, 3.0]),
        accelerator=accelerator,
        accelerator_provenance="estimated",
        cpu_provenance="estimated",
        notes={"made by": "edgewise.placement.study.synthetic_profile"},
    )
