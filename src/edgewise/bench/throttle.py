"""Compares policies while this machine really changes: its CPU quota steps, co-runners come and go.

Every input goes to every policy, and the order rotates. What disturbs the machine is played beside
them in real time, the same in each repetition; each repetition begins with policies that have
learned nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgewise.bench.background import Load, LoadSchedule, PlayedLoad
from edgewise.bench.evaluate import Sample
from edgewise.bench.quota import CpuQuota, PlayedQuota, QuotaSchedule
from edgewise.clock import Clock, MonotonicClock
from edgewise.errors import ConfigError
from edgewise.report.evaluation import Estimate

if TYPE_CHECKING:
    from edgewise.runtime import Session

Float64 = npt.NDArray[np.float64]

LEVELS = (1.0, 0.75, 0.5, 0.25, 0.5, 0.75, 1.0)
ORACLE = "oracle"


@dataclass(frozen=True, slots=True, kw_only=True)
class ThrottleScene:
    """What happens to the machine during one repetition.

    Attributes:
        duration_s: How long it lasts, seconds.
        quotas: (seconds since its start, share of one core), in order; empty for no quota.
        loads: (start, stop, load), seconds since its start.
    """

    duration_s: float
    quotas: tuple[tuple[float, float], ...]
    loads: tuple[tuple[float, float, Load], ...]


def default_scene(hold_s: float, *, cores: int, with_quota: bool = True) -> ThrottleScene:
    """The quota goes down and up; co-runners come and go; then both at once.

    Args:
        hold_s: How long each level of the quota lasts, seconds.
        cores: Usable cores: the second set of co-runners keeps each of them busy for half of the
            time.
        with_quota: Without, only the co-runners disturb.
    """
    leg_s = len(LEVELS) * hold_s
    down_and_up = [(n * hold_s, ratio) for n, ratio in enumerate(LEVELS)]
    quotas = [*down_and_up, *((2 * leg_s + at_s, ratio) for at_s, ratio in down_and_up)]
    loads = []
    for begin, end, names in (
        (1.1, 1.45, "map audio"),
        (1.55, 1.9, "cpu"),
        (2.1, 2.9, "map audio"),
    ):
        for name in names.split():
            load = Load(name, duty_ratio=0.5, processes=cores) if name == "cpu" else Load(name)
            loads.append((begin * leg_s, end * leg_s, load))
    return ThrottleScene(
        duration_s=3 * leg_s, quotas=tuple(quotas) if with_quota else (), loads=tuple(loads)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request of one policy.

    Attributes:
        policy: Who decided.
        at_s: When it arrived, seconds since the repetition's start.
        depth_ratio: Work before its exit as a share of the backbone's; 0 where it was refused.
        latency_s: From arrival to answer, or to the refusal.
        met: Whether it was answered in time.
        right: Whether the answer was right.
    """

    policy: str
    at_s: float
    depth_ratio: float
    latency_s: float
    met: bool
    right: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """What was played, and what became of every request.

    Attributes:
        requests: In order.
        quotas: Steps as they came.
        loads: Co-runners as they ran.
    """

    requests: tuple[Request, ...]
    quotas: tuple[PlayedQuota, ...]
    loads: tuple[PlayedLoad, ...]

    def time_line(self) -> dict[str, Any]:
        """What happened when, as JSON can say it; requests in columns, by policy."""
        columns: dict[str, dict[str, list[Any]]] = {}
        for each in self.requests:
            own = columns.setdefault(
                each.policy, {"at_s": [], "depth_ratio": [], "latency_s": [], "met": []}
            )
            own["at_s"].append(round(each.at_s, 5))
            own["depth_ratio"].append(round(each.depth_ratio, 4))
            own["latency_s"].append(round(each.latency_s, 6))
            own["met"].append(each.met)
        return {
            "quotas": [{"at_s": q.at_s, "ratio": q.ratio} for q in self.quotas],
            "loads": [
                {"start_s": p.start_s, "stop_s": p.stop_s, "label": p.label, "problem": p.problem}
                for p in self.loads
            ],
            "policies": columns,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ThrottleRow:
    """One policy, over all repetitions; intervals are over repetitions.

    Attributes:
        policy: Who decided.
        requests: How many of all repetitions.
        dsr: Share answered in time.
        mean_depth_ratio: Mean depth, refused requests counting 0.
        depth_of_oracle: That mean over the oracle's in the same repetition; ``None`` without one.
        accuracy: Share answered rightly, in time or not.
        right_in_time: Share answered rightly and in time.
        p50_s: Median latency, seconds.
        p99_s: 99th percentile.
    """

    policy: str
    requests: int
    dsr: Estimate
    mean_depth_ratio: Estimate
    depth_of_oracle: Estimate | None
    accuracy: Estimate
    right_in_time: Estimate
    p50_s: float
    p99_s: float


def play_throttled(  # noqa: PLR0913 - a comparison's whole circumstances
    make_sessions: Callable[[], Mapping[str, Session]],
    sample: Sample,
    *,
    scene: ThrottleScene,
    repetitions: int,
    budget_s: float,
    quota: CpuQuota | None,
    clock: Clock | None = None,
    around: Callable[[Mapping[str, Session]], AbstractContextManager[object]] | None = None,
    on_progress: Callable[[float], None] = lambda _: None,
) -> list[Repetition]:
    """Play a scene again and again.

    Args:
        make_sessions: Makes one session per policy, by the name it is reported under, all on one
            program, anew for each repetition.
        sample: Inputs, used in turn, and their labels.
        scene: What happens to the machine.
        repetitions: How often.
        budget_s: Of every request, from its arrival, seconds.
        quota: At work already; ``None`` where the scene has none.
        clock: Real time.
        around: Entered for each repetition with its sessions, as to keep their costs up to date.
        on_progress: Told the share done.

    Raises:
        ConfigError: There is no repetition, or the scene has quotas and there is none to step.
        EdgeError: A co-runner could not be started, or a step of the quota was refused.
    """
    if repetitions < 1:
        raise ConfigError(f"expected at least one repetition, found {repetitions}")
    if scene.quotas and quota is None:
        raise ConfigError("this scene steps a quota, and there is none", help="quota=CpuQuota()")
    clock = clock or MonotonicClock()
    played = []
    for n in range(repetitions):
        sessions = make_sessions()
        next(iter(sessions.values())).warm_up()
        with around(sessions) if around is not None else contextlib.nullcontext():
            played.append(
                _play_once(
                    sessions,
                    sample,
                    scene=scene,
                    budget_s=budget_s,
                    quota=quota,
                    clock=clock,
                    on_progress=lambda share, n=n: on_progress((n + share) / repetitions),  # type: ignore[misc]
                )
            )
    on_progress(1.0)
    return played


def _play_once(  # noqa: PLR0913
    sessions: Mapping[str, Session],
    sample: Sample,
    *,
    scene: ThrottleScene,
    budget_s: float,
    quota: CpuQuota | None,
    clock: Clock,
    on_progress: Callable[[float], None],
) -> Repetition:
    requests: list[Request] = []
    names, steps = list(sessions), None
    loads = LoadSchedule(
        scene.loads,
        clock=clock,
        on_start=None if quota is None else lambda load: quota.exempt(load.pids),
    )
    with contextlib.ExitStack() as stack:
        if quota is not None:
            steps = stack.enter_context(QuotaSchedule(quota, scene.quotas, clock=clock))
        stack.enter_context(loads)
        begin_s, n = clock.now_s(), 0
        while (past_s := clock.now_s() - begin_s) < scene.duration_s:
            on_progress(past_s / scene.duration_s)
            at = n % len(sample.inputs)
            x, label = sample.inputs[at][None], int(sample.labels[at])
            for turn in range(len(names)):
                name = names[(turn + n) % len(names)]
                session = sessions[name]
                arrival_s = clock.now_s()
                answer = session.run(x, budget_s=budget_s, arrival_s=arrival_s)
                requests.append(
                    Request(
                        policy=name,
                        at_s=arrival_s - begin_s,
                        depth_ratio=answer.depth_ratio or 0.0,
                        latency_s=answer.observed_s,
                        met=answer.met,
                        right=answer.label == label,
                    )
                )
            n += 1
    return Repetition(
        requests=tuple(requests),
        quotas=steps.played if steps is not None else (),
        loads=loads.played,
    )


def summarise_throttled(played: Sequence[Repetition]) -> tuple[ThrottleRow, ...]:
    """Sum up by policy; a repetition counts as one observation of each mean."""
    by_policy: dict[str, list[list[Request]]] = {}
    for repetition in played:
        grouped: dict[str, list[Request]] = {}
        for each in repetition.requests:
            grouped.setdefault(each.policy, []).append(each)
        for policy, requests in grouped.items():
            by_policy.setdefault(policy, []).append(requests)
    depths = {
        policy: np.array([np.mean([r.depth_ratio for r in each]) for each in repetitions])
        for policy, repetitions in by_policy.items()
    }
    return tuple(_row(policy, by_policy[policy], depths) for policy in by_policy)


def _row(
    policy: str, repetitions: Sequence[Sequence[Request]], depths: Mapping[str, Float64]
) -> ThrottleRow:
    def over(value: Callable[[Request], float]) -> Estimate:
        means = [float(np.mean([value(r) for r in each])) for each in repetitions]
        return mean_over(means, at_most=1.0)

    latency_s = [r.latency_s for each in repetitions for r in each]
    p50_s, p99_s = np.quantile(latency_s, [0.5, 0.99]).tolist()
    oracle = depths.get(ORACLE)
    of_oracle = None
    if oracle is not None and len(oracle) == len(repetitions) and (oracle > 0).all():
        of_oracle = mean_over((depths[policy] / oracle).tolist())
    return ThrottleRow(
        policy=policy,
        requests=len(latency_s),
        dsr=over(lambda r: r.met),
        mean_depth_ratio=mean_over(depths[policy].tolist(), at_most=1.0),
        depth_of_oracle=of_oracle,
        accuracy=over(lambda r: r.right),
        right_in_time=over(lambda r: r.right and r.met),
        p50_s=p50_s,
        p99_s=p99_s,
    )


def mean_over(values: Sequence[float], *, at_most: float = np.inf) -> Estimate:
    """Mean of some repetitions with its 95 % interval; without limits where there is only one.

    Args:
        values: One for each repetition, none below zero.
        at_most: What none can exceed: neither does the interval.

    Source:
        Student, The Probable Error of a Mean (1908): t quantiles with n - 1 degrees of freedom.

    Example:
        >>> found = mean_over([2.0, 3.0, 4.0])
        >>> found.value, round(found.low, 2), round(found.high, 2)
        (3.0, 0.52, 5.48)
    """
    from scipy.stats import t

    num, mean = len(values), float(np.mean(values))
    if num < 2:
        return Estimate(value=mean, low=-np.inf, high=np.inf)
    half = float(t.ppf(0.975, num - 1) * np.std(values, ddof=1) / np.sqrt(num))
    return Estimate(value=mean, low=max(0.0, mean - half), high=min(at_most, mean + half))
