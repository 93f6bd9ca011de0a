"""Why a plan is as it is: what the next-best place, other methods and more hardware would give."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from edgewise.errors import ConfigError, nearest_names
from edgewise.placement.forecast import forecast
from edgewise.placement.plan import Placement
from edgewise.placement.problem import Objective, Problem, Tenant
from edgewise.placement.scores import Scores
from edgewise.placement.search import overloads, propose, search

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

BASELINES = ("compiler", "threshold", "alpha-zero", "rate-pinning", "all-cpu")
_TIE_RATIO = 1e-3
_BISECTIONS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """What another method would do.

    Attributes:
        method: Which.
        places: p, [n]; empty where the method cannot be used here.
        score: Infinite where its plan cannot run.
        more_ratio: Its score over the plan's, less one; ``None`` where there is no plan that runs.
        why_not: Who is overloaded, or why the method cannot be used; ``None`` where it runs.
    """

    method: str
    places: tuple[int, ...]
    score: float
    more_ratio: float | None
    why_not: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantReason:
    """Why one tenant's model is cut where it is, the others staying where they are.

    Attributes:
        tenant: Its name.
        place: Where it is cut.
        next_place: The best of the other places; ``None`` where there is no other.
        next_score: What that gives, infinite where it cannot run.
        more_ratio: By how much that is more; ``None`` where it cannot run.
        tie: Whether both are within a thousandth.
        text: The same in words.
    """

    tenant: str
    place: int
    next_place: int | None
    next_score: float
    more_ratio: float | None
    tie: bool
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What more of one resource would save at the same places.

    Attributes:
        resource: ``cores``, ``memory`` or ``bandwidth``.
        change: How much more was assumed, in words.
        score: What it would be then.
        less_ratio: The saving as a share of the plan's score; 0 where it does not bind.
    """

    resource: str
    change: str
    score: float
    less_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Everything that was held against a plan.

    Attributes:
        objective: What was minimised.
        score: Of the plan.
        tenants: One reason each.
        alternatives: Baselines and other searches.
        limits: Resources, the most wanted first.
        notes: Of the plan.
    """

    objective: Objective
    score: float
    tenants: tuple[TenantReason, ...]
    alternatives: tuple[Alternative, ...]
    limits: tuple[Limit, ...]
    notes: tuple[str, ...]

    @property
    def binds(self) -> str | None:
        """The resource that more of would save most; ``None`` where none saves a thousandth."""
        first = self.limits[0] if self.limits else None
        return first.resource if first and first.less_ratio > _TIE_RATIO else None


def explain(
    problem: Problem,
    placement: Placement,
    *,
    methods: Sequence[str] = (*BASELINES, "published", "greedy", "multi-start"),
) -> Explanation:
    """Hold a plan against other places, other methods and more hardware.

    Args:
        problem: What was planned for.
        placement: The plan, of whatever method.
        methods: What to compare with.
    """
    own = problem.with_residency(placement.residency)
    score = placement.score
    return Explanation(
        objective=problem.objective,
        score=score,
        tenants=tuple(_reason(own, placement, i) for i in range(len(problem.tenants))),
        alternatives=tuple(_alternative(problem, method, score) for method in methods),
        limits=_limits(own, placement),
        notes=placement.notes,
    )


def score_text(objective: str, score: float) -> str:
    """Write a score with its unit.

    Args:
        objective: Of the problem.
        score: Infinite where a plan cannot run.

    Example:
        >>> score_text("mean", 0.0125)
        '12.5 ms'
    """
    if math.isinf(score):
        return "no end of waiting"
    if objective == "deadline-miss":
        return f"{100 * score:.3g} % late"
    return f"{score:.3g} of the ideal" if objective == "max-min" else f"{1e3 * score:.4g} ms"


def _alternative(problem: Problem, method: str, score: float) -> Alternative:
    try:
        found = propose(problem, method)
    except ConfigError as error:
        return Alternative(
            method=method, places=(), score=math.inf, more_ratio=None, why_not=error.message
        )
    why = None if found.stable else "; ".join((*found.notes, *overloads(problem, found)))
    return Alternative(
        method=method,
        places=found.places,
        score=found.score,
        more_ratio=_more(found.score, score),
        why_not=why,
    )


def _more(other: float, score: float) -> float | None:
    if math.isinf(other) or math.isinf(score):
        return None
    return other / score - 1 if score > 0 else (0.0 if other == score else math.inf)


def _reason(problem: Problem, placement: Placement, i: int) -> TenantReason:
    share = placement.shares[i]
    every = np.arange(int(problem.last[i]) + 1)
    places = np.repeat(np.array([placement.places]), len(every), axis=0)
    places[:, i] = every
    found = _forecasts(problem, places)
    found[share.place] = np.inf
    of = f"place {share.place} of {int(problem.last[i])} ({share.cut})"
    if len(every) == 1:
        return TenantReason(
            tenant=share.tenant,
            place=share.place,
            next_place=None,
            next_score=math.inf,
            more_ratio=None,
            tie=False,
            text=f"{of}: there is no accelerator",
        )
    other = int(found.argmin())
    score = float(found[other])
    more = _more(score, placement.score)
    tie = more is not None and abs(more) <= _TIE_RATIO
    if tie:
        words = f"place {other} is as good"
    elif math.isinf(score):
        words = "at every other place a queue grows for ever"
    elif more is None:
        words = f"place {other} would give {score_text(problem.objective, score)}"
    else:
        words = (
            f"place {other} would give {score_text(problem.objective, score)} instead of"
            f" {score_text(problem.objective, placement.score)} ({100 * more:+.3g} %)"
        )
    return TenantReason(
        tenant=share.tenant,
        place=share.place,
        next_place=other,
        next_score=score,
        more_ratio=more,
        tie=tie,
        text=f"{of}: {words}",
    )


def _forecasts(problem: Problem, places: Int64) -> Float64:
    """Score of places with the better of two splits of the cores, as plans state it, [M]."""
    scores = Scores(problem)
    found = []
    for cores in (scores.split(places), scores.proportional(places)):
        seen = forecast(problem, places, cores, shares_bytes=scores.shares_bytes(places))
        found.append(np.where(seen.stable, seen.score, np.inf))
    return np.minimum(*found)


def _limits(problem: Problem, placement: Placement) -> tuple[Limit, ...]:
    """What one more core, twice the memory and twice the bandwidth would save."""
    device = problem.accelerator
    richer = {"cores": ("one more core", _like(problem, cores=problem.cores + 1))}
    if device is not None:
        twice = replace(device, sram_bytes=2 * device.sram_bytes)
        doubled = [
            t
            if t.profile.sram_bytes is None
            else replace(t, profile=replace(t.profile, sram_bytes=2 * t.profile.sram_bytes))
            for t in problem.tenants
        ]
        faster = replace(
            device,
            in_bytes_per_s=2 * device.in_bytes_per_s,
            out_bytes_per_s=2 * device.out_bytes_per_s,
        )
        richer["memory"] = (
            "twice the memory",
            _like(problem, tenants=doubled, accelerator=twice),
        )
        richer["bandwidth"] = ("twice the bandwidth", _like(problem, accelerator=faster))
    places = np.array([placement.places])
    found = []
    for resource, (change, other) in richer.items():
        score = float(_forecasts(other, places)[0])
        if math.isinf(placement.score):
            less = 1.0 if math.isfinite(score) else 0.0
        else:
            less = max(1 - score / placement.score, 0.0) if placement.score > 0 else 0.0
        found.append(Limit(resource=resource, change=change, score=score, less_ratio=less))
    return tuple(sorted(found, key=lambda limit: -limit.less_ratio))


def _like(
    problem: Problem,
    *,
    tenants: Sequence[Tenant] | None = None,
    accelerator: object = None,
    cores: int | None = None,
) -> Problem:
    device = problem.accelerator if accelerator is None else accelerator
    return Problem.of(
        problem.tenants if tenants is None else tenants,
        device,  # type: ignore[arg-type]
        cores=problem.cores if cores is None else cores,
        objective=problem.objective,
        assumptions=problem.assumptions,
        residency=problem.residency,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossover:
    """A rate at which the best place of a tenant changes.

    Attributes:
        rate_per_s: From here on ``after`` is better.
        before: The best place just below.
        after: The best place just above.
    """

    rate_per_s: float
    before: int
    after: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RateCurve:
    """Score over a tenant's rate, for each of its places.

    Attributes:
        tenant: Its name.
        rates_per_s: [R].
        score: With the best split of the cores, [R, P + 1]; infinite where a queue grows for ever.
        best: The best place at each rate, [R].
        crossovers: Where it changes, in order.
    """

    tenant: str
    rates_per_s: Float64
    score: Float64
    best: Int64
    crossovers: tuple[Crossover, ...]


def rate_curve(
    problem: Problem,
    tenant: str,
    rates_per_s: Sequence[float] | Float64,
    *,
    places: Sequence[int] | None = None,
) -> RateCurve:
    """Score every place of a tenant at many rates; the other tenants' rates and places stay.

    Args:
        problem: Tenants and device.
        tenant: Whose rate changes.
        rates_per_s: Ascending, at least two; crossovers are sought between them.
        places: Of all tenants, [n]; by default where the best plan at the problem's own rates has
            them. The tenant's own does not matter.

    Raises:
        ConfigError: No such tenant, or rates that do not rise from above zero.
    """
    names = [t.name for t in problem.tenants]
    if tenant not in names:
        raise ConfigError(f"no tenant is called {tenant!r}", help=nearest_names(tenant, names))
    rates = np.asarray(rates_per_s, dtype=np.float64)
    if len(rates) < 2 or rates[0] <= 0 or (np.diff(rates) <= 0).any():
        raise ConfigError("expected at least two rates that rise from above zero")
    i = names.index(tenant)
    if places is None and len(names) > 1:
        places = search(problem, "multi-start").places
    every = np.arange(int(problem.last[i]) + 1)
    candidates = np.repeat(np.array([places or [0] * len(names)]), len(every), axis=0)
    candidates[:, i] = every

    def score_at(rate: float) -> Float64:
        all_rates = problem.rates.copy()
        all_rates[i] = rate
        return _forecasts(problem.with_rates(all_rates), candidates)

    def best_at(rate: float) -> int | None:
        found = score_at(rate)
        return int(found.argmin()) if np.isfinite(found).any() else None

    ranks = np.array([score_at(float(rate)) for rate in rates])
    best = ranks.argmin(axis=1)
    return RateCurve(
        tenant=tenant,
        rates_per_s=rates,
        score=ranks,
        best=best,
        crossovers=tuple(_crossings(rates, ranks, best_at)),
    )


def _crossings(
    rates: Float64, ranks: Float64, best_at: Callable[[float], int | None]
) -> Iterator[Crossover]:
    """Bisect between neighbouring rates whose best places differ."""
    runs = [bool(np.isfinite(row).any()) for row in ranks]
    best = ranks.argmin(axis=1)
    for j in range(len(rates) - 1):
        low, here, there = float(rates[j]), int(best[j]), int(best[j + 1])
        # Where no place can keep up, none is better than another.
        while here != there and runs[j] and runs[j + 1]:
            left, right = low, float(rates[j + 1])
            for _ in range(_BISECTIONS):
                middle = (left + right) / 2
                left, right = (middle, right) if best_at(middle) == here else (left, middle)
            after = best_at(right)
            if after is None:
                break
            yield Crossover(rate_per_s=right, before=here, after=after)
            if right >= rates[j + 1]:
                break
            low, here = right, after


def crossover(
    problem: Problem, tenant: str, rates_per_s: Sequence[float] | Float64
) -> tuple[Crossover, ...]:
    """Rates at which the best place of a tenant changes; see `rate_curve`.

    Args:
        problem: Tenants and device.
        tenant: Whose rate changes.
        rates_per_s: Ascending; between which it is sought.

    Raises:
        ConfigError: As `rate_curve`.
    """
    return rate_curve(problem, tenant, rates_per_s).crossovers
