"""Who asks for what: tenants, a device and cores, as arrays that a search can index."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from edgewise.device.accelerator import Accelerator
from edgewise.errors import ConfigError, nearest_names
from edgewise.placement import queueing
from edgewise.placement.cache import MissModel
from edgewise.profiles.partition import PartitionProfile

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Objective = Literal["mean", "weighted", "p99", "deadline-miss", "max-min"]
CpuMode = Literal["workers", "threads", "both"]
Residency = Literal["switch", "pinned"]

_CLIP = 0.999  # utilisation at which an unstable queue is evaluated for comparison


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tenant:
    """One model and how often it is asked.

    Attributes:
        name: Unique.
        profile: What it costs where it is cut.
        rate_per_s: λ, requests per second, above zero.
        weight: How much its response time counts under the objective ``weighted``.
        deadline_s: Time within which it should answer; ``None`` for none.
        priority: 0 is served first, as in HailoRT; 16 by default.
        arrival_cv2: C_a² of its arrivals: 1 Poisson, near 0 periodic, above 1 bursty.
        suffix_ratio: Share of each suffix's work that is done on average, [P + 1]: below 1 where
            exits are taken early; ``None`` for all of it.
        suffix_cv2: C_s² of the suffix's time because of such exits, [P + 1]; the profile's own
            where ``None``.
    """

    name: str
    profile: PartitionProfile
    rate_per_s: float
    weight: float = 1.0
    deadline_s: float | None = None
    priority: int = 16
    arrival_cv2: float = 1.0
    suffix_ratio: Float64 | None = None
    suffix_cv2: Float64 | None = None

    def __post_init__(self) -> None:
        for name, least_excluded in (
            ("rate_per_s", True),
            ("deadline_s", True),
            ("weight", False),
            ("arrival_cv2", False),
        ):
            value = getattr(self, name)
            if name == "deadline_s" and value is None:
                continue
            number = isinstance(value, int | float) and math.isfinite(value)
            if not number or value < 0 or (value == 0 and least_excluded):
                raise ConfigError(
                    f"tenant {self.name!r}: expected {name}"
                    f" {'above zero' if least_excluded else 'of zero or more'}, found {value!r}",
                    help="a tenant that is never asked needs no place: leave it out"
                    if name == "rate_per_s"
                    else None,
                )

    @property
    def cpu_cv2(self) -> Float64:
        """C_s² of each suffix, [P + 1]."""
        found = self.profile.cpu_cv2 if self.suffix_cv2 is None else self.suffix_cv2
        return np.zeros(len(self.profile.cuts)) if found is None else np.asarray(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """Which formulas are used; the defaults are ours, `PAPER` is SwapLess's set.

    Attributes:
        miss: Of `MissModel`; ``None`` takes the device's policy.
        correlated: Whether the wait at the accelerator counts the correlation of services.
        multi_server: For CPU pools.
        tandem: Whether a tenant alone on the accelerator is fed by evenly spaced departures.
        boundary: Whether moving the tensor at the cut back to the host costs time.
        cpu: What a tenant's cores are: a pool of one-thread workers, one worker with as many
            threads, or the better of all splits.
    """

    miss: MissModel | None = None
    correlated: bool = True
    multi_server: queueing.MultiServer = "cosmetatos"
    tandem: bool = True
    boundary: bool = True
    cpu: CpuMode = "both"


PAPER = Assumptions(
    miss="paper",
    correlated=False,
    multi_server="lee-longton",
    tandem=False,
    boundary=False,
    cpu="workers",
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Costs:
    """What does not depend on arrival rates, computed once; axes as in `Problem`.

    Attributes:
        last: P_i, [n].
        prefix_bytes: F_i(p), [n, p].
        sram_bytes: C for each prefix, [n, p].
        base_s: Accelerator time without streaming of parameters, [n, p].
        service_s: With it, [n, p].
        load_s: T_i(p), [n, p].
        cpu_cv2: C_s² of the suffix, [n, p].
        arrival_cv2: C_a², [n].
        weights: [n].
        left: Whether a suffix is left, [n, p].
        split_s: Time of the suffix under each of j ways to use cores, [n, p, j].
        split_workers: Of each way, [n, j].
        split_threads: Of each worker, [n, j].
        ways: Which of them k cores allow, [n, k, t]; the first where fewer are allowed than t.
    """

    last: Int64
    prefix_bytes: Float64
    sram_bytes: Float64
    base_s: Float64
    service_s: Float64
    load_s: Float64
    cpu_cv2: Float64
    arrival_cv2: Float64
    weights: Float64
    left: npt.NDArray[np.bool_]
    split_s: Float64
    split_workers: Int64
    split_threads: Int64
    ways: Int64

    @classmethod
    def of(
        cls,
        tenants: Sequence[Tenant],
        accelerator: Accelerator | None,
        *,
        cores: int,
        assumptions: Assumptions,
    ) -> Costs:
        """Look up what each tenant costs at each place.

        Args:
            tenants: Their rates are not used.
            accelerator: What they share, or ``None``.
            cores: K.
            assumptions: Which formulas.
        """
        places = max(t.profile.last for t in tenants) + 1
        accelerated = [
            _accelerator_costs(t.profile, accelerator, boundary=assumptions.boundary, places=places)
            for t in tenants
        ]
        names = ("prefix_bytes", "sram_bytes", "base_s", "service_s", "load_s")
        splits = [_Splits.of(t, cores, assumptions.cpu, places=places) for t in tenants]
        most = max(len(s.workers) for s in splits), max(s.ways.shape[1] for s in splits)

        def filled(array: npt.NDArray[Any], length: int) -> npt.NDArray[Any]:
            """Repeat the first along the last axis: what is never better than itself."""
            more = np.repeat(array[..., :1], length - array.shape[-1], axis=-1)
            return np.concatenate([array, more], axis=-1)

        return cls(
            last=np.array([t.profile.last if accelerator else 0 for t in tenants]),
            cpu_cv2=np.stack([_padded(t.cpu_cv2, places) for t in tenants]),
            arrival_cv2=np.array([t.arrival_cv2 for t in tenants], dtype=np.float64),
            weights=np.array([t.weight for t in tenants], dtype=np.float64),
            left=np.stack([s.time_s[:, 0] > 0 for s in splits]),
            split_s=np.stack([filled(s.time_s, most[0]) for s in splits]),
            split_workers=np.stack([filled(s.workers, most[0]) for s in splits]),
            split_threads=np.stack([filled(s.threads, most[0]) for s in splits]),
            ways=np.stack([filled(s.ways, most[1]) for s in splits]),
            **{name: np.stack([of[k] for of in accelerated]) for k, name in enumerate(names)},
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """Tenants, one accelerator and K cores; every cost that a plan may meet is looked up here.

    Make one with `Problem.of`. Axes: n tenants, p places padded to the longest profile, k cores.

    Attributes:
        tenants: n of them.
        accelerator: What they share; ``None`` where there is none.
        cores: K.
        objective: What is minimised.
        assumptions: Which formulas.
        residency: ``switch``: models displace each other as the device's policy says. ``pinned``:
            each has a fixed share of memory, a decision of the plan.
        last: P_i, [n].
        rates: λ_i, [n].
        prefix_bytes: F_i(p), [n, p].
        sram_bytes: C for each prefix, [n, p].
        base_s: Accelerator time without streaming of parameters, [n, p]; 0 at place 0.
        service_s: With the streaming that never ends, [n, p]; 0 at place 0.
        load_s: T_i(p), [n, p]; 0 at place 0.
        cpu_s: Time of the suffix with the best split of k cores, [n, p, k]; 0 at place P.
        cpu_wait_s: Wait in front of it, clipped where unstable, [n, p, k].
        cpu_busy: Its utilisation, [n, p, k]; above 1 where unstable, and 1 + offered load for
            no core at all.
        cpu_waits: Probability of waiting there, [n, p, k].
        cpu_cv2: C_s² of the suffix, [n, p].
        workers: Of the best split, [n, p, k].
        cpu_threads: Of each worker, [n, p, k].
        costs: What these were computed from, for other rates.
    """

    tenants: tuple[Tenant, ...]
    accelerator: Accelerator | None
    cores: int
    objective: Objective
    assumptions: Assumptions
    residency: Residency
    last: Int64 = field(repr=False)
    rates: Float64 = field(repr=False)
    prefix_bytes: Float64 = field(repr=False)
    sram_bytes: Float64 = field(repr=False)
    base_s: Float64 = field(repr=False)
    service_s: Float64 = field(repr=False)
    load_s: Float64 = field(repr=False)
    cpu_s: Float64 = field(repr=False)
    cpu_wait_s: Float64 = field(repr=False)
    cpu_busy: Float64 = field(repr=False)
    cpu_waits: Float64 = field(repr=False)
    cpu_cv2: Float64 = field(repr=False)
    workers: Int64 = field(repr=False)
    cpu_threads: Int64 = field(repr=False)
    costs: Costs = field(repr=False)

    @classmethod
    def of(  # noqa: PLR0913 - a problem's whole circumstances
        cls,
        tenants: Sequence[Tenant],
        accelerator: Accelerator | None,
        *,
        cores: int,
        objective: Objective = "mean",
        assumptions: Assumptions | None = None,
        residency: Residency = "switch",
    ) -> Problem:
        """Look up and compute every cost.

        Args:
            tenants: At least one, names unique.
            accelerator: What they share; ``None`` plans for the CPU alone.
            cores: K, at least 1.
            objective: What is minimised.
            assumptions: Which formulas; ours by default.
            residency: Whether models switch or have fixed shares of memory.

        Raises:
            ConfigError: No tenant, two of one name, no core, an unknown word, pinned shares on a
                device that has none, or a deadline missing for ``deadline-miss``.
        """
        assumed = assumptions or Assumptions()
        _check(tenants, accelerator, cores=cores, objective=objective, residency=residency)
        costs = Costs.of(tenants, accelerator, cores=cores, assumptions=assumed)
        rates = np.array([t.rate_per_s for t in tenants], dtype=np.float64)
        return cls(
            tenants=tuple(tenants),
            accelerator=accelerator,
            cores=cores,
            objective=objective,
            assumptions=assumed,
            residency=residency,
            last=costs.last,
            rates=rates,
            prefix_bytes=costs.prefix_bytes,
            sram_bytes=costs.sram_bytes,
            base_s=costs.base_s,
            service_s=costs.service_s,
            load_s=costs.load_s,
            cpu_cv2=costs.cpu_cv2,
            costs=costs,
            **_pools(costs, rates, assumed.multi_server),
        )

    @property
    def miss_model(self) -> MissModel:
        """Which miss probabilities hold."""
        if self.residency == "pinned" or self.accelerator is None:
            return "pinned"
        return self.assumptions.miss or self.accelerator.cache_policy

    def with_rates(self, rates_per_s: Sequence[float] | Float64) -> Problem:
        """Make the same problem under other rates; what does not depend on them is kept.

        Args:
            rates_per_s: [n].

        Raises:
            ConfigError: A rate is not above zero.
        """
        tenants = tuple(
            replace(t, rate_per_s=float(r)) for t, r in zip(self.tenants, rates_per_s, strict=True)
        )
        rates = np.array([t.rate_per_s for t in tenants])
        pools = _pools(self.costs, rates, self.assumptions.multi_server)
        return replace(self, tenants=tenants, rates=rates, **pools)

    def with_residency(self, residency: Residency) -> Problem:
        """Make the same problem where models switch, or have fixed shares of memory.

        Args:
            residency: Which.

        Raises:
            ConfigError: Pinned shares on a device that has none.
        """
        _check_residency(self.accelerator, residency)
        return replace(self, residency=residency)


def _check(
    tenants: Sequence[Tenant],
    accelerator: Accelerator | None,
    *,
    cores: int,
    objective: str,
    residency: str,
) -> None:
    if not tenants:
        raise ConfigError("expected at least one tenant, found none")
    names = [t.name for t in tenants]
    if len(set(names)) < len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise ConfigError(f"two tenants are called {twice!r}", help="give each a name of its own")
    if cores < 1:
        raise ConfigError(f"expected at least one core, found {cores}")
    for word, known, said in (
        (objective, Objective, "objective"),
        (residency, Residency, "residency"),
    ):
        if word not in get_args(known):
            raise ConfigError(f"unknown {said} {word!r}", help=nearest_names(word, get_args(known)))
    _check_residency(accelerator, residency)
    if objective == "deadline-miss" and all(t.deadline_s is None for t in tenants):
        raise ConfigError(
            "the objective 'deadline-miss' needs a deadline of at least one tenant",
            help="give a tenant a budget, or plan for 'mean'",
        )
    for tenant in tenants:
        made_for = tenant.profile.accelerator
        if accelerator is not None and made_for and made_for != accelerator.name:
            raise ConfigError(
                f"tenant {tenant.name!r}: its profile is of accelerator {made_for!r}, the plan is"
                f" for {accelerator.name!r}",
                help=f"edgewise profile MODEL --segments --accelerator {accelerator.name}",
            )


def _check_residency(accelerator: Accelerator | None, residency: str) -> None:
    if residency == "pinned" and accelerator is not None and not accelerator.can_pin:
        raise ConfigError(
            f"accelerator {accelerator.name!r} gives models no fixed shares of its memory",
            help="plan with residency 'switch', or set can_pin in its description",
        )


def _padded(values: Float64, places: int) -> Float64:
    """Repeat the last place's value; places beyond P are never looked up."""
    return np.pad(values, (0, places - len(values)), mode="edge")


def _accelerator_costs(
    profile: PartitionProfile, accelerator: Accelerator | None, *, boundary: bool, places: int
) -> tuple[Float64, ...]:
    """F, C, base, service and load by place: s = t₀ + in / B + compute + overflow / B + out."""
    sizes = profile.prefix_bytes
    if accelerator is None:
        nothing = np.zeros(places)
        return (_padded(sizes, places), nothing, nothing, nothing, nothing)
    own = profile.sram_bytes
    sram = np.full(len(sizes), float(accelerator.sram_bytes)) if own is None else own
    rate = accelerator.in_bytes_per_s
    base = accelerator.fixed_s + profile.boundary_bytes[0] / rate + profile.accelerator_s
    if boundary:
        base = base + profile.boundary_bytes / accelerator.out_bytes_per_s
    stream = np.maximum(sizes - sram, 0.0) / rate
    load = np.minimum(sizes, sram) / rate + accelerator.switch_s
    runs = np.arange(len(sizes)) > 0
    return tuple(
        _padded(column, places)
        for column in (sizes, sram, runs * base, runs * (base + stream), runs * load)
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Splits:
    """Ways of one tenant to use cores: so many workers with so many threads each."""

    time_s: Float64  # [p, j]
    workers: Int64  # [j]
    threads: Int64  # [j]
    ways: Int64  # [k, t]

    @classmethod
    def of(cls, tenant: Tenant, cores: int, mode: CpuMode, *, places: int) -> _Splits:
        profile = tenant.profile
        share = 1.0 if tenant.suffix_ratio is None else np.asarray(tenant.suffix_ratio)[:, None]
        costs = np.zeros((places, len(profile.threads)))
        costs[: len(profile.cuts)] = profile.cpu_s * share
        by_cores = [_splits(k, profile.threads, mode) for k in range(1, cores + 1)]
        known = sorted({split for splits in by_cores for split in splits})
        number = {split: j for j, split in enumerate(known)}
        most = max(len(splits) for splits in by_cores)
        ways = [
            [number[s] for s in splits] + [number[splits[0]]] * (most - len(splits))
            for splits in by_cores
        ]
        workers, threads, columns = (np.array(column) for column in zip(*known, strict=True))
        return cls(
            time_s=costs[:, columns],
            workers=workers,
            threads=threads,
            ways=np.array([ways[0], *ways]),
        )


def _splits(cores: int, measured: Sequence[int], mode: CpuMode) -> list[tuple[int, int, int]]:
    """(workers, threads each, column of the profile) that use at most so many cores."""
    columns = {t: c for c, t in enumerate(measured) if t <= cores}
    if mode == "workers":
        return [(cores, 1, 0)]
    if mode == "threads":
        most = max(columns)
        return [(1, most, columns[most])]
    return [(cores // t, t, c) for t, c in columns.items()]


def _pools(costs: Costs, rates: Float64, method: queueing.MultiServer) -> dict[str, Any]:
    """Best way to use k cores at each place, for k = 0..K: arrays [n, p, k] by name."""
    service = costs.split_s  # [n, p, j]
    servers = np.broadcast_to(costs.split_workers[:, None, :], service.shape)
    rate = rates[:, None, None]
    load = rate * service / servers
    with np.errstate(divide="ignore"):
        clipped = np.where(load < _CLIP, rate, _CLIP * servers / service)
    wait = queueing.pool_wait_s(
        clipped,
        service,
        servers,
        service_cv2=costs.cpu_cv2[:, :, None],
        arrival_cv2=costs.arrival_cv2[:, None, None],
        method=method,
    )
    chance = queueing.erlang_c(clipped * service, servers)
    score = wait + service + 1e3 * queueing.overload(load)
    # The best of what k cores allow, [n, p, k]; of equals the one with fewest threads.
    n, p, j = service.shape
    row = np.arange(0, n * p * j, j).reshape(n, p, 1, 1)
    allowed = (row + costs.ways[:, None]).reshape(-1, costs.ways.shape[2])  # [n p k, t]
    best = score.take(allowed).argmin(axis=1)
    way = allowed[np.arange(len(best)), best].reshape(n, p, -1)
    found = {
        "cpu_s": service,
        "cpu_wait_s": wait,
        "cpu_busy": load,
        "cpu_waits": chance,
        "workers": servers,
        "cpu_threads": np.broadcast_to(costs.split_threads[:, None, :], service.shape),
    }
    pools = {name: array.take(way) * costs.left[:, :, None] for name, array in found.items()}
    # No core at all: the emptier the suffix, the nearer to a plan that works.
    one = costs.split_s[:, :, 0]
    pools["cpu_s"][:, :, 0] = one
    pools["cpu_busy"][:, :, 0] = np.where(costs.left, 1.0 + rates[:, None] * one, 0.0)
    for name in ("cpu_wait_s", "cpu_waits", "workers", "cpu_threads"):
        pools[name][:, :, 0] = 0
    return pools
