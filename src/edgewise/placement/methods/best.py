"""The default: the optimum where it is cheap, else `multi-start`; both kinds of residency.

For at most four tenants and an objective that is a sum of mean responses `exact` takes
milliseconds; with more it is tried as long as few partial plans are left. Where the accelerator can
pin, plans with fixed shares of memory compete with plans that switch.
"""

from __future__ import annotations

import math
from typing import Literal

from edgewise.errors import ConfigError
from edgewise.placement.methods import exact, multi_start
from edgewise.placement.problem import Problem, Residency
from edgewise.placement.search import Found

_FEW_TENANTS = 4
_FEW_LABELS = 20_000


def find(problem: Problem, *, residency: Literal["either", "switch", "pinned"] = "either") -> Found:
    """Find the best plan.

    Args:
        problem: Tenants and device.
        residency: Whether models may switch, have fixed shares, or what is better.

    Raises:
        ConfigError: Pinned shares on a device that has none, or an unknown word.
    """
    found = [_of(problem.with_residency(kind)) for kind in residencies(problem, residency)]
    first = min(found, key=lambda f: f.rank)
    if len(found) == 1:
        return first
    other = next(f for f in found if f is not first)
    words = {"switch": "models that switch", "pinned": "fixed shares of memory"}
    loser = words[other.problem.residency]
    if not other.stable:
        note = f"{loser} cannot keep up"
    else:
        note = f"{loser} would score {other.rank:.6g} instead of {first.rank:.6g}"
    if first.rank == other.rank:
        note = f"{loser} would score the same"
    return Found(
        problem=first.problem,
        places=first.places,
        cores=first.cores,
        shares_bytes=first.shares_bytes,
        rank=first.rank,
        method=first.method,
        evaluated=first.evaluated + other.evaluated,
        notes=(*first.notes, note),
    )


def residencies(problem: Problem, wanted: str = "either") -> tuple[Residency, ...]:
    """Which kinds of residency a plan may have.

    Args:
        problem: Tenants and device.
        wanted: ``either``, or one of them.

    Raises:
        ConfigError: An unknown word.
    """
    if wanted == "switch":
        return ("switch",)
    if wanted == "pinned":
        return ("pinned",)
    if wanted != "either":
        raise ConfigError(
            f"unknown residency {wanted!r}", help="known names: either, pinned, switch"
        )
    if problem.accelerator is None or not problem.accelerator.can_pin:
        return ("switch",)
    # Where the device itself only pins, nothing switches.
    only = problem.accelerator.cache_policy == "pinned" and problem.assumptions.miss is None
    return ("pinned",) if only else ("switch", "pinned")


def _of(problem: Problem) -> Found:
    if problem.objective not in {"mean", "weighted"}:
        return multi_start.find(problem)
    few = len(problem.tenants) <= _FEW_TENANTS
    total = math.prod(int(p) + 1 for p in problem.last)
    try:
        return exact.find(problem, max_labels=max(total, 1) if few else _FEW_LABELS)
    except ConfigError:
        return multi_start.find(problem)
