"""Integrated runs: a transformer by several plans in turn, and what was predicted for each."""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from edgewise.backends.operators import operator_backends
from edgewise.dispatch.assemble import make_plan
from edgewise.dispatch.forward import trace_forward
from edgewise.dispatch.plan import DispatchPlan, PhasePlan, Step
from edgewise.dispatch.problem import HOME, Objective, build_problem
from edgewise.dispatch.search import decide
from edgewise.dispatch.trace import Phase, Trace
from edgewise.errors import EdgeError
from edgewise.model.transformer import Architecture
from edgewise.profiles.operators import OperatorShape, OperatorTable
from edgewise.profiles.statistics import quantile_interval
from edgewise.profiling.operators import OperatorEffort, measure_operators
from edgewise.runtime.dispatching import DispatchedModel, dispatch_model
from edgewise.runtime.dispatching.layer import call_layer

if TYPE_CHECKING:
    import torch

Say = Callable[[str], None]
Call = Callable[["Pass"], "torch.Tensor"]

RTOL = 1e-4  # of the largest logit: what a mixed plan may differ from torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One forward pass.

    Attributes:
        phase: Prefill or decode.
        length: Tokens that go in.
        past: Tokens in the cache before.
    """

    phase: Phase
    length: int
    past: int = 0

    @property
    def what(self) -> str:
        """In words.

        Example:
            >>> Pass(phase="decode", length=1, past=64).what
            'decode, 64 in the cache'
        """
        if self.phase == "prefill":
            return f"prefill {self.length}"
        return f"decode, {self.past} in the cache"


def passes_of(
    architecture: Architecture, lengths: Sequence[int], *, past: int | None
) -> list[Pass]:
    """Prefills, and a decode of a model that generates text unless ``past`` is ``None``."""
    found = [Pass(phase="prefill", length=n) for n in lengths]
    if past is not None and architecture.causal:
        found.append(Pass(phase="decode", length=1, past=past))
    return found


def traces_of(architecture: Architecture, passes: Sequence[Pass]) -> list[Trace]:
    """Each pass as a trace."""
    return [
        trace_forward(architecture, phase=p.phase, length=p.length, past=p.past) for p in passes
    ]


def shapes_of(traces: Sequence[Trace], *, segments: bool = True) -> list[OperatorShape]:
    """Distinct shapes to measure, those with the same weights one after the other."""
    found = {node.shape for trace in traces for node in trace.nodes}
    if segments:
        found |= {part for t in traces for c in t.candidates for part in c.parts}
    return sorted(found, key=lambda s: (s.kind, s.k, s.n, s.function, s.bias, s.m, s.key))


def plan_for(  # noqa: PLR0913 - what a plan depends on
    traces: Sequence[Trace],
    table: OperatorTable,
    *,
    method: str = "best",
    objective: Objective = "latency",
    segments: bool = True,
    backends: Sequence[str] | None = None,
) -> DispatchPlan:
    """Decide each pass by itself.

    Raises:
        ProfileError: The table lacks an operator.
    """
    segments = segments and method == "best"
    phases = []
    for trace in traces:
        problem = build_problem([trace], table, backends=backends, segments=segments)
        phases.append((problem, decide(problem, objective=objective, method=method)))
    return make_plan(phases, table, model=traces[0].model, objective=objective, method=method)


def measure_passes(
    traces: Sequence[Trace],
    *,
    threads: int = 1,
    segments: bool = True,
    time_cap_s: float = 0.3,
    say: Say = lambda _: None,
) -> OperatorTable:
    """Measure what some passes need, on every backend here: of the same minutes as the run.

    Args:
        traces: Of the passes.
        threads: Of each call.
        segments: Measure parts of segments too.
        time_cap_s: For each pair of shape and backend, seconds.
        say: Told what is measured.
    """
    effort = OperatorEffort(
        warmups=2, samples=200, min_samples=8, time_cap_s=time_cap_s, switch_rounds=100
    )
    return measure_operators(
        shapes_of(traces, segments=segments),
        backends=operator_backends(),
        threads=threads,
        effort=effort,
        name=f"{traces[0].model}, measured in place",
        on_progress=lambda p: say(f"measuring {p.what}, {p.done} of {p.total}"),
    )


# --- running ---------------------------------------------------------------------------------


class Runner:
    """Passes of one model with fixed tokens; the cache of a decode is put back after each.

    Args:
        model: Of transformers.
        vocabulary: Tokens are drawn below it.
        seed: Of the tokens.
    """

    def __init__(self, model: Any, *, vocabulary: int, seed: int = 0) -> None:
        self.model = model
        self._rng = np.random.default_rng(seed)
        self._vocabulary = vocabulary
        self._tokens: dict[Pass, torch.Tensor] = {}
        self._caches: dict[int, tuple[Any, list[tuple[torch.Tensor, torch.Tensor]]]] = {}

    def tokens(self, each: Pass) -> torch.Tensor:
        """Tokens that go in, [1, length]."""
        if each not in self._tokens:
            self._tokens[each] = self._draw(each.length)
        return self._tokens[each]

    def _draw(self, length: int) -> torch.Tensor:
        import torch

        return torch.from_numpy(self._rng.integers(0, self._vocabulary, (1, length)))

    def __call__(self, each: Pass) -> torch.Tensor:
        """Run one pass; returns its logits."""
        import torch

        with torch.no_grad():
            if not each.past:
                cached = {} if each.phase == "prefill" else {"use_cache": True}
                return cast("torch.Tensor", self.model(self.tokens(each), **cached).logits)
            cache = self.cache(each.past)
            return cast("torch.Tensor", self.model(self.tokens(each), **{self._name: cache}).logits)

    def cache(self, past: int) -> Any:
        """A cache with so many tokens, as it was when it was made."""
        import torch

        if past not in self._caches:
            with torch.no_grad():
                made = self.model(self._draw(past), use_cache=True)[self._name]
            self._caches[past] = made, [(place.keys, place.values) for place in made.layers]
        cache, kept = self._caches[past]
        for place, (keys, values) in zip(cache.layers, kept, strict=True):
            place.keys, place.values = keys, values
        return cache

    @functools.cached_property
    def _name(self) -> str:
        """What this transformers calls a cache."""
        import inspect

        named = inspect.signature(type(self.model).forward).parameters
        return "cache" if "cache" in named else "past_key_values"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A way to run the model.

    Attributes:
        name: Of it.
        call: Runs a pass.
        swapped: What is entered around its turns; entered again each time.
    """

    name: str
    call: Call
    swapped: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Wall times of one contender's passes.

    Attributes:
        median_s: Seconds.
        low_s: Lower end of the 95 % interval of the median.
        high_s: Upper end.
        passes: How many.
        deviation: Largest difference of a logit from torch's, over torch's largest; ``None`` for
            torch itself.
    """

    median_s: float
    low_s: float
    high_s: float
    passes: int
    deviation: float | None = None


def run_in_turns(  # noqa: PLR0913 - what is run, and how
    contenders: Sequence[Contender],
    passes: Sequence[Pass],
    *,
    rounds: int,
    each_turn: int = 2,
    say: Say = lambda _: None,
    rng: np.random.Generator | None = None,
) -> dict[tuple[str, Pass], Times]:
    """Time contenders in turns, so that whatever else the machine does falls on all alike.

    Args:
        contenders: The first is what the others' logits are compared with.
        passes: What each runs in its turn.
        rounds: Turns of each, in random order.
        each_turn: Passes that are timed in a turn, after one that is not.
        say: Told how far it is.
        rng: Orders the turns.
    """
    rng = rng or np.random.default_rng(0)
    samples: dict[tuple[str, Pass], list[float]] = {
        (c.name, p): [] for c in contenders for p in passes
    }
    logits: dict[tuple[str, Pass], torch.Tensor] = {}
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        for index in rng.permutation(len(contenders)):
            contender = contenders[index]
            with contender.swapped():
                for each in passes:
                    kept = contender.call(each)
                    logits.setdefault((contender.name, each), kept)
                    for _ in range(each_turn):
                        began_s = time.perf_counter()
                        contender.call(each)
                        samples[contender.name, each].append(time.perf_counter() - began_s)
    first = contenders[0].name
    return {
        (name, each): times_of(
            values,
            None if name == first else _deviation(logits[name, each], logits[first, each]),
        )
        for (name, each), values in samples.items()
    }


def times_of(samples_s: Sequence[float], deviation: float | None = None) -> Times:
    """Median with its interval."""
    values = np.asarray(samples_s)
    interval = quantile_interval(values, 0.5)
    return Times(
        median_s=float(np.median(values)),
        low_s=max(interval.low, float(values.min())),
        high_s=min(interval.high, float(values.max())),
        passes=len(values),
        deviation=deviation,
    )


def _deviation(found: torch.Tensor, reference: torch.Tensor) -> float:
    return float((found - reference).abs().max() / reference.abs().max())


# --- predicting ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """What one pass spends outside the operators that are dispatched, measured.

    Attention, RoPE, residual adds, the embedding, and the Python of transformers. A segment that
    covers a part of the model saves what that part spends so.

    Attributes:
        outside_s: Outside of the layers, seconds.
        layers_s: In all layers but not in their MLPs.
        mlps_s: In all MLPs: the product and the calls.
        layer_call_s: Of calling one layer as a segment, its program left out: its keys and values
            are appended to the cache.
    """

    outside_s: float
    layers_s: float
    mlps_s: float
    layer_call_s: float = 0.0

    def of(self, phase: PhasePlan, *, num_layers: int) -> float:
        """What is left of it under a plan, seconds."""
        whole = sum(step.kind == "layer" for step in phase.steps)
        mlps = sum(step.kind in {"mlp", "norm_mlp"} for step in phase.steps)
        return (
            self.outside_s
            + self.layers_s * (num_layers - whole) / num_layers
            + self.mlps_s * (num_layers - whole - mlps) / num_layers
            + self.layer_call_s * whole
        )


def measure_rest(runner: Runner, home: DispatchedModel, each: Pass, *, rounds: int = 5) -> Rest:
    """Measure what a pass spends outside of dispatched operators.

    Every operator runs as a program on torch and is timed, and so are layers, MLPs and the pass;
    what is left of each is its rest. Taken within one pass, so that how fast the operators were
    meanwhile cancels out.

    Args:
        runner: Runs passes.
        home: All operators on torch.
        each: Which pass.
        rounds: The median counts.
    """
    model = runner.model
    layers = {f"model.layers.{i}": layer for i, layer in enumerate(model.model.layers)}
    found: list[tuple[float, float, float]] = []
    with home, _stopwatches(layers) as spent, home.timed() as samples:
        for _ in range(rounds + 1):
            for values in (*samples.values(), *spent.values()):
                values.clear()
            began_s = time.perf_counter()
            runner(each)
            total_s = time.perf_counter() - began_s
            found.append(_split(total_s, spent, samples))
    outside_s, layers_s, mlps_s = (statistics.median(part) for part in zip(*found[1:], strict=True))
    return Rest(
        outside_s=max(0.0, outside_s),
        layers_s=max(0.0, layers_s),
        mlps_s=max(0.0, mlps_s),
        layer_call_s=_layer_call_s(runner, each) if hasattr(model.config, "head_dim") else 0.0,
    )


def _split(
    total_s: float,
    spent: Mapping[str, Sequence[float]],
    samples: Mapping[tuple[str, str, str], Sequence[float]],
) -> tuple[float, float, float]:
    """Rests outside of layers, in layers, and in MLPs."""
    layer_s = sum(sum(v) for name, v in spent.items() if not name.endswith(".mlp"))
    mlp_s = sum(sum(v) for name, v in spent.items() if name.endswith(".mlp"))
    in_mlp_s = sum(sum(v) for (path, *_), v in samples.items() if ".mlp." in path)
    inside_s = sum(sum(v) for (path, *_), v in samples.items() if path.startswith("model.layers."))
    all_s = sum(sum(v) for v in samples.values())
    outside_s = total_s - layer_s - (all_s - inside_s)
    return outside_s, layer_s - mlp_s - (inside_s - in_mlp_s), mlp_s - in_mlp_s


@contextlib.contextmanager
def _stopwatches(layers: Mapping[str, Any]) -> Iterator[dict[str, list[float]]]:
    """Time layers and their MLPs by hooks."""
    found: dict[str, list[float]] = {}
    with ExitStack() as stack:
        for path, layer in layers.items():
            for name, module in ((path, layer), (f"{path}.mlp", layer.mlp)):
                begun: list[float] = []
                samples = found[name] = []

                def begin(*_: Any, begun: list[float] = begun, **__: Any) -> None:
                    begun.append(time.perf_counter())

                def end(
                    *_: Any, begun: list[float] = begun, samples: list[float] = samples, **__: Any
                ) -> None:
                    samples.append(time.perf_counter() - begun.pop())

                stack.callback(module.register_forward_pre_hook(begin).remove)
                stack.callback(module.register_forward_hook(end).remove)
        yield found


def _layer_call_s(runner: Runner, each: Pass, *, calls: int = 50) -> float:
    """Calling a layer's program and extending the cache, with a program that does nothing."""
    import torch

    layer = runner.model.model.layers[0]
    attention = layer.self_attn
    heads = attention.k_proj.out_features // attention.head_dim
    hidden = torch.zeros(1, each.length, attention.q_proj.in_features)
    new = torch.zeros(1, heads, each.length, attention.head_dim)
    empty = torch.empty(1, heads, 0, attention.head_dim)
    angles = (torch.zeros(1), torch.zeros(1))
    # A prefill fills a cache that is made for it.
    past = max(each.past, 1)
    samples = []
    for _ in range(calls):
        kwargs = {"position_embeddings": angles, "cache": runner.cache(past)}
        began_s = time.perf_counter()
        call_layer(layer, lambda *_: (hidden, new, new), empty, hidden, kwargs)
        samples.append(time.perf_counter() - began_s)
    return statistics.median(samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassTime:
    """A class of operators under a plan: predicted and measured.

    Attributes:
        kind: Of operator or segment.
        backend: Who runs it.
        steps: How many of them the pass has.
        predicted_s: By the table, seconds.
        measured_s: In a run with a clock around each piece, seconds.
    """

    kind: str
    backend: str
    steps: int
    predicted_s: float
    measured_s: float


def class_times(
    runner: Runner, dispatched: DispatchedModel, phase: PhasePlan, *, rounds: int = 5
) -> list[ClassTime]:
    """Time every piece of a pass, summed by class.

    Args:
        runner: Runs the pass.
        dispatched: By the plan.
        phase: Its plan for this pass.
        rounds: The median of the sums counts.
    """
    each = _pass_of(phase)
    # By the step, not by what is run: a linear may run what its norm was planned to be joined with.
    step_of = {path: s for s in phase.steps for path in (s.name, *s.covers)}
    sums: dict[tuple[str, str], list[float]] = {}
    with dispatched, dispatched.timed() as samples:
        for _ in range(rounds + 1):
            for values in samples.values():
                values.clear()
            runner(each)
            now: dict[tuple[str, str], float] = {}
            for (path, _, backend), values in samples.items():
                kind: str = step_of[path].kind
                now[kind, backend] = now.get((kind, backend), 0.0) + sum(values)
            for key, value in now.items():
                sums.setdefault(key, []).append(value)
    found = []
    for (kind, backend), values in sums.items():
        steps = [s for s in phase.steps if (s.kind, s.backend) == (kind, backend)]
        found.append(
            ClassTime(
                kind=kind,
                backend=backend,
                steps=len(steps),
                predicted_s=sum(s.predicted_s for s in steps),
                measured_s=statistics.median(values[1:]),
            )
        )
    return sorted(found, key=lambda c: -c.measured_s)


def _pass_of(phase: PhasePlan) -> Pass:
    return Pass(phase=phase.phase, length=phase.length, past=phase.past)


def switches_of(phase: PhasePlan) -> list[tuple[Step, Step]]:
    """Neighbouring steps on different backends."""
    pairs = zip(phase.steps, phase.steps[1:], strict=False)
    return [(a, b) for a, b in pairs if a.backend != b.backend]


# --- all together ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """One pass of an integrated run.

    Attributes:
        what: Which pass.
        times: By name of the contender; ``"plan"`` and ``"torch eager"`` among them.
        predicted_s: By name of the contender, seconds; those that have a plan.
        rest: What is left outside of dispatched operators.
        classes: Of the plan.
        switches: Of the plan, as "backend -> backend before module".
    """

    what: Pass
    times: Mapping[str, Times]
    predicted_s: Mapping[str, float]
    rest: Rest
    classes: Sequence[ClassTime]
    switches: Sequence[str]

    def ratio(self, over: str, of: str = "plan") -> float | None:
        """Median of one contender over another's."""
        if over not in self.times or of not in self.times:
            return None
        return self.times[of].median_s / self.times[over].median_s

    @property
    def best_static(self) -> str:
        """The fastest backend alone, torch eager as one."""
        alone = [n for n in self.times if n == EAGER or n.startswith("static ")]
        return min(alone, key=lambda n: self.times[n].median_s)


EAGER = "torch eager"
PLAN = "plan"


@dataclass(slots=True, kw_only=True)
class Integrated:
    """A model with its contenders loaded.

    Attributes:
        runner: Runs passes.
        plan: By which ``"plan"`` runs.
        dispatched: By name of the contender.
        contenders: In turns.
        notes: Facts for people.
    """

    runner: Runner
    plan: DispatchPlan
    dispatched: dict[str, DispatchedModel]
    contenders: list[Contender]
    notes: list[str] = field(default_factory=list)


def open_contenders(  # noqa: PLR0913 - what is run, and how
    model: Any,
    architecture: Architecture,
    plan: DispatchPlan,
    *,
    table: OperatorTable | None = None,
    threads: int = 1,
    say: Say = lambda _: None,
) -> Integrated:
    """Load a plan and every backend alone.

    Args:
        model: Of transformers.
        architecture: Of it.
        plan: For it.
        table: Costs that backends alone are predicted by; without one they are not predicted.
        threads: Of each call.
        say: Told what is loaded.

    Raises:
        EdgeError: The plan cannot be loaded. A static backend that cannot is noted and left out.
    """
    runner = Runner(model, vocabulary=architecture.vocab_size)
    loaded: Any = {}
    say("loading the plan")
    dispatched = {PLAN: dispatch_model(model, plan, threads=threads, loaded=loaded)}
    dispatched[PLAN].restore()
    notes = []
    traces = traces_of(architecture, [_pass_of(phase) for phase in plan.phases])
    for backend in dict.fromkeys([HOME, *plan.backends]):
        say(f"loading {backend} alone")
        try:
            if table is None:
                alone = static_plan(traces, plan, backend)
            else:
                alone = plan_for(traces, table, method=f"static:{backend}")
            dispatched[f"static {backend}"] = dispatch_model(
                model, alone, threads=threads, loaded=loaded
            )
        except EdgeError as error:
            notes.append(f"static {backend}: {error.message}")
            continue
        dispatched[f"static {backend}"].restore()
    contenders = [Contender(name=EAGER, call=runner)]
    contenders += [
        Contender(name=name, call=runner, swapped=functools.partial(_itself, each))
        for name, each in dispatched.items()
    ]
    return Integrated(
        runner=runner, plan=plan, dispatched=dispatched, contenders=contenders, notes=notes
    )


def _itself(each: DispatchedModel) -> DispatchedModel:
    return each


def static_plan(traces: Sequence[Trace], like: DispatchPlan, backend: str) -> DispatchPlan:
    """Every operator on one backend, for the passes of another plan; without costs."""
    phases = []
    for phase, trace in zip(like.phases, traces, strict=True):
        steps = tuple(
            Step(
                name=node.name,
                kind=node.shape.kind,
                backend=backend,
                covers=(node.name,),
                shapes=(node.shape.key,),
                predicted_s=math.nan,
                reason="method",
            )
            for node in trace.operators
        )
        phases.append(replace(phase, steps=steps))
    return replace(like, phases=tuple(phases), method=f"static:{backend}")


def run_integrated(
    found: Integrated,
    *,
    num_layers: int,
    rounds: int,
    extra: Sequence[Contender] = (),
    say: Say = lambda _: None,
) -> list[PassResult]:
    """Time all contenders in turns, and the plan by class; predict each from the table.

    Args:
        found: Loaded.
        num_layers: Of the model.
        rounds: Turns of each contender.
        extra: Contenders without a plan.
        say: Told how far it is.
    """
    passes = [_pass_of(phase) for phase in found.plan.phases]
    contenders = [*found.contenders, *extra]
    times = run_in_turns(contenders, passes, rounds=rounds, say=say)
    results = []
    for number, each in enumerate(passes):
        say(f"{each.what}: each operator")
        phase = found.plan.phases[number]
        rest = measure_rest(found.runner, found.dispatched[f"static {HOME}"], each)
        predicted_s = {
            name: predicted(d.plans[0].phases[number], rest, num_layers=num_layers)
            for name, d in found.dispatched.items()
        }
        results.append(
            PassResult(
                what=each,
                times={c.name: times[c.name, each] for c in contenders},
                predicted_s={name: s for name, s in predicted_s.items() if not math.isnan(s)},
                rest=rest,
                classes=class_times(found.runner, found.dispatched[PLAN], phase),
                switches=[
                    f"{a.backend} -> {b.backend} before {b.name}" for a, b in switches_of(phase)
                ],
            )
        )
    return results


def predicted(phase: PhasePlan, rest: Rest, *, num_layers: int) -> float:
    """Seconds of a pass: operators, segments and switches by the table, the rest as measured.

    Operators that stay on torch are in the rest, as they ran there.
    """
    planned_s = sum(step.predicted_s + step.switch_s for step in phase.steps)
    return planned_s + rest.of(phase, num_layers=num_layers)
