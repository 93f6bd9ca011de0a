"""One campaign: every unit of a model, on every backend in turn, round after round.

A sample is stored as soon as it is taken, so a kill loses one at most. Storing disturbs the
caches, so each unit is led in by the stage before it, untimed: it starts from the same caches as
in a request.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgewise.backends.base import Context, Program, probe_input
from edgewise.clock import Clock, MonotonicClock
from edgewise.device import DeviceFingerprint, device_fingerprint, load_between, read_cpu_counters
from edgewise.errors import ConfigError
from edgewise.profiles import Campaign, Method, Profile, ProfileStore, UnitKey
from edgewise.profiling.effort import QUICK, THOROUGH, Effort, steadiness
from edgewise.profiling.find import device_record, provenance_of, thread_policy
from edgewise.profiling.state import noise_notes, state_after, state_before

if TYPE_CHECKING:
    from edgewise.model.staged import StagedModel

CONTROLLER = "controller"

_CHECK_EVERY = 5  # rounds; the steadiness of all units takes some milliseconds
_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a campaign is.

    Attributes:
        rounds: Rounds done, those of an earlier run of the same campaign included.
        max_rounds: Rounds after which it ends at the latest.
        resumed_rounds: How many of them an earlier run had begun.
        units: How many units there are.
        unsteady: How many of them have not settled; ``None`` before the first look.
        elapsed_s: Time since this run began.
        remaining_s: Time left at the most, by the rounds so far; ``None`` during the warm-up.
    """

    rounds: int
    max_rounds: int
    resumed_rounds: int
    units: int
    unsteady: int | None
    elapsed_s: float
    remaining_s: float | None

    @property
    def done_ratio(self) -> float:
        """Share of the time that has passed, 0 to 1."""
        if self.remaining_s is None:
            return 0.0
        whole_s = self.elapsed_s + self.remaining_s
        return self.elapsed_s / whole_s if whole_s > 0 else 1.0


@dataclass(frozen=True, slots=True)
class _Unit:
    key: UnitKey
    lead_in: Callable[[], object]
    run: Callable[[], object]


@dataclass(frozen=True, slots=True)
class _Turn:
    """All units of one backend at one batch size."""

    in_order: tuple[_Unit, ...]  # the controller and the single stages, as in a request
    others: tuple[_Unit, ...]  # fused segments and heads, in any order


@dataclass(slots=True)
class _Run:
    """What one run of a campaign knows."""

    clock: Clock
    effort: Effort
    time_cap_s: float
    turns: Sequence[_Turn]
    campaign: Campaign
    rng: np.random.Generator
    on_progress: Callable[[Progress], None]
    start_s: float
    first_round: int
    samples: dict[UnitKey, list[float]]
    unsteady: dict[UnitKey, str] | None = None
    rounds: int = field(init=False)
    measuring_since_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.rounds = self.first_round
        self.measuring_since_s = self.start_s

    def warm_up(self) -> None:
        for _ in range(self.effort.warmup_rounds):
            for unit in self._units_in_turn():
                _timed_s(unit, self.clock)
            self._tell(remaining_s=None)
        self.measuring_since_s = self.clock.now_s()

    def measure(self) -> str:
        """Take rounds until the rule says stop; return why it did."""
        while self.rounds < self.effort.max_rounds:
            for unit in self._units_in_turn():
                latency_s = _timed_s(unit, self.clock)
                self.campaign.add(unit.key, self.rounds, latency_s)
                self.samples[unit.key].append(latency_s)
            self.rounds += 1
            enough = self.rounds >= self.effort.min_rounds
            if enough and self.rounds % _CHECK_EVERY == 0:
                self.unsteady = _unsteady(self.samples, self.effort)
                if not self.unsteady:
                    return "steady"
            if enough and self.clock.now_s() - self.start_s >= self.time_cap_s:
                return "time"
            self._tell(remaining_s=self._remaining_s())
        return "rounds"

    def _units_in_turn(self) -> Iterator[_Unit]:
        for turn_index in self.rng.permutation(len(self.turns)):
            turn = self.turns[turn_index]
            yield from turn.in_order
            for unit_index in self.rng.permutation(len(turn.others)):
                yield turn.others[unit_index]

    def _remaining_s(self) -> float:
        now_s = self.clock.now_s()
        round_s = (now_s - self.measuring_since_s) / max(1, self.rounds - self.first_round)
        at_least_s = max(0, self.effort.min_rounds - self.rounds) * round_s
        until_cap_s = max(0.0, self.time_cap_s - (now_s - self.start_s))
        at_most_s = (self.effort.max_rounds - self.rounds) * round_s
        return min(at_most_s, max(at_least_s, until_cap_s))

    def _tell(self, *, remaining_s: float | None) -> None:
        self.on_progress(
            Progress(
                rounds=self.rounds,
                max_rounds=self.effort.max_rounds,
                resumed_rounds=self.first_round,
                units=len(self.samples),
                unsteady=None if self.unsteady is None else len(self.unsteady),
                elapsed_s=self.clock.now_s() - self.start_s,
                remaining_s=remaining_s,
            )
        )


def measure(  # noqa: PLR0913 - each is one knob of a campaign
    programs: Mapping[str, Program],
    store: ProfileStore,
    *,
    rounds: int | None = None,
    quick: bool = False,
    time_cap_s: float | None = None,
    batches: Sequence[int] = (1,),
    clock: Clock | None = None,
    rng: np.random.Generator | None = None,
    device: DeviceFingerprint | None = None,
    root: Path = Path("/"),
    on_progress: Callable[[Progress], None] | None = None,
) -> Profile:
    """Measure what a model's units cost, and keep every sample.

    Units are ``"segment:i-j"`` for each compiled run of stages, ``"head:k"`` for each exit, and
    ``"controller"``: what a request pays beyond them, an empty pass that copies the input in and
    reads the clock once per stage. Where an unfinished campaign of the same model, device, thread
    policy and method is in the store, it goes on from there.

    Args:
        programs: By backend name, all of one model with one number of threads.
        store: Each sample is committed to it before the next is taken.
        rounds: How many at most; by default 300, or 60 when quick.
        quick: A few seconds for each backend, and wider intervals.
        time_cap_s: Time for each pair of backend and batch size, seconds; by default 30 s, or
            3.5 s when quick; none where ``rounds`` is given and not quick.
        batches: Batch sizes to measure.
        clock: Times the calls; the machine's by default.
        rng: Orders the backends, fused segments and heads within each round.
        device: The machine; this one by default.
        root: Where the file tree of the machine starts.
        on_progress: Called after each round.

    Returns:
        The finished profile, with one cost per unit, backend and batch size.

    Raises:
        ConfigError: No program, two models, two thread counts, or a number below one.
        ProfileError: The store cannot be written; what was measured before stays in it.
        BackendError: A runtime failed; what was measured before stays.
        KeyboardInterrupt: With what is kept as its message.
    """
    clock = clock or MonotonicClock()
    if quick and time_cap_s is None:
        time_cap_s = QUICK.time_cap_s
    effort = (QUICK if quick else THOROUGH).limited(rounds=rounds, time_cap_s=time_cap_s)
    model, threads = _check_programs(programs)
    batches = _check_batches(batches)
    device = device or device_fingerprint(root)
    provenances = {provenance_of(p.backend) for p in programs.values()}
    if len(provenances) > 1:
        raise ConfigError("simulated and measured costs cannot share a profile")
    identity: dict[str, Any] = {
        "model_id": model.name,
        "model_version": model.version(),
        "device_id": device.id,
        "device": device_record(device),
        "thread_policy": thread_policy(threads),
        "method": _method(effort, clock, list(programs), batches),
        "provenance": provenances.pop(),
    }
    start_s = clock.now_s()
    before = state_before(root, clock)
    with contextlib.ExitStack() as stack:
        turns = [
            _turn(name, program, stack.enter_context(program.context(batch)), clock)
            for name, program in programs.items()
            for batch in batches
        ]
        campaign = stack.enter_context(store.begin(**identity, state=before))
        samples = {
            unit.key: campaign.samples_s(unit.key).tolist()
            for turn in turns
            for unit in (*turn.in_order, *turn.others)
        }
        run = _Run(
            clock=clock,
            effort=effort,
            time_cap_s=effort.time_cap_s * len(turns),
            turns=turns,
            campaign=campaign,
            rng=rng or np.random.default_rng(0),
            on_progress=on_progress or (lambda _: None),
            start_s=start_s,
            first_round=campaign.next_round(),
            samples=samples,
        )
        counters, since_s = read_cpu_counters(root), clock.now_s()
        try:
            run.warm_up()
            stopped_by = run.measure()
        except KeyboardInterrupt as stop:
            kept = sum(map(len, samples.values()))
            raise KeyboardInterrupt(
                f"was stopped; the {kept} samples taken so far are kept, and the same command"
                " goes on from there"
            ) from stop
        during = load_between(counters, read_cpu_counters(root), window_s=clock.now_s() - since_s)
        unsteady = _unsteady(samples, effort)
        after = state_after(
            root,
            during,
            notes=[*noise_notes(before, during), *_unsteady_notes(unsteady, len(samples))],
            stopped_by=stopped_by,
            rounds=run.rounds,
            elapsed_s=clock.now_s() - start_s,
            unsteady={str(key): reason for key, reason in unsteady.items()},
        )
        # To begin it once more is how a campaign takes down a later state.
        with store.begin(**identity, state=after) as same:
            return (same if same.campaign_id == campaign.campaign_id else campaign).finish()


def _check_programs(programs: Mapping[str, Program]) -> tuple[StagedModel, int]:
    if not programs:
        raise ConfigError("expected at least one backend to measure on, found none")
    first = next(iter(programs.values()))
    for name, program in programs.items():
        if program.threads != first.threads:
            raise ConfigError(
                f"programs of one profile use one number of threads; {name!r} uses"
                f" {program.threads}, another {first.threads}"
            )
        if program.model is not first.model and (
            (program.model.name, program.model.version())
            != (first.model.name, first.model.version())
        ):
            raise ConfigError(
                f"programs of one profile run one model; {name!r} runs {program.model.name!r}"
                f" version {program.model.version()}, another {first.model.name!r} version"
                f" {first.model.version()}"
            )
    return first.model, first.threads


def _check_batches(batches: Sequence[int]) -> tuple[int, ...]:
    if not batches or min(batches) < 1:
        raise ConfigError(f"expected batch sizes of at least one, found {list(batches)}")
    return tuple(sorted(set(batches)))


def _method(
    effort: Effort, clock: Clock, backends: Sequence[str], batches: Sequence[int]
) -> Method:
    name = "perf_counter" if isinstance(clock, MonotonicClock) else type(clock).__name__
    # The set of units is part of the rule: a campaign over other backends is another one.
    units = f"units on {', '.join(sorted(backends))} at batch {', '.join(map(str, batches))}"
    return Method(
        warmup_rounds=effort.warmup_rounds,
        clock=f"{name}, garbage collection off in timed regions",
        synchronised=True,
        interleaved=True,
        stop_rule=f"{effort.in_words()}; {units}",
    )


def _turn(backend: str, program: Program, context: Context, clock: Clock) -> _Turn:
    model = program.model
    num_stages = len(model.stages)
    values = probe_input(model, batch=context.batch)
    key = functools.partial(UnitKey, backend=backend, batch=context.batch)

    def lead_in(position: int) -> Callable[[], object]:
        if position == 0:
            return functools.partial(context.set_boundary, 0, values)
        return functools.partial(context.run_segment, position - 1, position)

    def segment(start: int, stop: int) -> _Unit:
        return _Unit(
            key(name=f"segment:{start}-{stop}", kind="segment"),
            lead_in(start),
            functools.partial(context.run_segment, start, stop),
        )

    controller = _Unit(
        key(name=CONTROLLER, kind="controller"),
        _nothing,
        functools.partial(_empty_pass, context, values, num_stages, clock.now_s),
    )
    heads = [
        _Unit(
            key(name=f"head:{k}", kind="head"),
            lead_in(k + 1),
            functools.partial(context.run_head, k),
        )
        for k in range(model.num_exits)
    ]
    fused = [segment(i, j) for i, j in sorted(program.segments) if j - i > 1]
    singles = [segment(k, k + 1) for k in range(num_stages)]
    return _Turn((controller, *singles), (*fused, *heads))


def _nothing() -> None:
    pass


def _empty_pass(
    context: Context,
    values: npt.NDArray[np.float32],
    num_stages: int,
    now_s: Callable[[], float],
) -> None:
    """What a request does besides its units."""
    context.set_boundary(0, values)
    for _ in range(num_stages):
        now_s()


def _timed_s(unit: _Unit, clock: Clock) -> float:
    """One sample, seconds. A call returns when its result is readable: nothing to wait for."""
    now_s, run = clock.now_s, unit.run
    collecting = gc.isenabled()
    gc.disable()
    try:
        unit.lead_in()
        start_s = now_s()
        run()
        return max(0.0, now_s() - start_s)
    finally:
        if collecting:
            gc.enable()


def _unsteady(samples: Mapping[UnitKey, list[float]], effort: Effort) -> dict[UnitKey, str]:
    found = steadiness(samples, effort)
    return {key: each.reason for key, each in found.items() if not each.steady}


def _unsteady_notes(unsteady: Mapping[UnitKey, str], count: int) -> list[str]:
    if not unsteady:
        return []
    named = [f"{key.name} on {key.backend}" for key in list(unsteady)[:_NAMED]]
    more = "" if len(unsteady) <= _NAMED else f" and {len(unsteady) - _NAMED} more"
    return [f"{len(unsteady)} of {count} units did not settle: {', '.join(named)}{more}"]
