"""Plays plans in real time beside what is predicted: CPU measured now, accelerator simulated.

Costs are measured on this machine a moment before they are used. The mean of all rounds counts, not
the quickest of them: queues see means, other work on the machine included.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from edgewise.backends.accelerator import AcceleratorDevice
from edgewise.backends.piece import Array, Piece, load_piece
from edgewise.backends.simulated_accelerator import SimulatedAccelerator
from edgewise.bench.arrivals import Arrivals
from edgewise.bench.remembered import RememberedModel, make_inputs, remembered_loader
from edgewise.bench.workload import Sent, send
from edgewise.clock import Clock, MonotonicClock
from edgewise.device import device_fingerprint, load_between, read_cpu_counters
from edgewise.device.accelerator import Accelerator
from edgewise.frontends.partition import PartitionedModel, read_partitioned
from edgewise.frontends.zoo_int8 import int8_file
from edgewise.placement.forecast import forecast
from edgewise.placement.plan import Placement
from edgewise.placement.problem import PAPER, Problem, Tenant
from edgewise.placement.response import evaluate
from edgewise.placement.simulate import simulate
from edgewise.placement.workload import Rate, Workload, WorkloadTenant
from edgewise.profiles.partition import PartitionProfile
from edgewise.profiling.segments import SegmentTimes, measure_segments, partition_profile
from edgewise.report.workload import PlayedRequest
from edgewise.runtime.tenants.engine import TenantEngine
from edgewise.runtime.tenants.records import Cuttable, PlanChange, QueueRule, TenantModel

Float64 = npt.NDArray[np.float64]
Side = Literal["predicted", "paper", "raw", "replayed", "given"]

FCFS = QueueRule(discipline="fcfs")
WARM_UP_RATIO = 0.05  # of a play, not counted: it begins empty
_POOL = 4  # inputs of each tenant, taken in turn
_WARM_S = 60.0  # for a first answer of each tenant
_PROBES = 12  # requests of each tenant, alone and at once, for what handing over costs
_DRAIN_S = 60.0
_LONG_RUN = 100_000  # requests, all tenants
_MAX_WAITING = 100_000  # none is refused: latency is what is compared
# Whose definition is not obtainable, and what stands in.
_FILES = {"gpunet_standin": "resnet18"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuredModel:
    """A model that can be played, with what it costs on this machine now.

    Attributes:
        name: As a tenant is called.
        model: With the outputs of its prefixes remembered.
        profile: CPU measured, accelerator computed.
        inputs: The pool that is remembered.
        together_ratio: Time of a suffix while every other core runs one too, over its time alone.
        made: How its file was made, for people.
        other_cores: Cores that other processes used meanwhile; ``None`` if unknown.
    """

    name: str
    model: Cuttable
    profile: PartitionProfile
    inputs: tuple[Array, ...]
    together_ratio: float = 1.0
    made: str = ""
    other_cores: float | None = None


class Models:
    """Builds models and measures them, each once in a run.

    Args:
        accelerator: That prefixes are for.
        folder: Where model files are kept.
        rounds: Of each measurement.
        time_cap_s: Of each measurement, seconds.
        cores: That suffixes will use.
        seed: Of inputs.
        say: Told what is going on.
    """

    def __init__(  # noqa: PLR0913 - a measurement's circumstances
        self,
        accelerator: Accelerator,
        folder: Path,
        *,
        rounds: int,
        time_cap_s: float,
        cores: int = 1,
        seed: int = 0,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.accelerator = accelerator
        self._folder = folder
        self._rounds, self._time_cap_s, self._cores = rounds, time_cap_s, cores
        self._seed, self._say = seed, say
        self._known: dict[tuple[str, int], MeasuredModel] = {}

    def get(self, name: str, *, places: int) -> MeasuredModel:
        """Measure a network of the zoo on one thread, unless that has been done.

        Args:
            name: Of the zoo, or of a stand-in.
            places: How many inner places at most.

        Raises:
            EdgeError: As `int8_file`, `read_partitioned` and `measure_segments`.
        """
        found = self._known.get((name, places))
        if found is None:
            path, made = int8_file(_FILES.get(name, name), self._folder, say=self._say)
            self._say(f"{name}: measuring what is left after each place")
            found = measure_model(
                name,
                read_partitioned(path, places=places),
                accelerator=self.accelerator,
                rounds=self._rounds,
                time_cap_s=self._time_cap_s,
                cores=self._cores,
                rng=np.random.default_rng(self._seed),
            )
            found = self._known[name, places] = replace(found, made=made)
        return found


def measure_model(  # noqa: PLR0913 - a measurement's circumstances
    name: str,
    model: PartitionedModel,
    *,
    accelerator: Accelerator,
    rounds: int,
    time_cap_s: float,
    cores: int = 1,
    rng: np.random.Generator,
    load: Callable[..., Piece] = load_piece,
) -> MeasuredModel:
    """Measure a model on one thread and remember what its prefixes answer.

    Args:
        name: As the tenant is called.
        model: Cut where it may be.
        accelerator: That prefixes are for.
        rounds: How many.
        time_cap_s: Ends earlier after this time.
        cores: That suffixes will use.
        rng: Makes inputs.
        load: Loads a piece.

    Raises:
        EdgeError: As `measure_segments`.
    """
    times = measure_segments(
        model, rounds=rounds, warmup_rounds=1, time_cap_s=time_cap_s, kept_ratio=1, load=load
    )
    inputs = make_inputs(model, count=_POOL, rng=rng)
    return MeasuredModel(
        name=name,
        model=RememberedModel(model, inputs, load=load),
        profile=_with_means(
            partition_profile(model, times, accelerator=accelerator, cpu=device_fingerprint().id),
            times,
        ),
        inputs=inputs,
        together_ratio=together_ratio(model, inputs[0], cores=cores, load=load),
        other_cores=times.other_cores,
    )


def together_ratio(
    model: PartitionedModel,
    x: Array,
    *,
    cores: int,
    rounds: int = 5,
    load: Callable[..., Piece] = load_piece,
) -> float:
    """Measure how much longer the whole model takes while every other core runs it too.

    Cores share memory, caches and clocks. CPU time is compared, not wall time, so that other
    programs that take a core away do not count.

    Args:
        model: The model.
        x: Its input.
        cores: How many run it at once.
        rounds: Of one call alone and one on each core.
        load: Loads a piece.

    Returns:
        At least 1; 1 for a single core.
    """
    if cores < 2:
        return 1.0
    whole = model.segment(0, model.last)
    pieces = [load(whole, model.format, threads=1) for _ in range(cores)]
    start = threading.Barrier(cores)

    def spent_s(piece: Piece, *, wait: bool) -> float:
        if wait:
            start.wait()
        begin_s = time.thread_time()
        piece.run(x)
        return time.thread_time() - begin_s

    alone: list[float] = []
    together: list[float] = []
    try:
        with ThreadPoolExecutor(cores) as pool:
            for _ in range(rounds + 1):
                alone.append(pool.submit(spent_s, pieces[0], wait=False).result())
                together += pool.map(functools.partial(spent_s, wait=True), pieces)
    finally:
        for piece in pieces:
            piece.close()
    usual_s = float(np.median(alone[1:]))  # the first of each warms up
    return max(1.0, float(np.median(together[cores:])) / usual_s) if usual_s > 0 else 1.0


def contended(
    models: Sequence[MeasuredModel],
    problem: Problem,
    places: Sequence[int],
    cores: Sequence[int],
) -> Problem:
    """Let suffixes take as long as they do beside the others that a plan runs at once.

    A suffix meets another core at work with the probability that it is busy: utilisation u for
    another tenant's, 2 u / (1 + u) for one of the same pool, as in M/M/2, where waiting requests
    keep both busy. Each such core slows it by an equal part of `MeasuredModel.together_ratio`.

    Args:
        models: In the order of the tenants.
        problem: With costs measured alone.
        places: p, [n].
        cores: k, [n].

    Returns:
        The problem with longer suffixes; the same where there is one core.
    """
    if problem.cores < 2:
        return problem
    count = len(models)
    alone_s = problem.cpu_s[np.arange(count), places, cores]
    held = np.maximum(cores, 1)
    more = np.array([m.together_ratio - 1 for m in models])
    factor = np.ones(count)
    for _ in range(10):
        offered = problem.rates * alone_s * factor
        busy = np.minimum(offered / held, 1.0)
        others = offered.sum() - offered + (held - 1) * 2 * busy / (1 + busy)
        factor = 1 + more * np.clip(others / (problem.cores - 1), 0.0, 1.0)
    return repriced(
        problem,
        [
            replace(t.profile, cpu_s=t.profile.cpu_s * f)
            for t, f in zip(problem.tenants, factor.tolist(), strict=True)
        ],
    )


def repriced(problem: Problem, profiles: Sequence[PartitionProfile]) -> Problem:
    """The same problem with other costs.

    Args:
        problem: The problem.
        profiles: In the order of its tenants.
    """
    return Problem.of(
        [replace(t, profile=p) for t, p in zip(problem.tenants, profiles, strict=True)],
        problem.accelerator,
        cores=problem.cores,
        objective=problem.objective,
        assumptions=problem.assumptions,
        residency=problem.residency,
    )


def measured_around(
    models: Sequence[MeasuredModel],
    places: Sequence[int],
    run: Callable[[], Play],
    *,
    rounds: int = 6,
    load: Callable[..., Piece] = load_piece,
) -> tuple[Play, tuple[MeasuredModel, ...]]:
    """Play, and measure the suffixes right before and right after.

    A virtual machine gets faster and slower by a tenth within minutes, whatever runs on it. What a
    suffix cost a while ago then says little of how good the formulas are.

    Args:
        models: In the order of the tenants.
        places: Where each is cut.
        run: Plays.
        rounds: Of each measurement; suffixes take turns.
        load: Loads a piece.

    Returns:
        The play, and the models with the costs of these suffixes replaced by the mean of both
        measurements.

    Raises:
        EdgeError: As `load_piece`, or as ``run``.
    """
    with contextlib.ExitStack() as stack:
        pieces = {}
        for i, (model, place) in enumerate(zip(models, places, strict=True)):
            if place == model.profile.last:
                continue
            cut = model.model
            piece = load(cut.segment(place, cut.last), cut.format, threads=1)
            stack.callback(piece.close)
            x = np.zeros(piece.input.shape, dtype=piece.input.dtype)
            piece.run(x)
            pieces[i] = piece, x
        samples: dict[int, list[float]] = {i: [] for i in pieces}
        clock = MonotonicClock()

        def measure() -> None:
            for _ in range(rounds):
                for i, (piece, x) in pieces.items():
                    start_s = clock.now_s()
                    piece.run(x)
                    samples[i].append(clock.now_s() - start_s)

        measure()
        played = run()
        measure()
    found = list(models)
    for i, taken in samples.items():
        found[i] = _with_cost(models[i], places[i], np.array(taken))
    return played, tuple(found)


def _with_cost(model: MeasuredModel, place: int, taken_s: Float64) -> MeasuredModel:
    """A model whose suffix after one place takes what was measured last."""
    profile = model.profile
    cpu_s = profile.cpu_s.copy()
    cpu_s[place] *= taken_s.mean() / profile.cpu_s[place, 0]
    cv2 = np.array(profile.cpu_cv2, dtype=np.float64)
    cv2[place] = taken_s.var() / taken_s.mean() ** 2
    return replace(model, profile=replace(profile, cpu_s=cpu_s, cpu_cv2=cv2))


def _with_means(profile: PartitionProfile, times: SegmentTimes) -> PartitionProfile:
    """Means and variances of all rounds in place of medians."""
    means = np.concatenate([times.rests_s.mean(axis=0), np.zeros((1, len(times.threads)))])
    one = times.rests_s[:, :, 0]
    return replace(
        profile,
        cpu_s=means,
        cpu_cv2=np.append(one.var(axis=0) / one.mean(axis=0) ** 2, 0.0),
        notes={**profile.notes, "cpu": f"{times.backend}; mean of {times.rounds} rounds"},
    )


def tenants_of(
    models: Sequence[MeasuredModel], rates_per_s: Sequence[float] | Float64
) -> tuple[Tenant, ...]:
    """One tenant for each model, called as it is."""
    return tuple(
        Tenant(name=m.name, profile=m.profile, rate_per_s=float(rate))
        for m, rate in zip(models, rates_per_s, strict=True)
    )


def steady_arrivals(
    rates_per_s: Sequence[float], *, requests: int, rng: np.random.Generator
) -> Arrivals:
    """Draw Poisson-like requests at constant rates, evenly over the law of their gaps.

    Each tenant's gaps are a Latin hypercube sample: one from each of N equally likely ranges of the
    exponential law, in random order. Their law is exact, and a short play has the mean and the
    variance of a long one; gaps are as good as independent.

    Args:
        rates_per_s: Of each tenant.
        requests: About how many together.
        rng: Chance.

    Source:
        McKay, Beckman and Conover, Technometrics 21 (1979).
    """
    length_s = requests / sum(rates_per_s)
    own = []
    for rate in rates_per_s:
        count = max(2, round(rate * length_s))
        ranks = (rng.permutation(count) + rng.random(count)) / count
        own.append(np.cumsum(-np.log1p(-ranks) / rate))
    due_s = np.concatenate(own)
    tenant = np.repeat(np.arange(len(own)), [len(each) for each in own])
    order = np.argsort(due_s, kind="stable")
    return Arrivals(due_s=due_s[order], tenant=tenant[order], duration_s=float(due_s.max()))


# --- playing -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """What requests cost beside their services: threads that wake up, locks, a language.

    Attributes:
        gap_s: Between a prefix and the next one that waits, on the accelerator's thread.
        handing_s: By tenant, of a request alone on an idle engine, the gap left out.
    """

    gap_s: float = 0.0
    handing_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Play:
    """What was played.

    Attributes:
        requests: All, in order of due instants.
        changes: Plans, the first included.
        origin_s: The start, on the engine's clock.
        duration_s: How long requests came.
        late_p99_s: 99 % of requests were sent within so long after they were due.
        overruns: Calls of the simulated device that the CPU made longer than described.
        calls: Its calls.
        other_ratio: Share of the machine that other processes used; ``None`` if unknown.
        steal_ratio: Share that the hypervisor gave to other machines; ``None`` if unknown.
        extra: What ``beside`` returned.
        overheads: What requests cost beside their services, seen just before the play.
    """

    requests: tuple[PlayedRequest, ...] = field(repr=False)
    changes: tuple[PlanChange, ...] = field(repr=False)
    origin_s: float
    duration_s: float
    late_p99_s: float
    overruns: int
    calls: int
    other_ratio: float | None
    steal_ratio: float | None
    extra: Any = None
    overheads: Overheads = field(default_factory=Overheads)

    @property
    def lost(self) -> int:
        """Requests that had no answer, whatever became of them."""
        return sum(r.outcome != "answered" for r in self.requests)

    def of(self, tenant: str | None = None) -> list[PlayedRequest]:
        """Answered requests after the warm-up, of one tenant or of all."""
        from_s = WARM_UP_RATIO * self.duration_s
        return [
            r
            for r in self.requests
            if r.outcome == "answered" and r.due_s >= from_s and tenant in {None, r.tenant}
        ]


Beside = Callable[[TenantEngine], contextlib.AbstractContextManager[Any]]


def play(  # noqa: PLR0913 - a play's whole circumstances
    models: Sequence[MeasuredModel],
    problem: Problem,
    placement: Placement,
    arrivals: Arrivals,
    *,
    queue: QueueRule = FCFS,
    beside: Beside | None = None,
    clock: Clock | None = None,
    load: Callable[..., Piece] = load_piece,
) -> Play:
    """Send requests when they are due to an engine under a plan, and wait for their ends.

    Args:
        models: In the order of the problem's tenants.
        problem: Device and cores.
        placement: The plan that it begins with.
        arrivals: When requests come.
        queue: The accelerator's order.
        beside: Makes what goes on beside the play, such as a replanner, from the engine.
        clock: Real by default.
        load: Loads a piece.

    Raises:
        EdgeError: As `TenantEngine`.
    """
    clock = clock or MonotonicClock()
    device = None
    with contextlib.ExitStack() as stack:
        if problem.accelerator is not None:
            device = simulated_device(
                problem.accelerator, [m.model for m in models], clock=clock, load=load
            )
            stack.callback(device.close)
        engine = stack.enter_context(
            warm_engine(
                [TenantModel(name=m.name, model=m.model, profile=m.profile) for m in models],
                placement,
                {m.name: m.inputs for m in models},
                device=device,
                clock=clock,
                queue=queue,
                cores=problem.cores,
                max_waiting=_MAX_WAITING,
                load=load,
            )
        )
        stack.enter_context(_prompt_threads())
        overheads = _overheads(engine, models)
        extra = None if beside is None else stack.enter_context(beside(engine))
        before = read_cpu_counters()
        sent = send(
            _workload(models, problem),
            engine,
            {m.name: m.inputs for m in models},
            arrivals,
            clock=clock,
            stop=threading.Event(),
            drain_s=_DRAIN_S,
        )
        load_seen = load_between(before, read_cpu_counters(), window_s=sent.end_s)
        changes = engine.changes
    return Play(
        requests=sent.requests,
        changes=changes,
        origin_s=sent.origin_s,
        duration_s=arrivals.duration_s,
        late_p99_s=_late_p99_s(sent),
        overruns=0 if device is None else device.overruns,
        calls=0 if device is None else device.calls,
        other_ratio=load_seen.other_ratio,
        steal_ratio=load_seen.steal_ratio,
        extra=extra,
        overheads=overheads,
    )


def _overheads(engine: TenantEngine, models: Sequence[MeasuredModel]) -> Overheads:
    """Send some requests one by one, and then some of each tenant at once."""
    gaps: list[float] = []
    handing_s: dict[str, float] = {}
    for model in models:
        x = model.inputs[0]
        alone = []
        for _ in range(_PROBES):
            seen = engine.submit(model.name, x).result(_WARM_S)
            alone.append(seen.response_s - (seen.service_s or 0.0) - (seen.cpu_s or 0.0))
        handing_s[model.name] = float(np.median(alone))
        tickets = [engine.submit(model.name, x) for _ in range(_PROBES)]
        answers = [ticket.result(_WARM_S) for ticket in tickets]
        ends = sorted(
            (a.due_s + (a.accelerator_wait_s or 0.0) + a.service_s, a.service_s)
            for a in answers
            if a.service_s is not None
        )
        gaps += [max(0.0, b - a - s) for (a, _), (b, s) in itertools.pairwise(ends)]
    gap_s = float(np.median(gaps)) if gaps else 0.0
    return Overheads(gap_s=gap_s, handing_s={k: max(0.0, v - gap_s) for k, v in handing_s.items()})


@contextlib.contextmanager
def _prompt_threads() -> Iterator[None]:
    """Let a thread that plans keep the interpreter from others for half a millisecond, not five."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(5e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)


def simulated_device(
    description: Accelerator,
    models: Sequence[Any],
    *,
    clock: Clock,
    load: Callable[..., Piece] = load_piece,
) -> SimulatedAccelerator:
    """Make a device that knows the outputs of prefixes and leaves the cores to suffixes.

    Args:
        description: The device.
        models: `RememberedModel`, each.
        clock: The engine's.
        load: Loads a piece.
    """
    loader = remembered_loader(list(models), load=load)
    return SimulatedAccelerator(description, clock=clock, piece_loader=loader)


@contextlib.contextmanager
def warm_engine(
    tenants: Sequence[TenantModel],
    placement: Placement,
    inputs: Mapping[str, Sequence[Array]],
    *,
    device: AcceleratorDevice | None,
    **options: Any,
) -> Iterator[TenantEngine]:
    """Open an engine in which every tenant has answered once, and close it afterwards.

    Args:
        tenants: Whose plan it is.
        placement: The plan.
        inputs: By tenant.
        device: What prefixes run on.
        options: More of `TenantEngine`'s arguments.

    Raises:
        EdgeError: As `TenantEngine`.
    """
    with TenantEngine(tenants, placement, device=device, **options) as engine:
        for name, pool in inputs.items():
            engine.submit(name, pool[0], deadline_s=_WARM_S).result(_WARM_S)
        yield engine


def _workload(models: Sequence[MeasuredModel], problem: Problem) -> Workload:
    return Workload(
        name="play",
        tenants=tuple(
            WorkloadTenant(
                name=m.name, model=None, profile=m.profile, rate=Rate(per_s=t.rate_per_s)
            )
            for m, t in zip(models, problem.tenants, strict=True)
        ),
        accelerator=problem.accelerator,
        cores=problem.cores,
    )


def _late_p99_s(sent: Sent) -> float:
    late = [r.sent_s - r.due_s for r in sent.requests]
    return float(np.quantile(late, 0.99)) if late else 0.0


# --- comparing -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One tenant of one play, predicted and observed; times are means, seconds.

    Attributes:
        label: Which play.
        tenant: Whose.
        place: Where its model was cut.
        rate_per_s: λ.
        requests: How many count.
        observed_s: Response, of real requests.
        predicted_s: By our formulas.
        paper_s: By the paper's.
        replayed_s: By an event simulation of the same arrivals with the same costs.
        long_run_s: By the same simulation of very many requests.
        observed_miss: Share that reloaded; ``None`` without a prefix.
        predicted_miss: By our formulas.
        paper_miss: By the paper's.
        observed_parts_s: Wait and service at the accelerator, wait and service at the cores, and
            what none of them accounts for: handing over.
        predicted_parts_s: The same.
        other_ratio: Share of the machine that other processes used; ``None`` if unknown.
        given_s: By our formulas, given how long the play's own suffixes took; ``None`` where that
            was not asked.
        given_settled_s: As `settled_s`, by a replay with those times.
    """

    label: str
    tenant: str
    place: int
    rate_per_s: float
    requests: int
    observed_s: float
    predicted_s: float
    paper_s: float
    replayed_s: float
    long_run_s: float
    observed_miss: float | None
    predicted_miss: float
    paper_miss: float
    observed_parts_s: tuple[float, ...]
    predicted_parts_s: tuple[float, ...]
    other_ratio: float | None
    given_s: float | None = None
    given_settled_s: float | None = None

    @property
    def settled_s(self) -> float:
        """What many more requests would have shown: observed, less the chance of its arrivals.

        The replay is the control variate: it meets the same arrivals, and its own long run is
        known. A fault of the formulas or of the costs stays in.
        """
        return self.observed_s - (self.replayed_s - self.long_run_s)

    def error_ratio(self, of: Side = "predicted") -> float:
        """How far a prediction is off, as a share of what it is held against.

        Args:
            of: ``predicted`` or ``paper``: the formulas against `settled_s`. ``raw``: ours against
                `observed_s`. ``replayed``: the replay against `observed_s`, which leaves the
                costs' error alone. ``given``: ours, given the play's own suffix times, which
                leaves the formulas' error alone.
        """
        if of == "given":
            if self.given_s is None or self.given_settled_s is None:
                return math.nan
            return self.given_s / self.given_settled_s - 1
        seen_s = self.settled_s if of in {"predicted", "paper"} else self.observed_s
        said_s = {"paper": self.paper_s, "replayed": self.replayed_s}.get(of, self.predicted_s)
        return said_s / seen_s - 1


def compare(  # noqa: PLR0913 - both sides of a comparison
    label: str,
    problem: Problem,
    placement: Placement,
    arrivals: Arrivals,
    played: Play,
    *,
    seed: int = 0,
) -> list[Row]:
    """Hold one plan's play in arrival order against predictions for the rates that were meant.

    Args:
        label: Of the play.
        problem: With those rates.
        placement: The plan, in force all the time.
        arrivals: What was sent.
        played: What became of it.
        seed: Of the long run.
    """
    problem = _with_gap(problem, played.overheads.gap_s)
    more_s = [played.overheads.handing_s.get(t.name, 0.0) for t in problem.tenants]
    places, cores = np.array([placement.places]), np.array([placement.cores])
    shares = None
    if placement.residency == "pinned":
        shares = np.array([[float(s.sram_bytes or 0) for s in placement.shares]])
    ours = forecast(problem, places, cores, shares_bytes=shares)
    theirs = evaluate(_as_paper(problem), places, cores, shares_bytes=shares)
    replay = functools.partial(_replay, placement=placement, arrivals=arrivals, seed=seed)
    replayed_s, long_run_s = replay(problem, shares_bytes=shares)
    served = _as_served(problem, placement, played)
    given = forecast(served, places, cores, shares_bytes=shares)
    given_replayed_s, given_long_run_s = replay(served, shares_bytes=shares)
    rows = []
    for i, tenant in enumerate(problem.tenants):
        own = played.of(tenant.name)
        if not own:
            continue
        uses = placement.places[i] > 0
        rows.append(
            Row(
                label=label,
                tenant=tenant.name,
                place=placement.places[i],
                rate_per_s=tenant.rate_per_s,
                requests=len(own),
                observed_s=float(np.mean([r.response_s for r in own])),
                predicted_s=float(ours.response_s[0, i]) + more_s[i],
                paper_s=float(theirs.response_s[0, i]) + more_s[i],
                replayed_s=replayed_s[i] + more_s[i],
                long_run_s=long_run_s[i] + more_s[i],
                observed_miss=float(np.mean([bool(r.missed) for r in own])) if uses else None,
                predicted_miss=float(ours.miss[0, i]),
                paper_miss=float(theirs.miss[0, i]),
                observed_parts_s=_parts(own),
                predicted_parts_s=(
                    float(ours.accelerator_wait_s[0]) if uses else 0.0,
                    float(ours.service_s[0, i] + ours.miss[0, i] * ours.load_s[0, i]),
                    float(ours.cpu_wait_s[0, i]),
                    float(ours.cpu_s[0, i]),
                    more_s[i],
                ),
                other_ratio=played.other_ratio,
                given_s=float(given.response_s[0, i]) + more_s[i],
                given_settled_s=float(np.mean([r.response_s for r in own]))
                - (given_replayed_s[i] - given_long_run_s[i]),
            )
        )
    return rows


def _with_gap(problem: Problem, gap_s: float) -> Problem:
    """The problem on a device whose every call takes longer by what lies between two."""
    device = problem.accelerator
    if device is None or gap_s == 0:
        return problem
    return Problem.of(
        problem.tenants,
        replace(device, fixed_s=device.fixed_s + gap_s),
        cores=problem.cores,
        objective=problem.objective,
        assumptions=problem.assumptions,
        residency=problem.residency,
    )


def _replay(
    problem: Problem,
    *,
    placement: Placement,
    arrivals: Arrivals,
    shares_bytes: Float64 | None,
    seed: int,
) -> tuple[list[float], list[float]]:
    """Mean responses of the same arrivals on a virtual clock, and of very many, by tenant.

    Suffixes have constant length: their chance in a replay is not that of the play.
    """
    simulated = functools.partial(
        simulate,
        replace(problem, cpu_cv2=np.zeros_like(problem.cpu_cv2)),
        placement.places,
        placement.cores,
        shares_bytes=None if shares_bytes is None else shares_bytes[0],
    )
    replayed = simulated(
        horizon_s=arrivals.duration_s,
        arrivals=[arrivals.of(i) for i in range(len(problem.tenants))],
        warm_up_ratio=WARM_UP_RATIO,
    )
    long_run = simulated(requests=_LONG_RUN, seed=seed)
    return [t.mean_s for t in replayed.tenants], [t.mean_s for t in long_run.tenants]


def _as_served(problem: Problem, placement: Placement, played: Play) -> Problem:
    """The problem with the suffix times that the play itself had."""
    profiles = []
    for i, tenant in enumerate(problem.tenants):
        profile, place = tenant.profile, placement.places[i]
        taken_s = np.array([r.cpu_s for r in played.of(tenant.name) if r.cpu_s is not None])
        if len(taken_s) and place < profile.last:
            cpu_s, cv2 = profile.cpu_s.copy(), np.array(profile.cpu_cv2, dtype=np.float64)
            cpu_s[place] *= taken_s.mean() / problem.cpu_s[i, place, placement.cores[i]]
            cv2[place] = taken_s.var() / taken_s.mean() ** 2
            profile = replace(profile, cpu_s=cpu_s, cpu_cv2=cv2)
        profiles.append(profile)
    return repriced(problem, profiles)


def mape(rows: Sequence[Row], of: Side = "predicted") -> float:
    """Mean absolute percentage error, as a ratio.

    Args:
        rows: At least one.
        of: As for `Row.error_ratio`.
    """
    return float(np.mean([abs(row.error_ratio(of)) for row in rows]))


def within(rows: Sequence[Row], ratio: float, of: Side = "predicted") -> float:
    """Share of rows whose error is at most a ratio, 0 to 1."""
    return float(np.mean([abs(row.error_ratio(of)) <= ratio for row in rows]))


def _as_paper(problem: Problem) -> Problem:
    return Problem.of(
        problem.tenants,
        problem.accelerator,
        cores=problem.cores,
        assumptions=PAPER,
        residency=problem.residency,
    )


def _parts(own: Sequence[PlayedRequest]) -> tuple[float, ...]:
    names = ("accelerator_wait_s", "service_s", "cpu_wait_s", "cpu_s")
    parts = [float(np.mean([getattr(r, name) or 0.0 for r in own])) for name in names]
    whole = float(np.mean([r.response_s for r in own]))
    return (*parts, whole - sum(parts))
