"""What the planner decided, with what it predicts; as a record and as a file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from edgewise.errors import ConfigError, nearest_names
from edgewise.placement.forecast import forecast, forecast_quantile_s, forecast_tail
from edgewise.placement.problem import Problem, Residency

FORMAT = "edgewise-placement"
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one tenant gets.

    Attributes:
        tenant: Its name.
        place: Where its model is cut: 0 all on the CPU, P all on the accelerator.
        cut: Name of the tensor there.
        cores: Of the CPU, for its suffix; 0 where there is none.
        workers: How many requests its cores work on at once.
        threads: Of each worker.
        sram_bytes: Its fixed share of the accelerator's memory; ``None`` where models switch.
    """

    tenant: str
    place: int
    cut: str
    cores: int
    workers: int
    threads: int
    sram_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantPrediction:
    """What one tenant is predicted to see; times in seconds, ``inf`` where a queue is unstable.

    Attributes:
        tenant: Its name.
        rate_per_s: Its arrival rate.
        response_s: Mean response time.
        p95_s: 95 % quantile.
        p99_s: 99 % quantile.
        deadline_miss: Share later than its deadline; ``None`` without one.
        accelerator_wait_s: Mean wait for the accelerator; 0 without a prefix.
        service_s: On the accelerator, without reloading.
        miss: Share of requests that find their parameters displaced.
        load_s: What such a request waits for them.
        cpu_wait_s: Mean wait for its cores.
        cpu_s: Time of the suffix.
        cpu_busy: Utilisation of its cores.
    """

    tenant: str
    rate_per_s: float
    response_s: float
    p95_s: float
    p99_s: float
    deadline_miss: float | None
    accelerator_wait_s: float
    service_s: float
    miss: float
    load_s: float
    cpu_wait_s: float
    cpu_s: float
    cpu_busy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A plan for all tenants.

    Attributes:
        shares: One per tenant, in the problem's order.
        residency: Whether models switch in the accelerator's memory or have fixed shares.
        objective: What was minimised.
        score: Its value, infinite where the plan is unstable.
        stable: Whether every queue is stable.
        accelerator: Name of the device; ``None`` for none.
        accelerator_busy: Its utilisation.
        predicted: One per tenant.
        method: Which search found it.
        evaluated: How many candidates it looked at.
    """

    shares: tuple[Share, ...]
    residency: Residency
    objective: str
    score: float
    stable: bool
    accelerator: str | None
    accelerator_busy: float
    predicted: tuple[TenantPrediction, ...]
    method: str
    evaluated: int = 0
    notes: tuple[str, ...] = field(default=())

    @property
    def places(self) -> tuple[int, ...]:
        """Of every tenant, p."""
        return tuple(s.place for s in self.shares)

    @property
    def cores(self) -> tuple[int, ...]:
        """Of every tenant, k."""
        return tuple(s.cores for s in self.shares)


def make_placement(  # noqa: PLR0913 - what a search knows
    problem: Problem,
    places: Sequence[int],
    cores: Sequence[int],
    *,
    shares_bytes: Sequence[float] | None = None,
    method: str,
    evaluated: int = 0,
    notes: tuple[str, ...] = (),
) -> Placement:
    """Turn a candidate into a plan with all its predictions.

    Args:
        problem: What was planned for.
        places: p, [n].
        cores: k, [n].
        shares_bytes: Accelerator memory of each tenant, [n]; for pinned residency.
        method: Which search found it.
        evaluated: How many candidates it looked at.
        notes: What must be said.
    """
    p, k = np.array([places]), np.array([cores])
    pinned = problem.residency == "pinned" and problem.accelerator is not None
    x = None if shares_bytes is None or not pinned else np.array([shares_bytes], dtype=np.float64)
    found = forecast(problem, p, k, shares_bytes=x)
    p95, p99 = (forecast_quantile_s(found, q)[0] for q in (0.95, 0.99))
    deadlines = np.array([[t.deadline_s or math.inf for t in problem.tenants]])
    late = forecast_tail(found, deadlines)[0]
    shares = []
    predicted = []
    for i, tenant in enumerate(problem.tenants):
        held = min(int(k[0, i]), problem.cores)
        shares.append(
            Share(
                tenant=tenant.name,
                place=int(p[0, i]),
                cut=tenant.profile.cuts[int(p[0, i])],
                cores=int(k[0, i]),
                workers=int(problem.workers[i, p[0, i], held]),
                threads=int(problem.cpu_threads[i, p[0, i], held]),
                sram_bytes=None if x is None else int(x[0, i]),
            )
        )
        uses = bool(p[0, i] > 0)
        predicted.append(
            TenantPrediction(
                tenant=tenant.name,
                rate_per_s=tenant.rate_per_s,
                response_s=float(found.response_s[0, i]),
                p95_s=float(p95[i]),
                p99_s=float(p99[i]),
                deadline_miss=None if tenant.deadline_s is None else float(late[i]),
                accelerator_wait_s=float(found.accelerator_wait_s[0]) if uses else 0.0,
                service_s=float(found.service_s[0, i]),
                miss=float(found.miss[0, i]),
                load_s=float(found.load_s[0, i]),
                cpu_wait_s=float(found.cpu_wait_s[0, i]),
                cpu_s=float(found.cpu_s[0, i]),
                cpu_busy=float(found.cpu_busy[0, i]),
            )
        )
    stable = bool(found.stable[0])
    return Placement(
        shares=tuple(shares),
        residency=problem.residency,
        objective=problem.objective,
        score=float(found.score[0]) if stable else math.inf,
        stable=stable,
        accelerator=problem.accelerator.name if problem.accelerator else None,
        accelerator_busy=float(found.accelerator_busy[0]),
        predicted=tuple(predicted),
        method=method,
        evaluated=evaluated,
        notes=notes,
    )


def placement_text(plan: Placement) -> str:
    """Write a plan as JSON; infinite times become ``null``."""

    def plain(value: Any) -> Any:
        if isinstance(value, float) and math.isinf(value):
            return None
        if isinstance(value, Mapping):
            return {k: plain(v) for k, v in value.items()}
        return [plain(v) for v in value] if isinstance(value, list | tuple) else value

    return json.dumps(
        {"format": FORMAT, "version": FORMAT_VERSION, **plain(asdict(plan))}, indent=1
    )


def read_shares(path: str | Path, problem: Problem) -> Placement:
    """Read a plan file, maybe edited by hand, and predict anew what it gives.

    Only the tenants' places, cores and memory count; predictions in the file are ignored.

    Args:
        path: What `placement_text` was written to.
        problem: Tenants and device that it is for.

    Raises:
        ConfigError: It cannot be read, names other tenants, a place that a model does not have,
            more cores than there are, none for a suffix, or more memory than the device has.
    """
    where = str(path)
    try:
        found: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the plan {where}: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ConfigError(
            f"{where} is no plan of Edgewise", help="edgewise place WORKLOAD --out FILE"
        )
    if found.get("version") != FORMAT_VERSION:
        raise ConfigError(
            f"{where} has version {found.get('version')!r}, this Edgewise reads {FORMAT_VERSION}"
        )
    shares = {s.tenant: s for s in _shares(found.get("shares"), where)}
    names = [t.name for t in problem.tenants]
    odd = sorted(set(shares) ^ set(names))
    if odd:
        raise ConfigError(
            f"{where}: its tenants are {', '.join(shares)}, the workload's are {', '.join(names)}",
            help=nearest_names(odd[0], names),
        )
    ordered = [shares[name] for name in names]
    _check_shares(ordered, problem, where)
    pinned = problem.residency == "pinned"
    return make_placement(
        problem,
        [s.place for s in ordered],
        [s.cores for s in ordered],
        shares_bytes=[s.sram_bytes or 0 for s in ordered] if pinned else None,
        method=f"file {Path(path).name}",
    )


def _shares(found: Any, where: str) -> list[Share]:
    known = {f.name for f in fields(Share)}
    if not isinstance(found, list) or not all(isinstance(s, dict) for s in found):
        raise ConfigError(f"{where}: expected a list of shares")
    result = []
    for number, share in enumerate(found):
        odd = sorted(set(share) ^ known)
        if odd:
            raise ConfigError(
                f"{where}: shares[{number}]: missing or unknown key {odd[0]!r}",
                help=nearest_names(odd[0], known),
            )
        for key in ("place", "cores"):
            if not isinstance(share[key], int) or isinstance(share[key], bool) or share[key] < 0:
                raise ConfigError(
                    f"{where}: shares[{number}].{key}: expected a whole number of zero or more,"
                    f" found {share[key]!r}"
                )
        result.append(Share(**share))
    return result


def _check_shares(shares: Sequence[Share], problem: Problem, where: str) -> None:
    for i, share in enumerate(shares):
        profile = problem.tenants[i].profile
        if share.place > problem.last[i]:
            raise ConfigError(
                f"{where}: tenant {share.tenant!r} is cut at place {share.place}; its places are 0"
                f" to {problem.last[i]}"
            )
        if share.cut != profile.cuts[share.place]:
            raise ConfigError(
                f"{where}: place {share.place} of tenant {share.tenant!r} is"
                f" {profile.cuts[share.place]!r}, the file says {share.cut!r}",
                help="the profile has changed since the plan was made: plan again",
            )
        left = profile.cpu_s[share.place, 0] > 0
        if left and share.cores == 0:
            raise ConfigError(
                f"{where}: tenant {share.tenant!r} has a suffix after place {share.place} and no"
                " core to run it"
            )
    total = sum(s.cores for s in shares)
    if total > problem.cores:
        raise ConfigError(f"{where}: {total} cores are given away, {problem.cores} are there")
    memory = sum(s.sram_bytes or 0 for s in shares)
    if problem.accelerator is not None and memory > problem.accelerator.sram_bytes:
        raise ConfigError(
            f"{where}: {memory} bytes of accelerator memory are given away,"
            f" {problem.accelerator.sram_bytes} are there"
        )
