"""What a model costs at each place to cut it: the CPU measured, the accelerator simulated.

For each number of threads, three kinds of pieces are loaded: each segment between neighbouring
places, what is left after each place, and so the whole model. A round calls all of them once, in
random order, so that whatever else the machine does falls on all alike.

What is left after a place is measured as one piece, because that is how it runs: the segments'
sum is larger, since runtimes change the layout of what enters and leaves a piece. That sum is
compared with the whole model, as a check of both.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from edgewise.backends.piece import Array, ArraySpec, Piece, PieceFormat, load_piece
from edgewise.clock import Clock, MonotonicClock
from edgewise.device import load_between, read_cpu_counters
from edgewise.device.accelerator import Accelerator
from edgewise.errors import ConfigError, ModelError
from edgewise.frontends.partition import PartitionedModel
from edgewise.model.graph import Graph
from edgewise.profiles.partition import PartitionProfile
from edgewise.profiling.accelerator_model import EDGE_TPU, ComputeModel, edge_tpu, prefix_work
from edgewise.profiling.collection import no_collection
from edgewise.units import format_bytes

Float64 = npt.NDArray[np.float64]

SUM_TOLERANCE_RATIO = 0.1  # the sum of the segments may differ so far from the whole model
_COPIES = 2  # of a piece's weights: as in the file, and as the runtime packs them
_LEAST_KEPT = 3
_EIGHT_BITS = frozenset({"int8", "uint8"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentProgress:
    """How far a campaign is.

    Attributes:
        rounds: Rounds done.
        max_rounds: Rounds after which it ends at the latest.
        remaining_s: Time left at the most; ``None`` while pieces are loaded and warmed up.
    """

    rounds: int
    max_rounds: int
    remaining_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SegmentTimes:
    """Samples of a campaign: R rounds, P segments, T numbers of threads.

    Attributes:
        backend: Runtime on device.
        threads: Numbers of threads, ascending. [T].
        segments_s: Each segment, [R, P, T], seconds.
        rests_s: What is left after the places 0 to P - 1, each as one piece, [R, P, T], seconds;
            the first is the whole model, the last the last segment.
        kept_ratio: Share of the rounds that counts: for each piece those in which it took least
            time, since other work on the machine only ever adds.
        elapsed_s: How long it took, loading included.
        other_cores: Cores that other processes used meanwhile; ``None`` if unknown.
    """

    backend: str
    threads: tuple[int, ...]
    segments_s: Float64
    rests_s: Float64
    kept_ratio: float = 0.5
    elapsed_s: float = 0.0
    other_cores: float | None = None

    @property
    def rounds(self) -> int:
        """R."""
        return len(self.rests_s)

    @property
    def kept_rounds(self) -> int:
        """How many rounds count for each piece."""
        return min(self.rounds, max(_LEAST_KEPT, math.ceil(self.rounds * self.kept_ratio)))

    @property
    def segment_median_s(self) -> Float64:
        """Median of each segment over its rounds that count, [P, T]."""
        return np.asarray(np.median(self._kept(self.segments_s), axis=0))

    @property
    def rest_median_s(self) -> Float64:
        """Median of what is left after each place, likewise, [P + 1, T]; 0 at P."""
        found = np.median(self._kept(self.rests_s), axis=0)
        return np.concatenate([found, np.zeros((1, len(self.threads)))])

    @property
    def rest_cv2(self) -> Float64:
        """Squared coefficient of variation of those times on one thread, [P + 1]; 0 at P."""
        one = self._kept(self.rests_s)[:, :, 0]
        return np.append(one.var(axis=0) / one.mean(axis=0) ** 2, 0.0)

    @property
    def sum_to_whole_ratio(self) -> Float64:
        """Sum of the segments' medians over the whole model's, [T]."""
        return np.asarray(self.segment_median_s.sum(axis=0) / self.rest_median_s[0])

    def _kept(self, samples: Float64) -> Float64:
        """Each piece's least times, [K, P, T]."""
        return np.sort(samples, axis=0)[: self.kept_rounds]


@dataclass(slots=True)
class _Run:
    clock: Clock
    rng: np.random.Generator
    on_progress: Callable[[SegmentProgress], None]
    rounds: int
    end_s: float
    done: int = 0
    samples: list[Float64] = field(default_factory=list)


def measure_segments(  # noqa: PLR0913 - each is one knob of a campaign
    model: PartitionedModel,
    *,
    threads: Sequence[int] = (1,),
    rounds: int = 30,
    warmup_rounds: int = 3,
    time_cap_s: float = math.inf,
    kept_ratio: float = 0.5,
    memory_bytes: float = 2e9,
    clock: Clock | None = None,
    rng: np.random.Generator | None = None,
    load: Callable[..., Piece] = load_piece,
    on_progress: Callable[[SegmentProgress], None] | None = None,
) -> SegmentTimes:
    """Measure each segment, and what is left after each place, on the CPU.

    Args:
        model: With its places.
        threads: Numbers of threads, from 1 upwards.
        rounds: How many count; at least three.
        warmup_rounds: How many before them are thrown away.
        time_cap_s: Ends earlier after this time, seconds, but not before three rounds.
        kept_ratio: Share of the rounds that counts, each piece's quickest, above 0 to 1; 1 where
            the other work is what shall be measured.
        memory_bytes: For loaded pieces, about. Where the numbers of threads need more together,
            they are measured one group after the other.
        clock: Times the calls; the machine's by default.
        rng: Makes the input and orders the calls within each round.
        load: Loads a piece, as `load_piece`.
        on_progress: Called after each round.

    Raises:
        ConfigError: A number is out of range.
        ModelError: A piece cannot be written, or one number of threads needs more memory.
        BackendError: The runtime refuses a segment, or fails.
    """
    threads = _check(threads, rounds, warmup_rounds, kept_ratio)
    clock = clock or MonotonicClock()
    rng = rng or np.random.default_rng(0)
    start_s, before = clock.now_s(), read_cpu_counters()
    groups = _groups(model, threads, memory_bytes)
    parts: list[Float64] = []
    backend = ""
    for number, group in enumerate(groups):
        run = _Run(
            clock=clock,
            rng=rng,
            on_progress=on_progress or (lambda _: None),
            rounds=rounds,
            end_s=start_s + time_cap_s * (number + 1) / len(groups),
        )
        with contextlib.ExitStack() as stack:
            pieces = [_load(model, each, load, stack) for each in group]
            backend = pieces[0][-1].backend
            inputs = _inputs(pieces[0], rng)
            parts.append(_rounds(run, pieces, inputs, warmup_rounds))
    count = min(map(len, parts))
    samples = np.concatenate([part[:count] for part in parts], axis=2)  # [R, 2 P - 1, T]
    elapsed_s = clock.now_s() - start_s
    return SegmentTimes(
        backend=backend,
        threads=threads,
        segments_s=samples[:, : model.last],
        rests_s=samples[:, [*range(model.last, 2 * model.last - 1), model.last - 1]],
        kept_ratio=kept_ratio,
        elapsed_s=elapsed_s,
        other_cores=load_between(before, read_cpu_counters(), window_s=elapsed_s).other_cores,
    )


def partition_profile(
    model: PartitionedModel,
    times: SegmentTimes,
    *,
    accelerator: Accelerator,
    compute: ComputeModel | None = None,
    cpu: str = "",
) -> PartitionProfile:
    """Put measured and simulated costs together.

    Args:
        model: That was measured.
        times: What was measured.
        accelerator: Device that the prefix is for; its name goes into the profile.
        compute: Prices of its computing; an Edge TPU's by default.
        cpu: Device that was measured.

    Raises:
        ModelError: The work before each place cannot be counted.
    """
    graph = graph_of(model)
    prices = compute or edge_tpu()
    inner = [prices.compute_s(prefix_work(graph, place.tensor)) for place in model.places[1:]]
    ratios = ", ".join(
        f"{ratio:.3f} on {count} thread{'s' if count > 1 else ''}"
        for count, ratio in zip(times.threads, times.sum_to_whole_ratio, strict=True)
    )
    other = "unknown" if times.other_cores is None else f"{times.other_cores:.2f}"
    return PartitionProfile(
        model_id=model.name,
        model_version=model.version,
        cuts=tuple(place.tensor for place in model.places),
        depth_ratio=np.array([place.depth_ratio for place in model.places]),
        prefix_bytes=np.array([float(place.prefix_bytes) for place in model.places]),
        boundary_bytes=np.array([float(place.nbytes) for place in model.places]),
        accelerator_s=np.array([0.0, *inner]),
        threads=times.threads,
        cpu_s=times.rest_median_s,
        cpu_cv2=times.rest_cv2,
        accelerator=accelerator.name,
        cpu=cpu,
        accelerator_provenance="simulated",
        cpu_provenance="measured",
        notes={
            "cpu": f"{times.backend}; what is left after each place was measured as one piece,"
            f" median of its {times.kept_rounds} quickest of {times.rounds} interleaved rounds",
            "sum_to_whole": f"sum of the segments over the whole model: {ratios}",
            "other_load": f"cores used by other processes meanwhile: {other}",
            "accelerator": f"computed, not measured: {EDGE_TPU if compute is None else 'given'}",
        },
    )


def graph_of(model: PartitionedModel) -> Graph:
    """The operators that a reader found.

    Raises:
        ModelError: Its reader keeps none.
    """
    for holder in (model.cutter, getattr(model.cutter, "source", None)):
        graph = getattr(holder, "graph", None)
        if isinstance(graph, Graph):
            return graph
    raise ModelError(f"the operators of {model.name!r} are not known, so its work is not either")


def is_quantised(model: PartitionedModel) -> bool:
    """Whether any tensor has eight bits, as an Edge TPU needs it."""
    return any(spec.dtype in _EIGHT_BITS for spec in graph_of(model).tensors.values())


def example_input(spec: ArraySpec, rng: np.random.Generator) -> Array:
    """Any input: normal where it is floating point, every value alike where it is not."""
    dtype = np.dtype(spec.dtype)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, size=spec.shape, dtype=dtype, endpoint=True)
    return rng.standard_normal(spec.shape).astype(dtype)


def _check(
    threads: Sequence[int], rounds: int, warmup_rounds: int, kept_ratio: float
) -> tuple[int, ...]:
    found = tuple(threads)
    if not found or found[0] != 1 or list(found) != sorted(set(found)):
        raise ConfigError(f"expected numbers of threads that rise from 1, found {list(threads)}")
    if rounds < _LEAST_KEPT:
        raise ConfigError(f"expected at least {_LEAST_KEPT} rounds, found {rounds}")
    if warmup_rounds < 0 or not 0 < kept_ratio <= 1:
        raise ConfigError(
            "expected no fewer than 0 warm-up rounds and a share of rounds above 0 up to 1, found"
            f" {warmup_rounds} and {kept_ratio}"
        )
    return found


def _groups(
    model: PartitionedModel, threads: Sequence[int], memory_bytes: float
) -> list[tuple[int, ...]]:
    """Numbers of threads whose pieces are loaded together."""
    sizes = [place.prefix_bytes for place in model.places]
    weights = sizes[-1] + sum(sizes[-1] - size for size in sizes[:-1])  # segments, rests
    fitting = len(threads) if not weights else int(memory_bytes // (_COPIES * weights))
    if fitting < 1:
        raise ModelError(
            f"the pieces of {model.name!r} need about {format_bytes(_COPIES * weights)} of memory,"
            f" {format_bytes(memory_bytes)} are there",
            help="cut at fewer places: --places",
        )
    return [tuple(threads[k : k + fitting]) for k in range(0, len(threads), fitting)]


def _load(
    model: PartitionedModel, threads: int, load: Callable[..., Piece], stack: contextlib.ExitStack
) -> list[Piece]:
    """The segments in order, then the rests but for the last, which is a segment."""
    last = model.last
    ends = [(k, k + 1) for k in range(last)] + [(k, last) for k in range(last - 1)]
    file_format: PieceFormat = model.format
    pieces = []
    for start, stop in ends:
        piece = load(model.segment(start, stop), file_format, threads=threads)
        stack.callback(piece.close)
        pieces.append(piece)
    return pieces


def _inputs(pieces: Sequence[Piece], rng: np.random.Generator) -> list[Array]:
    """What each piece reads: real activations of one input."""
    found = [example_input(pieces[0].input, rng)]
    last = (len(pieces) + 1) // 2
    for piece in pieces[: last - 1]:
        found.append(piece.run(found[-1]))
    return [*found, *found[:-1]]


def _rounds(
    run: _Run, pieces: Sequence[Sequence[Piece]], inputs: Sequence[Array], warmup_rounds: int
) -> Float64:
    """Samples of one group, [R, 2 P - 1, T]."""
    calls = [(k, t) for t in range(len(pieces)) for k in range(len(inputs))]
    for _ in range(warmup_rounds):
        _round(run, calls, pieces, inputs)
        run.on_progress(SegmentProgress(rounds=0, max_rounds=run.rounds, remaining_s=None))
    start_s = run.clock.now_s()
    while run.done < run.rounds:
        run.samples.append(_round(run, calls, pieces, inputs))
        run.done += 1
        now_s = run.clock.now_s()
        left_s = (now_s - start_s) / run.done * (run.rounds - run.done)
        left_s = min(left_s, max(0.0, run.end_s - now_s))
        run.on_progress(SegmentProgress(rounds=run.done, max_rounds=run.rounds, remaining_s=left_s))
        if run.done >= _LEAST_KEPT and now_s >= run.end_s:
            break
    return np.array(run.samples)


def _round(
    run: _Run,
    calls: Sequence[tuple[int, int]],
    pieces: Sequence[Sequence[Piece]],
    inputs: Sequence[Array],
) -> Float64:
    found = np.empty((len(inputs), len(pieces)))
    now_s = run.clock.now_s
    with no_collection():
        for index in run.rng.permutation(len(calls)):
            k, t = calls[index]
            # A fresh copy: in a request the segment before has just written it.
            values, call = inputs[k].copy(), pieces[t][k].run
            start_s = now_s()
            call(values)
            found[k, t] = max(0.0, now_s() - start_s)
    return found
