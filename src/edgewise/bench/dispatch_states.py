"""Times operators on a calm machine and beside co-runners: whose calls, with how many threads.

All states take turns, and within a state all operators on all backends do, as layers of a model do:
so weights come from memory, and whatever else the machine does falls on all alike.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgewise.backends.operators import (
    OperatorProgram,
    load_operator,
    operator_backends,
    random_inputs,
    random_weights,
)
from edgewise.backends.threads import require, set_torch_threads
from edgewise.bench.background import Load
from edgewise.clock import Clock, MonotonicClock
from edgewise.device import device_fingerprint, load_between, read_cpu_counters
from edgewise.dispatch.forward import trace_forward
from edgewise.dispatch.states import Choice
from edgewise.errors import BackendError, BackendUnavailable, ConfigError, EdgeError
from edgewise.model.transformer import load_architecture
from edgewise.profiles.operators import (
    Correctness,
    Energy,
    OperatorCost,
    OperatorShape,
    OperatorTable,
    table_of,
)
from edgewise.profiles.records import ThreadPolicy
from edgewise.profiles.statistics import median_bootstrap_interval
from edgewise.profiling.find import device_record
from edgewise.profiling.operators import compare, summarise

if TYPE_CHECKING:
    import torch

Float64 = npt.NDArray[np.float64]
Say = Callable[[str], None]

CALM = "calm"
ROWS = (1, 16, 64)
_KINDS = ("rmsnorm", "linear", "activation", "norm_linear", "mlp", "norm_mlp", "layer")
_LARGEST_BYTES = 2**24  # the head would take as long as all others together
_HOME = "torch:cpu"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateTimes:
    """Samples of shapes on backends in one state.

    Attributes:
        state: ``"calm"``, or what ran beside.
        samples_s: [R] for each shape and choice: each the mean of several calls in as many passes,
            seconds; a median of single calls would hide that some stand still.
        correctness: Against torch on the CPU.
        others_cores: Load of other programs meanwhile, cores, the co-runner among them; ``None``
            where unknown.
    """

    state: str
    samples_s: Mapping[tuple[OperatorShape, Choice], Float64]
    correctness: Mapping[tuple[OperatorShape, Choice], Correctness]
    others_cores: float | None

    def tables(self, rounds: slice = slice(None), *, spinning: bool = False) -> tuple[Any, ...]:
        """Tables of costs, one for each number of threads.

        Args:
            rounds: Samples that count.
            spinning: Whether threads that wait for each other spin.
        """
        device = device_fingerprint()
        found = []
        for threads in sorted({choice.threads for _, choice in self.samples_s}):
            policy = ThreadPolicy(threads=threads, spinning=spinning and threads > 1)
            costs = [
                OperatorCost(
                    shape=shape,
                    backend=choice.backend,
                    latency=summarise(samples_s[rounds]),
                    correctness=self.correctness.get((shape, choice)),
                    energy=Energy(),
                    thread_policy=policy,
                )
                for (shape, choice), samples_s in self.samples_s.items()
                if choice.threads == threads
            ]
            found.append(
                table_of(
                    costs,
                    (),
                    name=f"{self.state}, {policy.key}",
                    device_id=device.id,
                    device=device_record(device),
                    thread_policy=policy,
                    provenance="measured",
                    state=self.state,
                )
            )
        return tuple(found)

    def total_s(
        self,
        choices: Mapping[OperatorShape, Choice],
        counts: Mapping[OperatorShape, int],
        rounds: slice = slice(None),
    ) -> Float64:
        """Time of all shapes with these choices, each so often, seconds. [R]."""
        parts = [
            counts.get(shape, 1) * self.samples_s[shape, choice][rounds]
            for shape, choice in choices.items()
        ]
        return np.asarray(np.sum(parts, axis=0))


def model_shapes(
    model: str = "smollm2-135m", rows: Sequence[int] = ROWS
) -> dict[OperatorShape, int]:
    """Operators and segments of a model's forward passes, and how often each is in one.

    Args:
        model: A shipped architecture.
        rows: Tokens that go in: one is decoding.
    """
    architecture = load_architecture(model)
    counts: dict[OperatorShape, int] = {}
    for m in rows:
        trace = trace_forward(architecture, length=m)
        shapes = [node.shape for node in trace.operators]
        shapes += [part for candidate in trace.candidates for part in candidate.parts]
        for shape in shapes:
            if shape.kind in _KINDS and shape.weight_bytes <= _LARGEST_BYTES:
                counts[shape] = counts.get(shape, 0) + 1
    return counts


@dataclass(slots=True)
class _Entry:
    shape: OperatorShape
    choice: Choice
    program: OperatorProgram
    inputs: tuple[torch.Tensor, ...]
    times_s: dict[str, list[float]] = field(default_factory=dict)


def measure_states(  # noqa: PLR0913 - a campaign's whole circumstances
    shapes: Sequence[OperatorShape],
    co_runners: Mapping[str, Load],
    *,
    backends: Sequence[str] | None = None,
    threads: Sequence[int] = (1,),
    rounds: int = 20,
    passes: int = 4,
    settle_s: float = 0.05,
    seed: int = 0,
    clock: Clock | None = None,
    say: Say = lambda _: None,
) -> dict[str, StateTimes]:
    """Time every shape on every backend, calm and beside each co-runner, states interleaved.

    Args:
        shapes: Operators and segments.
        co_runners: Name of a state to what runs beside; started and stopped here.
        backends: All that run operators here by default.
        threads: Of each call: all are measured. torch's are those of the process, and put back.
        rounds: Samples of each shape and choice in each state; in each round every state has its
            turn.
        passes: Passes over all shapes behind each sample.
        settle_s: Between the start of a co-runner and the first call.
        seed: Of weights, inputs and orders.
        clock: Times calls; the machine's by default.
        say: Told what is going on.

    Returns:
        ``"calm"`` first, then each co-runner's state.

    Raises:
        ConfigError: A number is out of range, or this process has lost cores.
        BackendUnavailable: torch is not installed.
        EdgeError: A co-runner could not be started, or ended by itself.
    """
    if rounds < 1 or passes < 1 or not shapes or not threads or CALM in co_runners:
        raise ConfigError("expected at least one shape, number of threads, round and pass")
    clock = clock or MonotonicClock()
    rng = np.random.default_rng(seed)
    states: dict[str, Load | None] = {CALM: None, **co_runners}
    spent: dict[str, list[tuple[Any, Any, float]]] = {state: [] for state in states}
    with _torch_threads_put_back():
        entries, correctness = _load(shapes, backends, threads, rng, say)
        _one_pass(entries, clock, rng)
        for number in range(rounds):
            for index in rng.permutation(len(states)):
                state = list(states)[index]
                load = states[state]
                say(f"round {number + 1} of {rounds}: {state}")
                with load or contextlib.nullcontext():
                    clock.sleep_s(settle_s)
                    before, start_s = read_cpu_counters(), time.perf_counter()
                    sums_s = sum(_one_pass(entries, clock, rng) for _ in range(passes))
                    spent[state].append(
                        (before, read_cpu_counters(), time.perf_counter() - start_s)
                    )
                    if load is not None and load.problem:
                        raise EdgeError(f"the co-runner {load.label!r} died: {load.problem}")
                for entry, sum_s in zip(entries, np.atleast_1d(sums_s), strict=True):
                    entry.times_s.setdefault(state, []).append(float(sum_s) / passes)
    return {
        state: StateTimes(
            state=state,
            samples_s={(e.shape, e.choice): np.array(e.times_s[state]) for e in entries},
            correctness=correctness,
            others_cores=_others(spent[state]),
        )
        for state in states
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What choices cost against others, in one state.

    Attributes:
        ratio: Of the totals, less one; the median over rounds. Above zero: the first are slower.
        low: Lower end of its 95 % interval.
        high: Upper end.
        first_s: Median total of the first choices, seconds.
        second_s: Of the second.
    """

    ratio: float
    low: float
    high: float
    first_s: float
    second_s: float


def loss(
    times: StateTimes,
    first: Mapping[OperatorShape, Choice],
    second: Mapping[OperatorShape, Choice],
    counts: Mapping[OperatorShape, int],
    *,
    rounds: slice = slice(None),
) -> Loss:
    """Compare two sets of choices by what their operators took in the same rounds.

    Args:
        times: Of the state.
        first: Choice of each shape.
        second: The others.
        counts: How often a shape counts.
        rounds: Those that count; none by which the choices were made, or noise looks like a gain.
    """
    first_s, second_s = (times.total_s(c, counts, rounds) for c in (first, second))
    ratios = first_s / second_s - 1
    interval = median_bootstrap_interval(ratios, rng=np.random.default_rng(0))
    return Loss(
        ratio=float(np.median(ratios)),
        low=interval.low,
        high=interval.high,
        first_s=float(np.median(first_s)),
        second_s=float(np.median(second_s)),
    )


def cheapest(
    tables: Sequence[OperatorTable], *, threads: int | None = None
) -> dict[OperatorShape, Choice]:
    """The cheapest choice of each shape.

    Args:
        tables: Of one state.
        threads: Only choices with so many; all where ``None``.
    """
    found: dict[OperatorShape, tuple[float, Choice]] = {}
    for table in tables:
        for (shape, backend), cost in table.costs.items():
            choice = Choice(backend=backend, threads=cost.thread_policy.threads)
            if cost.latency is None or not cost.usable or threads not in {None, choice.threads}:
                continue
            offer = cost.latency.median_s, choice
            found[shape] = min(found.get(shape, offer), offer)
    return {shape: choice for shape, (_, choice) in found.items()}


def _load(
    shapes: Sequence[OperatorShape],
    backends: Sequence[str] | None,
    threads: Sequence[int],
    rng: np.random.Generator,
    say: Say,
) -> tuple[list[_Entry], dict[tuple[OperatorShape, Choice], Correctness]]:
    """Load every shape on every backend with every number of threads; by threads, then shapes."""
    names = [b for b in operator_backends() if "cuda" not in b] if backends is None else backends
    if not names:
        raise BackendUnavailable(
            "no backend runs operators here", help="pip install 'edgewise[torch,onnx]'"
        )
    made = {s: (random_weights(s, rng), random_inputs(s, rng)) for s in dict.fromkeys(shapes)}
    entries, correctness = [], {}
    references: dict[OperatorShape, tuple[torch.Tensor, ...]] = {}
    for count in threads:
        set_torch_threads(count)
        require(ThreadPolicy(threads=count))
        for shape, (weights, inputs) in made.items():
            if shape not in references:
                references[shape] = _outputs(load_operator(shape, weights, _HOME)(*inputs))
            for backend in names:
                choice = Choice(backend=backend, threads=count)
                try:
                    program = load_operator(shape, weights, backend, threads=count)
                    found = _outputs(program(*inputs))
                except BackendError as error:
                    say(f"left out: {shape.key} on {backend}: {error.message}")
                    continue
                correctness[shape, choice] = compare(shape, found, references[shape])
                entries.append(_Entry(shape, choice, program, inputs))
    return entries, correctness


def _one_pass(entries: Sequence[_Entry], clock: Clock, rng: np.random.Generator) -> Float64:
    """Seconds of one call of each entry; numbers of threads apart, each in random order."""
    spent_s = np.zeros(len(entries))
    groups: dict[int, list[int]] = {}
    for index, entry in enumerate(entries):
        groups.setdefault(entry.choice.threads, []).append(index)
    for count in rng.permutation(list(groups)):
        set_torch_threads(int(count))
        for index in rng.permutation(groups[int(count)]):
            entry = entries[index]
            program, inputs = entry.program, entry.inputs
            start_s = clock.now_s()
            program(*inputs)
            spent_s[index] = clock.now_s() - start_s
    return spent_s


def _outputs(found: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def _others(spent: Sequence[tuple[Any, Any, float]]) -> float | None:
    """Mean load of other programs over all turns of a state, cores."""
    loads = [load_between(before, after, window_s=window_s) for before, after, window_s in spent]
    known = [(load.other_cores, load.window_s) for load in loads if load.other_cores is not None]
    whole_s = sum(window_s for _, window_s in known)
    return sum(cores * window_s for cores, window_s in known) / whole_s if whole_s else None


@contextlib.contextmanager
def _torch_threads_put_back() -> Iterator[None]:
    from edgewise.backends.base import import_runtime

    torch_ = import_runtime("torch", backend=_HOME, extra="torch")
    before = torch_.get_num_threads()
    try:
        yield
    finally:
        torch_.set_num_threads(before)
