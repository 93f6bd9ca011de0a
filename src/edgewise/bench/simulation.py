"""Plays the same requests to each policy on a simulated device, each in a world of its own.

Policies, sessions and the executor are the real ones; only the device is simulated: a unit takes
what the device's model says it takes at that instant, and the clock moves by it. Every world is
made alike, so all policies meet the same clocks, the same noise of each unit of each request, the
same arrivals and the same answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from edgewise.backends.null import NullProgram
from edgewise.clock import Clock
from edgewise.device.state import DeviceState
from edgewise.errors import ConfigError, ShapeError
from edgewise.exits import Policy
from edgewise.frontends.outline import outline_model
from edgewise.model import StagedModel, Validation
from edgewise.predict import CostTable
from edgewise.report.evaluation import Estimate
from edgewise.runtime import Session

if TYPE_CHECKING:
    from edgewise.runtime import Answer

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MONITOR_PERIOD_S = 0.010
_T_95 = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


class TickingClock(Clock, Protocol):
    """A clock that calls back while it moves."""

    def every(self, period_s: float, callback: Callable[[float], object]) -> object:
        """Call back with the present instant each time so many seconds have passed."""
        ...


class Device(Protocol):
    """What a simulated device answers; units are ``"stage:0"`` to ``"head:7"``."""

    def cost_s(self, unit: str, start_s: float, *, request: int) -> float:
        """What a unit of a request takes if it starts at an instant, seconds."""
        ...

    def energy_j(self, unit: str, start_s: float, duration_s: float) -> float:
        """What the whole device uses while a unit runs, joules."""
        ...

    def state(self, at_s: float) -> DeviceState:
        """What a monitor would read at an instant."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scene:
    """What all policies meet alike.

    Attributes:
        open_world: Makes a clock at zero and a device, each time alike.
        model: Its shape and its validation logits; a unit is one stage or one head.
        costs: What a profile at the highest clocks says.
        answers: [E, N, C], what exit e answers to image n; replayed.
        labels: [N], of those images.
        arrivals_s: [R], ascending, seconds.
        images: [R], which image each request asks about.
        budget_s: From arrival, seconds.
        monitor_phase_s: When the first state is read: clocks change at instants of their own.
        state_age_s: How old a state is already when the monitor gets it: some sensors are read by
            another program, or say what was a moment ago.
    """

    open_world: Callable[[], tuple[TickingClock, Device]]
    model: StagedModel
    costs: CostTable
    answers: Float32 = field(repr=False)
    labels: Ints = field(repr=False)
    arrivals_s: Float64 = field(repr=False)
    images: Ints = field(repr=False)
    budget_s: float
    monitor_phase_s: float = 0.0
    state_age_s: float = 0.0

    @property
    def num_requests(self) -> int:
        """How many requests."""
        return len(self.arrivals_s)

    @property
    def depth_ratios(self) -> Float64:
        """[E]."""
        return np.array([e.depth_ratio for e in self.model.exits])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Played:
    """What happened to each request, in order.

    Attributes:
        policy: Who decided.
        exit_index: [R], which exit answered; -1 where the request was refused.
        latency_s: [R], from arrival to answer.
        met: [R], whether it came in time.
        right: [R], whether the replayed answer is right.
        energy_j: [R], of the units that ran.
    """

    policy: str
    exit_index: Ints
    latency_s: Float64
    met: npt.NDArray[np.bool_]
    right: npt.NDArray[np.bool_]
    energy_j: Float64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hindsight:
    """What each request could have had, every choice known to the end.

    Attributes:
        exit_index: [R], the deepest exit in time; -1 where not even the soonest is.
        latency_s: [R, E], arrival to answer, stages one by one and that head alone.
        energy_j: [R], up to that exit.
    """

    exit_index: Ints
    latency_s: Float64
    energy_j: Float64

    @property
    def feasible(self) -> npt.NDArray[np.bool_]:
        """[R], whether some exit was in time."""
        return self.exit_index >= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One policy in one scene; shares and means are over requests with a feasible exit.

    Attributes:
        policy: Who decided.
        requests: How many were played, infeasible ones included.
        feasible_ratio: Share that some exit could have answered in time.
        dsr: Share answered in time.
        dsr_all: The same over all requests, infeasible ones included.
        mean_depth_ratio: Mean depth at which they were answered, late ones included.
        depth_of_oracle: That mean over the oracle's, on the same requests.
        accuracy: Share of right answers, late ones included.
        right_in_time: Share of right answers in time.
        premature_ratio: Share answered in time above the deepest exit that would have been, too.
        mean_s: Mean latency, seconds.
        p99_s: Its 99th percentile.
        energy_j: Mean joules that the whole device uses for a request.
    """

    policy: str
    requests: int
    feasible_ratio: float
    dsr: float
    dsr_all: float
    mean_depth_ratio: float
    depth_of_oracle: float
    accuracy: float
    right_in_time: float
    premature_ratio: float
    mean_s: float
    p99_s: float
    energy_j: float


def play(
    scene: Scene,
    policy: Policy,
    *,
    on_state: Callable[[DeviceState], None] | None = None,
    on_unit: Callable[[str], None] = lambda _: None,
    on_answer: Callable[[Answer], None] = lambda _: None,
) -> Played:
    """Let a policy answer all requests of a scene.

    Requests are answered one at a time in the order they arrive; one that arrives while another
    runs waits, and the wait counts.

    Args:
        scene: What it meets.
        policy: Made for this scene; it learns as it goes.
        on_state: Told the device's state every `MONITOR_PERIOD_S`, such as ``Repricer.on_state``;
            ``None`` for a policy that does not look at it.
        on_unit: Told the device's name of each unit that begins.
        on_answer: Told each answer, in order.

    Returns:
        One entry for each request.
    """
    clock, device = scene.open_world()
    request = 0
    used_j = 0.0

    def cost_s(unit: str) -> float:
        nonlocal used_j
        name, now_s = device_unit(unit), clock.now_s()
        on_unit(name)
        spent_s = device.cost_s(name, now_s, request=request)
        used_j += device.energy_j(name, now_s, spent_s)
        return spent_s

    def logits(exit_index: int, _: Float32) -> Float32:
        row: Float32 = scene.answers[exit_index, scene.images[request]]
        return row[None]

    singles = [(k, k + 1) for k in range(scene.model.num_exits)]
    program = NullProgram(scene.model, segments=singles, clock=clock, cost_s=cost_s, logits=logits)
    session = Session(program, scene.costs, policy=policy, clock=clock)
    if on_state is not None:
        tell, age_s = on_state, scene.state_age_s
        tell(device.state(-age_s))
        clock.sleep_s(scene.monitor_phase_s)
        clock.every(MONITOR_PERIOD_S, lambda at_s: tell(device.state(at_s - age_s)))
    num = scene.num_requests
    exits = np.full(num, -1)
    latency_s, energy_j = np.full(num, np.nan), np.zeros(num)
    met, right = np.zeros(num, dtype=bool), np.zeros(num, dtype=bool)
    nothing = np.zeros(scene.model.input.shape, dtype=np.float32)
    for request in range(num):
        arrival_s = float(scene.arrivals_s[request])
        clock.sleep_s(arrival_s - clock.now_s())
        used_j = 0.0
        answer = session.run(
            nothing, budget_s=scene.budget_s, arrival_s=min(arrival_s, clock.now_s())
        )
        program.ran.clear()
        if answer.exit_index is not None:
            exits[request] = answer.exit_index
        met[request], latency_s[request] = answer.met, answer.observed_s
        right[request] = answer.label == scene.labels[scene.images[request]]
        energy_j[request] = used_j
        on_answer(answer)
    return Played(
        policy=policy.name,
        exit_index=exits,
        latency_s=latency_s,
        met=met,
        right=right,
        energy_j=energy_j,
    )


def look_back(scene: Scene) -> Hindsight:
    """Find the deepest exit that each request could have had in time.

    The request runs alone, goes past all heads but the one that answers, and knows how long each
    unit will take.
    """
    _, device = scene.open_world()
    num_exits = scene.model.num_exits
    latency_s = np.empty((scene.num_requests, num_exits))
    energy_j = np.empty((scene.num_requests, num_exits))
    for request, arrival_s in enumerate(scene.arrivals_s.tolist()):
        now_s, used_j = arrival_s, 0.0
        for k in range(num_exits):
            stage_s = device.cost_s(f"stage:{k}", now_s, request=request)
            used_j += device.energy_j(f"stage:{k}", now_s, stage_s)
            now_s += stage_s
            head_s = device.cost_s(f"head:{k}", now_s, request=request)
            latency_s[request, k] = now_s + head_s - arrival_s
            energy_j[request, k] = used_j + device.energy_j(f"head:{k}", now_s, head_s)
    in_time = latency_s <= scene.budget_s
    deepest = num_exits - 1 - in_time[:, ::-1].argmax(axis=1)
    exits = np.where(in_time.any(axis=1), deepest, -1)
    return Hindsight(
        exit_index=exits,
        latency_s=latency_s,
        energy_j=energy_j[np.arange(scene.num_requests), exits],
    )


def summarise(scene: Scene, played: Played, hindsight: Hindsight) -> Row:
    """Sum a policy's requests up.

    Raises:
        ConfigError: No request had a feasible exit: there is nothing to judge.
    """
    counted = hindsight.feasible
    if not counted.any():
        raise ConfigError(
            f"no exit of {scene.model.name!r} is ever in time at {scene.budget_s:.4g} s",
            help="choose a longer deadline",
        )
    depth = np.where(played.exit_index >= 0, scene.depth_ratios[played.exit_index], 0.0)
    best = scene.depth_ratios[hindsight.exit_index][counted].mean()
    early = played.met & (played.exit_index < hindsight.exit_index)
    return Row(
        policy=played.policy,
        requests=scene.num_requests,
        feasible_ratio=float(counted.mean()),
        dsr=float(played.met[counted].mean()),
        dsr_all=float(played.met.mean()),
        mean_depth_ratio=float(depth[counted].mean()),
        depth_of_oracle=float(depth[counted].mean() / best),
        accuracy=float(played.right[counted].mean()),
        right_in_time=float((played.right & played.met)[counted].mean()),
        premature_ratio=float(early[counted].mean()),
        mean_s=float(played.latency_s[counted].mean()),
        p99_s=float(np.quantile(played.latency_s[counted], 0.99)),
        energy_j=float(played.energy_j[counted].mean()),
    )


def play_oracle(scene: Scene, hindsight: Hindsight) -> Played:
    """What hindsight's choices would have given; an infeasible request gets the soonest exit."""
    every = np.arange(scene.num_requests)
    exits = np.where(hindsight.feasible, hindsight.exit_index, hindsight.latency_s.argmin(axis=1))
    answers = scene.answers.argmax(axis=2)[exits, scene.images]
    return Played(
        policy="oracle",
        exit_index=exits,
        latency_s=hindsight.latency_s[every, exits],
        met=hindsight.feasible,
        right=answers == scene.labels[scene.images],
        energy_j=hindsight.energy_j,
    )


def arrivals(
    count: int, *, spacing_s: float, rng: np.random.Generator, start_s: float = 0.0
) -> Float64:
    """Instants at which requests arrive: a mean spacing, each moved by up to a quarter of it.

    Args:
        count: R.
        spacing_s: Between two on average, seconds. Where three quarters of it are longer than any
            request takes, none waits for another.
        rng: Draws the moves.
        start_s: When the first is due.
    """
    moves = rng.uniform(-0.25, 0.25, count)
    # From half a spacing on, so that the first does not move before the start.
    return np.asarray(start_s + spacing_s * (0.5 + np.arange(count) + moves))


def replayed_model(
    recorded: Validation,
    *,
    depths: Sequence[float],
    temperatures: Sequence[float],
    flops: Sequence[float],
    name: str,
) -> tuple[StagedModel, Float32, Ints]:
    """A chain of stages whose exits answer what the nearest exit of another net answered.

    Half of the recorded samples are told to policies, which choose their thresholds on them; the
    other half is replayed. Exits are not said to be accurate, so deeper counts as better.

    Args:
        recorded: Logits of the other net.
        depths: [E'], depth ratios of the other net's exits.
        temperatures: [E'], of its heads; the logits are divided by them.
        flops: [S], of the chain's stages: its own depth ratios follow.
        name: For people.

    Returns:
        The chain; logits [S, N, C] and labels [N] to replay.

    Raises:
        ShapeError: The other net's exits and logits do not fit each other.
    """
    if not len(recorded.logits) == len(depths) == len(temperatures):
        raise ShapeError(
            f"expected as many depths and temperatures as exits, {len(recorded.logits)}, found"
            f" {len(depths)} and {len(temperatures)}"
        )
    num_classes = recorded.logits.shape[2]
    chain = outline_model(len(flops), num_classes=num_classes, flops=flops, name=name)
    own = np.array([e.depth_ratio for e in chain.exits])
    nearest = np.abs(own[:, None] - np.asarray(depths)).argmin(axis=1)  # [S]
    warmth = np.asarray(temperatures)[nearest][:, None, None]
    logits = (recorded.logits[nearest] / warmth).astype(np.float32)  # [S, N, C]
    told = Validation(
        logits=logits[:, ::2], labels=recorded.labels[::2], source=f"{recorded.source}, even half"
    )
    return replace(chain, validation=told), logits[:, 1::2], recorded.labels[1::2].astype(np.int64)


def static_costs(samples: Float64, *, names: Sequence[str]) -> CostTable:
    """The table that a profile at one state gives.

    Args:
        samples: [R, U], seconds, simulated.
        names: [U], ``"stage:0"``, …, ``"head:0"``, …; stages first.
    """
    num = sum(name.startswith("stage:") for name in names)
    if len(names) != 2 * num or samples.shape[1] != 2 * num:
        raise ShapeError(
            f"expected as many heads as stages, found units {', '.join(names)} and samples of"
            f" {samples.shape[1]}"
        )
    medians = np.median(samples, axis=0)
    order = np.arange(2 * num).reshape(2, num).T.ravel()  # stage 0, head 0, stage 1, …
    return CostTable(
        backend="null",
        stage_s=medians[:num],
        head_s=medians[num:],
        segment_s={(k, k + 1): float(s) for k, s in enumerate(medians[:num])},
        samples=samples[:, order],
        medians=medians[order],
        provenance="simulated",
    )


def over_seeds(values: Sequence[float]) -> Estimate:
    """Mean over seeds with its 95 % interval by Student's t; no width from one seed alone.

    Example:
        >>> over_seeds([1.0, 3.0]).value
        2.0
    """
    array = np.asarray(values, dtype=float)
    mean = float(array.mean())
    if array.size < 2:
        return Estimate(value=mean, low=mean, high=mean)
    half = _T_95.get(array.size - 1, 2.0) * float(array.std(ddof=1)) / float(np.sqrt(array.size))
    return Estimate(value=mean, low=mean - half, high=mean + half)


def device_unit(unit: str) -> str:
    """What a device calls a unit of a session.

    Example:
        >>> device_unit("segment:3-4"), device_unit("head:2")
        ('stage:3', 'head:2')
    """
    kind, _, place = unit.partition(":")
    return f"stage:{place.partition('-')[0]}" if kind == "segment" else unit
