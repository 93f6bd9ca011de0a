"""Finding a plan: which methods there are, and what is done where no plan can run."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from edgewise.errors import ConfigError, Infeasible, nearest_names
from edgewise.placement.memory import best_shares
from edgewise.placement.plan import Placement, make_placement
from edgewise.placement.problem import Problem
from edgewise.placement.response import evaluate
from edgewise.placement.scores import UNSTABLE, Scores

Int64 = npt.NDArray[np.int64]

_METHODS = "edgewise.placement.methods"
_HALVINGS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search chose.

    Attributes:
        problem: What it was chosen for; its residency may be another than was asked about.
        places: p, [n].
        cores: k, [n].
        shares_bytes: Fixed shares of the accelerator's memory, [n]; ``None`` where models switch.
        rank: Its score; above `scores.UNSTABLE` where it cannot run.
        method: Which search.
        evaluated: How many candidates it looked at.
        notes: What must be said.
    """

    problem: Problem = field(repr=False)
    places: tuple[int, ...]
    cores: tuple[int, ...]
    shares_bytes: tuple[float, ...] | None = None
    rank: float
    method: str
    evaluated: int = 0
    notes: tuple[str, ...] = ()

    @property
    def stable(self) -> bool:
        """Whether it can run."""
        return self.rank < UNSTABLE

    def placement(self) -> Placement:
        """The plan with all its predictions."""
        return make_placement(
            self.problem,
            self.places,
            self.cores,
            shares_bytes=self.shares_bytes,
            method=self.method,
            evaluated=self.evaluated,
            notes=self.notes,
        )


def chosen(  # noqa: PLR0913 - what a search knows
    scores: Scores,
    places: Sequence[int] | Int64,
    cores: Sequence[int] | Int64,
    *,
    method: str,
    evaluated: int,
    notes: tuple[str, ...] = (),
    polish: bool = False,
) -> Found:
    """Make the record of one candidate.

    Args:
        scores: Of the problem.
        places: p, [n].
        cores: k, [n].
        method: Which search chose it.
        evaluated: How many candidates it looked at.
        notes: What must be said.
        polish: Whether fixed shares of memory are improved; else they are hot first.
    """
    p, k = np.array([places]), np.array([cores])
    rank = float(scores.rank(p, k)[0])
    shares = scores.shares_bytes(p)
    if shares is not None and polish:
        better, looked = best_shares(scores.problem, p[0], k[0])
        seen = evaluate(scores.problem, p, k, shares_bytes=better[None])
        improved = float(seen.score[0]) + (0.0 if seen.stable[0] else UNSTABLE)
        evaluated += looked
        if improved < rank:
            rank, shares = improved, better[None]
    return Found(
        problem=scores.problem,
        places=tuple(int(v) for v in p[0]),
        cores=tuple(int(v) for v in k[0]),
        shares_bytes=None if shares is None else tuple(float(v) for v in shares[0]),
        rank=rank,
        method=method,
        evaluated=evaluated,
        notes=notes,
    )


@cache
def method_names() -> tuple[str, ...]:
    """Every method, by the name of its file."""
    package = importlib.import_module(_METHODS)
    names = (m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_"))
    return tuple(sorted(name.replace("_", "-") for name in names))


def search(problem: Problem, method: str = "best", **options: Any) -> Found:
    """Decide where every model is cut and who gets which cores; no predictions are made.

    Args:
        problem: Tenants and device.
        method: One of `method_names`.
        options: The method's own arguments.

    Raises:
        ConfigError: No such method, or an argument that it does not have or accept.
    """
    if method not in method_names():
        raise ConfigError(
            f"unknown placement method {method!r}", help=nearest_names(method, method_names())
        )
    name = f"{_METHODS}.{method.replace('-', '_')}"
    find: Callable[..., Found] = importlib.import_module(name).find
    allowed = set(find.__kwdefaults__ or ())
    odd = sorted(set(options) - allowed)
    if odd:
        raise ConfigError(
            f"placement method {method!r} has no option {odd[0]!r}",
            help=f"its options: {', '.join(sorted(allowed)) or 'none'}",
        )
    return find(problem, **options)


def propose(problem: Problem, method: str = "best", **options: Any) -> Placement:
    """Make a plan, even where no queue can keep up; see `Placement.stable`.

    Args:
        problem: Tenants and device.
        method: One of `method_names`.
        options: The method's own arguments.

    Raises:
        ConfigError: As `search`.
    """
    return search(problem, method, **options).placement()


def plan(problem: Problem, method: str = "best", **options: Any) -> Placement:
    """Make a plan that can run.

    Args:
        problem: Tenants and device.
        method: One of `method_names`.
        options: The method's own arguments.

    Raises:
        Infeasible: The method found none; ``closest`` is the plan with the least overload, and the
            message says who is overloaded by how much, and which rates would do.
        ConfigError: As `search`.
    """
    found = propose(problem, method, **options)
    if found.stable:
        return found
    over = overloads(problem, found)
    raise Infeasible(
        f"no plan of method {method!r} can keep up: {'; '.join((*found.notes, *over))}",
        closest=found,
        help=_what_would_do(problem, found),
    )


def overloads(problem: Problem, placement: Placement) -> tuple[str, ...]:
    """Say which queues of a plan grow for ever, and by how much.

    Args:
        problem: What it was made for.
        placement: The plan.
    """
    found = []
    if placement.accelerator_busy >= 1:
        found.append(f"the accelerator would be {100 * placement.accelerator_busy:.0f} % busy")
    for share, seen in zip(placement.shares, placement.predicted, strict=True):
        if share.cores == 0 and seen.cpu_s > 0:
            found.append(f"no core of {problem.cores} is left for tenant {share.tenant!r}")
        elif seen.cpu_busy >= 1:
            found.append(
                f"the {share.cores} core{'s' if share.cores > 1 else ''} of tenant"
                f" {share.tenant!r} would be {100 * seen.cpu_busy:.0f} % busy"
            )
    return tuple(found)


def _what_would_do(problem: Problem, placement: Placement) -> str:
    ratio = feasible_ratio(problem)
    if ratio == 0:
        count = sum(s.cores == 0 for s in placement.shares)
        return (
            f"no rate is low enough: {len(problem.tenants)} tenants share {problem.cores} cores,"
            f" and {count} would have none; add cores, an accelerator or fewer tenants"
        )
    if ratio >= 1:
        return "method 'best' has a plan"
    rates = ", ".join(f"{t.name} {ratio * t.rate_per_s:.3g}/s" for t in problem.tenants)
    return f"{100 * ratio:.0f} % of all rates would be feasible: {rates}"


def feasible_ratio(problem: Problem) -> float:
    """Largest share of all rates at which a plan can run, 0 to 1; 0 where none can at any rate.

    By halving, with the method ``multi-start``; to a thousandth.

    Args:
        problem: Tenants and device.
    """

    def works(ratio: float) -> bool:
        return search(problem.with_rates(problem.rates * ratio), "multi-start").stable

    if works(1.0):
        return 1.0
    if not works(1e-6):
        return 0.0
    low, high = 1e-6, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if works(middle) else (low, middle)
    return low
