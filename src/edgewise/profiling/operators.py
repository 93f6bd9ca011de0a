"""One campaign over operators: every shape on every backend, then the switches between backends.

Within a shape the backends take turns in random order, round after round, so that whatever else the
machine does falls on all alike, and all get equally many rounds. A sample is one call, or for short
operators the mean of several calls in a row: then percentiles are of such means.

Weights come from memory as they do in a model, where each layer has its own: an operator is loaded
in several copies that take turns, so many that together they do not fit the processor's cache. A
loop over one copy would measure how fast a cache is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib.metadata
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgewise.backends.operators import (
    OperatorProgram,
    Weights,
    load_operator,
    random_inputs,
    random_weights,
)
from edgewise.backends.operators.weights import subnormal_share
from edgewise.clock import Clock, MonotonicClock
from edgewise.device import (
    DeviceFingerprint,
    device_fingerprint,
    load_between,
    read_cpu_counters,
    read_memory,
)
from edgewise.device.files import read_text
from edgewise.errors import BackendError, ConfigError, EdgeError
from edgewise.profiles.operators import (
    Correctness,
    Energy,
    LatencySummary,
    OperatorCost,
    OperatorShape,
    OperatorTable,
    table_of,
)
from edgewise.profiles.records import ThreadPolicy
from edgewise.profiles.statistics import quantile_interval
from edgewise.profiling.collection import no_collection
from edgewise.profiling.find import device_record, thread_policy
from edgewise.profiling.operator_energy import FindMeter, find_energy_meter, measure_energy
from edgewise.profiling.operator_journal import Journal, refuse_mixing
from edgewise.profiling.state import noise_notes, state_before
from edgewise.profiling.switches import (
    SWITCH_SHAPES,
    SwitchSamples,
    fit_switches,
    sample_switches,
    with_energy,
)
from edgewise.units import format_bytes

if TYPE_CHECKING:
    import torch

Float64 = npt.NDArray[np.float64]
Load = Callable[..., OperatorProgram]

HOME = "torch:cpu"  # the reference, and where the operators that are not dispatched run

_log = logging.getLogger(__name__)

_RTOL = 1e-4
_ATOL = {"linear": 1e-3, "activation": 1e-5, "rmsnorm": 1e-5, "layernorm": 1e-5}
_SEGMENT_ATOL = 1e-3  # of the reference's root mean square
_CORRECTNESS = (
    f"against torch on the CPU, rtol {_RTOL:g}; atol {_ATOL['rmsnorm']:g} for norms and"
    f" activations, {_ATOL['linear']:g} for linears, {_SEGMENT_ATOL:g} of the reference's root mean"
    " square for segments"
)
_MOST_COPIES = 32
_SMALL_WEIGHTS_BYTES = 64 * 1024  # below it, where weights come from costs nothing worth a copy
_LARGE_BYTES = 64 * 2**20
_UNKNOWN_CACHE_BYTES = 32 * 2**20
_COPIES_BEYOND_CACHE = 2
_RUNTIME_COPIES = 3  # of the weights: in a model's file, as read, and as the runtime packs them
# A shorter operator is led in by a call on the same backend, untimed: what coming from another
# backend costs is measured as a switch, and would be counted twice.
_LEAD_IN_BELOW_S = 2e-3
_PACKAGES = {"torch": "torch", "onnxruntime": "onnxruntime", "openvino": "openvino"}
# For the time left alone: how fast a core computes and reads, and what loading takes.
_FLOPS_PER_S, _BYTES_PER_S, _CALL_S, _LOAD_S = 5e10, 1.5e10, 2e-5, 0.05
_LOAD_BYTES_PER_S = 2e8


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorEffort:
    """How long each shape is sampled.

    Attributes:
        warmups: Calls of each copy on each backend that are thrown away.
        samples: Of each backend at most.
        min_samples: Of each backend whatever the time.
        time_cap_s: Time for each pair of shape and backend, seconds, warm-up left out.
        sample_s: A sample takes at least so long: shorter operators are called several times.
        switch_rounds: Rounds over all pairs of backends at each size.
        energy_pairs: Windows of idling and of work for each energy.
    """

    warmups: int = 3
    samples: int = 500
    min_samples: int = 10
    time_cap_s: float = 0.6
    sample_s: float = 5e-5
    switch_rounds: int = 300
    energy_pairs: int = 8

    def __post_init__(self) -> None:
        if not 1 <= self.min_samples <= self.samples or self.warmups < 0:
            raise ConfigError(
                f"expected at least one sample and no fewer than 0 warm-ups, found {self}"
            )
        if not (self.time_cap_s > 0 and self.sample_s >= 0):
            raise ConfigError(f"expected times above zero, found {self}")

    def in_words(self) -> str:
        """The rule as a table's notes state it."""
        return (
            f"{self.warmups} warm-ups, {self.samples} samples, fewer after {self.time_cap_s:g} s"
            f" but at least {self.min_samples}; a sample is one call, or as many in a row as take"
            f" {self.sample_s * 1e6:g} µs; backends take turns in random order, garbage collection"
            " off"
        )


FULL = OperatorEffort()
QUICK_OPERATORS = OperatorEffort(
    warmups=1, samples=60, min_samples=6, time_cap_s=0.1, switch_rounds=60, energy_pairs=4
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorProgress:
    """How far a campaign is.

    Attributes:
        what: What is measured now.
        done: Shapes done, those of an earlier run included.
        total: How many there are.
        remaining_s: Time left, about, by the work of the shapes and the time so far; ``None``
            before the first.
    """

    what: str
    done: int
    total: int
    remaining_s: float | None


@dataclass(slots=True)
class _Entry:
    """One shape on one backend, loaded."""

    backend: str
    programs: Sequence[OperatorProgram]  # copies that take turns
    check: Correctness
    position: int = 0
    calls: int = 1
    lead_in: bool = False
    samples_s: list[float] = field(default_factory=list)

    def next_calls(self, count: int) -> list[OperatorProgram]:
        """The copies whose turn it is."""
        size = len(self.programs)
        found = [self.programs[(self.position + i) % size] for i in range(count)]
        self.position = (self.position + count) % size
        return found


@dataclass(slots=True)
class _Run:
    """What one run of a campaign knows."""

    backends: tuple[str, ...]
    policy: ThreadPolicy
    effort: OperatorEffort
    journal: Journal
    find_meter: FindMeter
    load: Load
    make_weights: Callable[[OperatorShape, np.random.Generator], Weights]
    make_inputs: Callable[[OperatorShape, np.random.Generator], tuple[torch.Tensor, ...]]
    cache_bytes: float
    memory_bytes: float
    clock: Clock
    rng: np.random.Generator
    notes: dict[str, str]
    # Of the weights used last: a shape with other rows only often follows.
    weights_of: OperatorShape | None = None
    copies: list[Weights] = field(default_factory=list)
    loaded: dict[str, list[OperatorProgram]] = field(default_factory=dict)

    def missing(self, shape: OperatorShape) -> list[str]:
        """Backends on which a shape is to be measured still; what failed before is tried again."""
        where = (HOME,) if shape.is_fixed else self.backends
        rows = {each: self.journal.costs.get((shape, each)) for each in where}
        return [each for each, row in rows.items() if row is None or not row.usable]

    def measure(self, shape: OperatorShape, missing: Sequence[str]) -> None:
        """Measure one shape, and keep its rows, those that failed with the reason."""
        needed = shape.weight_bytes * (1 + _RUNTIME_COPIES * len(missing))
        try:
            if needed > self.memory_bytes:
                raise BackendError(
                    f"it needs about {format_bytes(needed)} of memory,"
                    f" {format_bytes(self.memory_bytes)} are there"
                )
            self._prepare_weights(shape)
            inputs = self.make_inputs(shape, self.rng)
            reference = _flat(self._programs(shape, HOME, copies=1)[0](*inputs))
        except EdgeError as error:
            for backend in missing:
                self.journal.add_cost(self._row(shape, backend, reason=error.message))
            return
        entries = [
            entry
            for backend in missing
            if (entry := self._ready(shape, backend, inputs, reference)) is not None
        ]
        for entry in self._sample_or_refuse(shape, entries, inputs):
            latency = summarise(entry.samples_s, calls_per_sample=entry.calls)
            energy = self._energy(entry, inputs, latency.median_s)
            self.journal.add_cost(
                self._row(shape, entry.backend, check=entry.check, latency=latency, energy=energy)
            )

    def _ready(
        self,
        shape: OperatorShape,
        backend: str,
        inputs: Sequence[torch.Tensor],
        reference: Sequence[torch.Tensor],
    ) -> _Entry | None:
        """Load, check and warm up; ``None`` where one of these failed, which is kept as a row."""
        check: Correctness | None = None
        try:
            programs = self._programs(shape, backend, copies=len(self.copies))
            check = compare(shape, _flat(programs[0](*inputs)), reference)
            if not check.passed:
                raise BackendError(_wrong_in_words(check))
            for program in programs * self.effort.warmups:
                program(*inputs)
        except EdgeError as error:
            self.journal.add_cost(self._row(shape, backend, check=check, reason=error.message))
            return None
        return _Entry(backend, programs, check)

    def forget(self) -> None:
        """Let go of all programs."""
        self.weights_of, self.copies, self.loaded = None, [], {}

    def _row(  # noqa: PLR0913
        self,
        shape: OperatorShape,
        backend: str,
        *,
        check: Correctness | None = None,
        latency: LatencySummary | None = None,
        energy: Energy | None = None,
        reason: str = "",
    ) -> OperatorCost:
        return OperatorCost(
            shape=shape,
            backend=backend,
            latency=latency,
            correctness=check,
            energy=energy or Energy(note="no latency, so no energy"),
            thread_policy=self.policy,
            reason=reason,
        )

    def _prepare_weights(self, shape: OperatorShape) -> None:
        key = dataclasses.replace(shape, m=1)
        if key == self.weights_of:
            return
        large = self.weights_of is not None and self.weights_of.weight_bytes > _LARGE_BYTES
        self.forget()
        if large:
            gc.collect()  # sessions of runtimes may hold gigabytes in circles of references
        first = self.make_weights(shape, self.rng)
        share = subnormal_share(first)
        if share > 0:
            text = f"{share:.2%} of the weights of {shape.key} are subnormal: many times slower"
            _log.warning(text)
            self.notes["subnormal"] = text
        count = copies_beyond_cache(
            shape.weight_bytes, backends=len(self.backends), cache_bytes=self.cache_bytes
        )
        clones = [
            Weights(tensors={k: t.clone() for k, t in first.tensors.items()}, eps=first.eps)
            for _ in range(count - 1)
        ]
        self.weights_of, self.copies = key, [first, *clones]

    def _programs(
        self, shape: OperatorShape, backend: str, *, copies: int
    ) -> list[OperatorProgram]:
        """Programs of a shape, those of its neighbour where they take any number of rows."""
        found = self.loaded.setdefault(backend, [])
        if found and not found[0].any_rows and found[0].shape != shape:
            found.clear()
        while len(found) < copies:
            weights = self.copies[len(found)]
            found.append(self.load(shape, weights, backend, threads=self.policy.threads))
        return found

    def _sample(self, entries: Sequence[_Entry], inputs: Sequence[torch.Tensor]) -> None:
        """Rounds over all backends until they have enough samples or the time is over."""
        if not entries:
            return
        effort, now_s = self.effort, self.clock.now_s
        with no_collection():
            for entry in entries:
                call_s = self._timed_s(entry, inputs, calls=len(entry.programs))
                entry.calls = max(1, math.ceil(effort.sample_s / max(call_s, 1e-7)))
                entry.lead_in = call_s < _LEAD_IN_BELOW_S and len(entries) > 1
                entry.samples_s = []
            end_s = now_s() + effort.time_cap_s * len(entries)
            for number in range(effort.samples):
                if number >= effort.min_samples and now_s() >= end_s:
                    break
                for index in self.rng.permutation(len(entries)):
                    entry = entries[index]
                    sample_s = self._timed_s(entry, inputs, calls=entry.calls)
                    entry.samples_s.append(sample_s)

    def _timed_s(self, entry: _Entry, inputs: Sequence[torch.Tensor], *, calls: int) -> float:
        """Mean time of so many calls in a row."""
        if entry.lead_in:
            entry.next_calls(1)[0](*inputs)
        programs = entry.next_calls(calls)
        now_s = self.clock.now_s
        start_s = now_s()
        for program in programs:
            program(*inputs)
        return max(0.0, now_s() - start_s) / calls

    def _sample_or_refuse(
        self, shape: OperatorShape, entries: Sequence[_Entry], inputs: Sequence[torch.Tensor]
    ) -> Sequence[_Entry]:
        """Sample all; where one fails, each alone, to find out which."""
        try:
            self._sample(entries, inputs)
        except EdgeError as error:
            if len(entries) == 1:
                why = error.message
                self.journal.add_cost(self._row(shape, entries[0].backend, reason=why))
                return []
            return [e for each in entries for e in self._sample_or_refuse(shape, [each], inputs)]
        return entries

    def _energy(self, entry: _Entry, inputs: Sequence[torch.Tensor], call_s: float) -> Energy:
        meter, why = self.find_meter(entry.backend)
        if meter is None:
            return Energy(note=why)
        turns = itertools.cycle(entry.programs)
        return measure_energy(
            lambda: next(turns)(*inputs),
            meter=meter,
            call_s=call_s,
            pairs=self.effort.energy_pairs,
            clock=self.clock,
            rng=self.rng,
        )


def measure_operators(  # noqa: PLR0913 - each is one knob of a campaign
    shapes: Iterable[OperatorShape],
    *,
    backends: Sequence[str],
    threads: int = 1,
    effort: OperatorEffort = FULL,
    name: str = "measured",
    state: str = "calm",
    journal: Path | None = None,
    known: OperatorTable | None = None,
    switches: bool = True,
    warm_weights: bool = False,
    policy: ThreadPolicy | None = None,
    device: DeviceFingerprint | None = None,
    find_meter: FindMeter | None = None,
    load: Load = load_operator,
    make_weights: Callable[[OperatorShape, np.random.Generator], Weights] = random_weights,
    make_inputs: Callable[..., tuple[torch.Tensor, ...]] = random_inputs,
    clock: Clock | None = None,
    rng: np.random.Generator | None = None,
    root: Path = Path("/"),
    on_progress: Callable[[OperatorProgress], None] | None = None,
) -> OperatorTable:
    """Measure what operators cost, and what going between backends costs.

    The runtimes' threads are the caller's business: see ``edgewise.backends.threads``.

    Args:
        shapes: What to measure; each once. Those with the same weights, one after the other, are
            loaded once where a backend takes any number of rows. Fixed kinds run on torch alone.
        backends: Where; ``"torch:cpu"`` is always among them, as the reference.
        threads: Of each call.
        effort: How long.
        name: Of the table.
        state: What the device was doing meanwhile, in words.
        journal: File that rows are appended to as they come; an unfinished one is gone on with.
        known: Rows measured before, which are kept; those that failed are tried again.
        switches: Measure switches too.
        warm_weights: Call one copy again and again, as the paper does: its weights may then stay
            in the processor's cache.
        policy: Thread policy of all rows; by default that many threads without spinning.
        device: The machine; this one by default.
        find_meter: Energy meter of a backend, or why there is none.
        load: Loads a program, as `load_operator`.
        make_weights: Makes weights; real ones have no subnormals.
        make_inputs: Makes inputs.
        clock: Times the calls; the machine's by default.
        rng: Makes weights and inputs, and orders the backends.
        root: Where the file tree of the machine starts.
        on_progress: Called before each shape, and at the end.

    Returns:
        All rows, those that failed among them, with the reason.

    Raises:
        ConfigError: No shape, or a number is out of range.
        BackendUnavailable: torch is missing.
        ProfileError: Rows of another device, thread policy, state, method or version are there;
            or rows cannot be written.
        KeyboardInterrupt: With what is kept as its message.
    """
    import torch

    wanted = tuple(dict.fromkeys(shapes))
    if not wanted:
        raise ConfigError("expected at least one shape of an operator to measure, found none")
    clock, rng = clock or MonotonicClock(), rng or np.random.default_rng(0)
    device = device or device_fingerprint(root)
    names = tuple(dict.fromkeys([HOME, *backends]))
    policy = policy or thread_policy(threads)
    cache_bytes = 0.0 if warm_weights else last_cache_bytes(root)
    head = table_of(
        () if known is None else known.costs.values(),
        () if known is None else known.switches.values(),
        name=name,
        device_id=device.id,
        device=device_record(device),
        thread_policy=policy,
        provenance="measured",
        state=state,
        created_unix_s=time.time() if known is None else known.created_unix_s,
        notes={
            "method": effort.in_words(),
            "weights": "one copy, which a cache may hold"
            if warm_weights
            else "from memory: copies take turns, together larger than the cache",
            "correctness": _CORRECTNESS,
            "versions": _versions(names),
        },
    )
    if known is not None:
        refuse_mixing(known, head)
    kept = Journal(journal, head)
    memory = read_memory(root)
    run = _Run(
        backends=names,
        policy=policy,
        effort=effort,
        journal=kept,
        find_meter=_remembered(find_meter or find_energy_meter),
        load=load,
        make_weights=make_weights,
        make_inputs=make_inputs,
        cache_bytes=cache_bytes,
        memory_bytes=min(
            [m for m in (memory.available_bytes, memory.limit_bytes) if m], default=math.inf
        ),
        clock=clock,
        rng=rng,
        notes={},
    )
    before, counters, since_s = state_before(root, clock), read_cpu_counters(root), clock.now_s()
    try:
        with torch.no_grad():
            _measure_all(run, wanted, on_progress or (lambda _: None))
            if switches:
                _measure_switches(run)
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(
            f"was stopped; the {len(kept.costs)} rows measured so far are kept in {journal}, and"
            " the same command goes on from there"
            if journal is not None
            else "was stopped before it was done"
        ) from stop
    during = load_between(counters, read_cpu_counters(root), window_s=clock.now_s() - since_s)
    notes = [*noise_notes(before, during), *kept.notes]
    other = "unknown" if during.other_cores is None else f"{during.other_cores:.2f}"
    return dataclasses.replace(
        head,
        costs=kept.costs,
        switches=kept.switches,
        notes={
            **({} if known is None else known.notes),
            **head.notes,
            "load": f"cores used by other processes meanwhile: {other}",
            "elapsed": f"{clock.now_s() - since_s:.0f} s in the last run",
            **({"said": "; ".join(notes)} if notes else {}),
            **run.notes,
        },
    )


def compare(
    shape: OperatorShape, found: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]
) -> Correctness:
    """Compare outputs with torch's on the CPU, by the paper's tolerances.

    Relative 1e-4; absolute 1e-5 for norms and activations and 1e-3 for linears. The error of a
    segment grows with its values, so its absolute tolerance is 1e-3 of the root mean square of
    each output's reference; the largest is reported.

    Args:
        shape: What was computed.
        found: Its outputs.
        reference: torch's.
    """
    import torch

    atol = _ATOL.get(shape.kind, 0.0)
    passed, max_abs, sum_abs, max_rel, count = len(found) == len(reference), 0.0, 0.0, 0.0, 0
    for got, right in zip(found, reference, strict=False):
        if got.shape != right.shape:
            return Correctness(
                passed=False,
                max_abs=float("1e30"),
                mean_abs=float("1e30"),
                max_rel=float("1e30"),
                rtol=_RTOL,
                atol=atol,
            )
        if not right.numel():
            continue
        allowed = atol
        if shape.kind not in _ATOL:
            allowed = _SEGMENT_ATOL * float(right.square().mean().sqrt())
            atol = max(atol, allowed)
        error = (got - right).abs()
        if not bool(torch.isfinite(error).all()):
            passed, max_abs, max_rel, sum_abs = False, 1e30, 1e30, 1e30  # JSON knows no infinity
            count = 1
            break
        passed = passed and bool((error <= allowed + _RTOL * right.abs()).all())
        largest = float(error.max())
        max_abs = max(max_abs, largest)
        max_rel = max(max_rel, largest / max(float(right.abs().max()), 1e-30))
        sum_abs += float(error.sum())
        count += right.numel()
    return Correctness(
        passed=passed,
        max_abs=max_abs,
        mean_abs=sum_abs / max(count, 1),
        max_rel=max_rel,
        rtol=_RTOL,
        atol=atol,
    )


def summarise(samples_s: Sequence[float] | Float64, *, calls_per_sample: int = 1) -> LatencySummary:
    """Statistics of samples, to six digits.

    Args:
        samples_s: Each the mean time of one call within a sample, seconds. [N].
        calls_per_sample: Above 1, percentiles and the deviation are of means of so many calls.

    Example:
        >>> summarise([1.0, 2.0, 3.0], calls_per_sample=2).calls
        6
    """
    values = np.asarray(samples_s, dtype=np.float64)
    interval = quantile_interval(values, 0.5)
    low, high = float(values.min()), float(values.max())
    p90, p95, p99 = np.quantile(values, [0.9, 0.95, 0.99])
    numbers = {
        "mean_s": values.mean(),
        "median_s": np.median(values),
        "std_s": values.std(),
        "min_s": low,
        "max_s": high,
        "p90_s": p90,
        "p95_s": p95,
        "p99_s": p99,
        # With so few samples that no interval is known, the samples' own ends stand for it.
        "median_low_s": max(interval.low, low),
        "median_high_s": min(interval.high, high),
    }
    rounded = {key: float(f"{value:.6g}") for key, value in numbers.items()}
    return LatencySummary(**rounded, calls=len(values) * calls_per_sample, samples=len(values))


def copies_beyond_cache(weight_bytes: int, *, backends: int, cache_bytes: float) -> int:
    """How many copies of an operator take turns, so that weights come from memory.

    Between two calls of one copy lie all other copies on all backends; together they are twice as
    large as the cache. At most 32, and one where weights are below 64 KiB.

    Args:
        weight_bytes: Of one copy.
        backends: That take turns.
        cache_bytes: Of the last level; 0 for a single copy.

    Example:
        >>> copies_beyond_cache(3_500_000, backends=3, cache_bytes=32 * 2**20)
        7
    """
    if weight_bytes < _SMALL_WEIGHTS_BYTES:
        return 1
    wanted = math.ceil(_COPIES_BEYOND_CACHE * cache_bytes / (weight_bytes * backends))
    return max(1, min(_MOST_COPIES, wanted))


def last_cache_bytes(root: Path = Path("/")) -> float:
    """Size of the processor's last level of cache; 32 MiB where the kernel does not say."""
    found = 0.0
    for index in range(5):
        text = read_text(root / f"sys/devices/system/cpu/cpu0/cache/index{index}/size").value or ""
        scale = {"K": 2**10, "M": 2**20}.get(text[-1:])
        if scale is not None and text[:-1].isdigit():
            found = max(found, float(int(text[:-1]) * scale))
    return found or _UNKNOWN_CACHE_BYTES


def expected_s(shape: OperatorShape, effort: OperatorEffort, *, backends: int) -> float:
    """Rough time for one shape on so many backends, seconds: what the time left is made of."""
    moved = shape.weight_bytes + shape.input_bytes + shape.output_bytes
    call_s = max(shape.flops / _FLOPS_PER_S, moved / _BYTES_PER_S) + _CALL_S
    least_s = (effort.warmups + effort.min_samples) * call_s
    sampled_s = effort.samples * max(call_s, effort.sample_s)
    loaded_s = _LOAD_S + shape.weight_bytes / _LOAD_BYTES_PER_S
    return (1 if shape.is_fixed else backends) * (
        loaded_s + max(least_s, min(effort.time_cap_s, sampled_s))
    )


def _measure_all(
    run: _Run, shapes: Sequence[OperatorShape], tell: Callable[[OperatorProgress], None]
) -> None:
    weights = [expected_s(s, run.effort, backends=len(run.missing(s))) for s in shapes]
    todo = [bool(run.missing(s)) for s in shapes]
    left = sum(w for w, open_ in zip(weights, todo, strict=True) if open_)
    done_weight, start_s, total = 0.0, run.clock.now_s(), len(shapes)
    done = todo.count(False)
    for shape, weight, is_open in zip(shapes, weights, todo, strict=True):
        if not is_open:
            continue
        elapsed_s = run.clock.now_s() - start_s
        remaining_s = elapsed_s / done_weight * (left - done_weight) if done_weight else None
        tell(OperatorProgress(what=shape.key, done=done, total=total, remaining_s=remaining_s))
        run.measure(shape, run.missing(shape))
        done_weight += weight
        done += 1
    run.forget()
    tell(OperatorProgress(what="switches", done=total, total=total, remaining_s=None))


def _measure_switches(run: _Run) -> None:
    pairs = list(itertools.permutations(run.backends, 2))
    if all(pair in run.journal.switches for pair in pairs):
        return
    calls: dict[str, list[Any]] = {}
    for backend in run.backends:
        try:
            calls[backend] = [
                run.load(s, Weights(), backend, threads=run.policy.threads) for s in SWITCH_SHAPES
            ]
        except EdgeError as error:
            run.notes[f"switch {backend}"] = f"not measured: {error.message}"
    names = tuple(calls)
    if len(names) < 2:
        return
    tensors = [run.make_inputs(shape, run.rng)[0] for shape in SWITCH_SHAPES]
    samples: list[SwitchSamples] = []
    with no_collection():
        for place, (shape, tensor) in enumerate(zip(SWITCH_SHAPES, tensors, strict=True)):
            samples.append(
                sample_switches(
                    [calls[each][place] for each in names],
                    tensor,
                    size_bytes=shape.output_bytes,
                    rounds=run.effort.switch_rounds,
                    warmups=run.effort.warmups,
                    clock=run.clock,
                    rng=run.rng,
                )
            )
    costs, notes = fit_switches(names, samples, rng=run.rng)
    run.notes |= notes
    meters = {run.find_meter(each) for each in names}
    meter, _ = next(iter(meters)) if len(meters) == 1 else (None, "")
    if meter is not None:
        pairs_of_windows = run.effort.energy_pairs
        costs = with_energy(
            costs, calls, tensors, samples, meter=meter, pairs=pairs_of_windows, clock=run.clock
        )
    for cost in costs:
        if (cost.source, cost.target) not in run.journal.switches:
            run.journal.add_switch(cost)


def _remembered(find_meter: FindMeter) -> FindMeter:
    """Looked for once for each device: what two backends share is one meter."""
    found: dict[str, Any] = {}

    def remembered(backend: str) -> Any:
        device = backend.partition(":")[2].lower()
        if device not in found:
            found[device] = find_meter(backend)
        return found[device]

    return remembered


def _flat(outputs: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _wrong_in_words(check: Correctness) -> str:
    return (
        f"its answers differ from torch's by up to {check.max_abs:.3g}, allowed are"
        f" {check.atol:.3g} and {check.rtol:g} of the value"
    )


def _versions(backends: Iterable[str]) -> str:
    runtimes = dict.fromkeys(each.partition(":")[0] for each in backends)
    found = []
    for runtime in runtimes:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            package = _PACKAGES.get(runtime, runtime)
            found.append(f"{package} {importlib.metadata.version(package)}")
    return ", ".join(found)
