"""A transformer whose modules compute where a plan says, and that can be put back as it was."""

from __future__ import annotations

import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from edgewise.backends.base import import_runtime
from edgewise.backends.operators import load_operator, operator_backends
from edgewise.clock import Clock, MonotonicClock
from edgewise.dispatch.plan import DispatchPlan
from edgewise.errors import ConfigError
from edgewise.profiles.operators import OperatorShape
from edgewise.runtime.dispatching.layer import call_layer, check_version, why_not
from edgewise.runtime.dispatching.parts import Part, PhaseParts, find_parts

if TYPE_CHECKING:
    import torch
    from torch import nn

    from edgewise.backends.operators import OperatorProgram
    from edgewise.dispatch.states import StateChooser

_log = logging.getLogger(__name__)

Run = Callable[..., Any]
Loaded = dict[tuple[str, str, OperatorShape, int], "OperatorProgram"]
Programs = Mapping[int, "OperatorProgram"]  # by the part's identity
_MARK = "_edgewise_dispatched"
_REMEMBERED = 512  # sizes of inputs of one module


def dispatch_model(
    model: nn.Module,
    plan: DispatchPlan,
    *,
    threads: int = 1,
    states: StateChooser | None = None,
    loaded: Loaded | None = None,
) -> DispatchedModel:
    """Let a transformer's modules compute on the backends that a plan names.

    The modules stay the objects they are, with their parameters, names and hooks; what changes is
    their forward. Calls that no program computes (several sequences, padding, gradients) run the
    modules' own forward, are counted, and are told once to the log.

    Args:
        model: Of transformers: Llama, Qwen2, Qwen3, OLMo2 or ModernBERT, float32 on the CPU.
        plan: Made for it.
        threads: Of each call of every backend; those of the plan.
        states: Says before each pass which plan holds; ``plan`` is its calm one.
        loaded: Programs of this very model that other plans have loaded: they are used again, and
            new ones are added. Empty at first.

    Returns:
        The model, swapped; leave its ``with`` block or call ``restore()`` to put it back.

    Raises:
        ConfigError: A plan is of another model or other threads, or the model is dispatched.
        BackendUnavailable: A backend that the plan names is not here. Nothing is swapped.
        BackendError: A backend refuses an operator. Nothing is swapped.

    Example::

        with edgewise.dispatch_model(model, plan) as dispatched:
            dispatched.model.generate(tokens)
    """
    import_runtime("torch", backend="torch:cpu", extra="torch")
    plans = (plan,) if states is None else states.plans.plans
    if plans[0] != plan:
        raise ConfigError("expected the calm plan of the states", help="pass states.plans.calm")
    for each in plans:
        if each.thread_policy.threads != threads:
            raise ConfigError(
                f"the plan for state {each.state!r} is of {each.thread_policy.key}, found"
                f" threads={threads}",
                help=f"pass threads={each.thread_policy.threads}, or plan for {threads}",
            )
    if _MARK in model.__dict__:
        raise ConfigError(
            f"this {type(model).__name__} is dispatched already", help="restore() it first"
        )
    phases = [find_parts(model, each) for each in plans]
    if any(step.kind == "layer" for each in plans for p in each.phases for step in p.steps):
        check_version()
    programs = _load_all(
        [p for found in phases for p in found],
        threads=threads,
        loaded={} if loaded is None else loaded,
    )
    return DispatchedModel(model, phases, programs, plans=plans, states=states)


def _load_all(
    phases: Sequence[PhaseParts], *, threads: int, loaded: Loaded
) -> dict[int, OperatorProgram]:
    """Load a program for every part; one that takes any rows serves all lengths."""
    found: dict[int, OperatorProgram] = {}
    here = operator_backends()
    parts = [part for phase in phases for part in phase.parts.values()]
    parts.sort(key=lambda part: part.backend in here)  # what is missing is told before others load
    for part in parts:
        a = part.shape.attention
        bare = replace(part.shape, m=0, attention=None if a is None else replace(a, past=0))
        any_rows, exact = ((part.path, part.backend, s, threads) for s in (bare, part.shape))
        program = loaded.get(any_rows) or loaded.get(exact)
        if program is None:
            program = load_operator(part.shape, part.weights, part.backend, threads=threads)
            loaded[any_rows if program.any_rows else exact] = program
        found[id(part)] = program
    return found


class _Now(threading.local):
    """What one thread's forward pass runs by, from its begin to its end."""

    variant = 0


class DispatchedModel:
    """A model that runs by a plan until it is restored.

    Attributes:
        model: The transformers model itself.
        plans: For the states of the device, the calm one first.
        fallbacks: How often a module ran its own forward instead, by reason.
    """

    def __init__(
        self,
        model: nn.Module,
        phases: Sequence[Sequence[PhaseParts]],
        programs: Programs,
        *,
        plans: Sequence[DispatchPlan],
        states: StateChooser | None = None,
    ) -> None:
        import torch

        self.model: Any = model
        self.plans = tuple(plans)
        self.fallbacks: Counter[str] = Counter()
        self._states = states
        self._programs = programs
        self._grad = torch.is_grad_enabled
        self._lock = threading.Lock()
        self._now = _Now()
        self._timer: Callable[[Part, Run], Run] | None = None
        # A variant is a plan that one pass keeps to: of one state, and of one decode plan in it.
        self._variants = [v for level, found in enumerate(phases) for v in _variants(found, level)]
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._known: dict[str, list[dict[Any, Run]]] = {}
        self._before: dict[str, Any] = {}
        self.swap()

    # --- use ---

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        return self.model(*args, **kwargs)

    def __enter__(self) -> Self:
        if not self._before:
            self.swap()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.restore()

    @property
    def weight_bytes(self) -> int:
        """Memory that backends keep for copies of their own of the weights."""
        return sum({id(p): p.weight_bytes for p in self._programs.values()}.values())

    @contextmanager
    def timed(
        self, clock: Clock | None = None
    ) -> Iterator[dict[tuple[str, str, str], list[float]]]:
        """Measure each piece while the block runs; that makes the whole slower.

        One thread may run the model meanwhile.

        Args:
            clock: Read around every piece; the machine's by default.

        Yields:
            Seconds of every call by (path of the module, kind, backend).
        """
        found: dict[tuple[str, str, str], list[float]] = {}
        now_s = (clock or MonotonicClock()).now_s

        def timer(part: Part, run: Run) -> Run:
            samples = found.setdefault((part.path, part.shape.kind, part.backend), [])

            def timed(*inputs: Any) -> Any:
                began_s = now_s()
                answer = run(*inputs)
                samples.append(now_s() - began_s)
                return answer

            return timed

        self._timer = timer
        self._forget()
        try:
            yield found
        finally:
            self._timer = None
            self._forget()

    def restore(self) -> None:
        """Put every module back as it was; nothing where that is done.

        Programs stay loaded, so that ``swap()`` and ``with`` bring them back.
        """
        for path, before in reversed(self._before.items()):  # one module may have two paths
            own = self._modules[path].__dict__
            if before is None:
                own.pop("forward", None)
            else:
                own["forward"] = before
        self._before.clear()
        self.model.__dict__.pop(_MARK, None)

    def swap(self) -> None:
        """Swap again what was restored.

        Raises:
            ConfigError: The model is dispatched, by this plan or by another.
        """
        if _MARK in self.model.__dict__:
            raise ConfigError("the model is dispatched already", help="restore() it first")
        changed = [path for variant in self._variants for path in variant.paths]
        try:
            for path in dict.fromkeys(changed):
                module = self._modules[path]
                # Anew: what was remembered may be a module's forward as it was bound before.
                self._known[path] = [{} for _ in self._variants]
                whole = any(_is_layer(v, path) for v in self._variants)
                forward = self._layer(path) if whole else self._tensor(path)
                self._replace(path, module, forward)
            if len(self._variants) > 1:
                self._replace("", self.model, self._choosing(self.model.forward))
            self.model.__dict__[_MARK] = True
        except BaseException:
            self.restore()
            raise

    # --- inside ---

    def _replace(self, path: str, module: nn.Module, forward: Run) -> None:
        self._before[path] = module.__dict__.get("forward")
        module.__dict__["forward"] = forward

    def _forget(self) -> None:
        for tables in self._known.values():
            for table in tables:
                table.clear()

    def _choosing(self, forward: Run) -> Run:
        """The model's own forward, after the plan has been settled that this pass keeps to."""
        now = self._now

        @functools.wraps(forward)
        def choosing(*args: Any, **kwargs: Any) -> Any:
            now.variant = self._choose(kwargs)
            return forward(*args, **kwargs)

        return choosing

    def _choose(self, kwargs: Mapping[str, Any]) -> int:
        """Which variant: that of the state, with the decode plan nearest to the cache."""
        level = 0 if self._states is None else self._states.chosen.level
        found = [i for i, v in enumerate(self._variants) if v.level == level]
        if len(found) == 1:
            return found[0]
        cache = kwargs.get("cache")
        cache = kwargs.get("past_key_values") if cache is None else cache
        past = 0 if cache is None else int(cache.get_seq_length())
        return min(found, key=lambda i: abs(self._variants[i].past - past))

    def _tensor(self, path: str) -> Run:
        """The new forward of a module that turns one tensor into one."""
        root, is_grad, tables = self.model, self._grad, self._known[path]
        original, now = self._modules[path].forward, self._now
        if len(tables) == 1:
            table = tables[0]

            def forward(x: torch.Tensor) -> Any:
                run = table.get(x.shape)
                if run is None or is_grad() or root.training:
                    run = self._unusual(path, original, x.shape)
                return run(x)

            return forward

        def forward_of_several(x: torch.Tensor) -> Any:
            run = tables[now.variant].get(x.shape)
            if run is None or is_grad() or root.training:
                run = self._unusual(path, original, x.shape)
            return run(x)

        return forward_of_several

    def _layer(self, path: str) -> Run:
        """The new forward of a decoder layer."""
        root, is_grad, tables = self.model, self._grad, self._known[path]
        layer, now = self._modules[path], self._now
        original = layer.forward
        empty = _no_keys(layer)

        def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            run = tables[now.variant].get(hidden_states.shape)
            if run is None or is_grad() or root.training:
                run = self._unusual(path, original, hidden_states.shape)
            if run is original:
                return original(hidden_states, *args, **kwargs)
            reason = why_not(layer, hidden_states, args, kwargs)
            if reason:
                self._count(reason)
                return original(hidden_states, *args, **kwargs)
            return call_layer(layer, run, empty, hidden_states, kwargs)

        return forward

    def _unusual(self, path: str, original: Run, size: Sequence[int]) -> Run:
        """What runs for sizes that are new, and where gradients are asked for."""
        if self._grad() or self.model.training:
            self._count("gradients are on" if self._grad() else "the model is in training mode")
            return original
        run, reason = self._find(path, original, size)
        if reason:
            self._count(reason)  # each time: it is not remembered
            return run
        table = self._known[path][self._now.variant]
        if len(table) >= _REMEMBERED:
            table.clear()
        table[tuple(size)] = run
        return run

    def _find(self, path: str, original: Run, size: Sequence[int]) -> tuple[Run, str]:
        """What a module runs for an input of a size, and why it is its own forward, if it is."""
        if len(size) not in {3, 4} or size[0] != 1:
            return original, f"a batch of {size[0]}" if len(size) > 2 else "an input without batch"
        tokens = size[1]
        phase = self._variants[self._now.variant].phase_of(tokens, self._programs)
        if phase is None:
            return original, "a length that no plan is for"
        if path in phase.passing:
            return _same, ""
        part = phase.parts.get(path)
        if part is None:
            return original, ""  # inside a segment that did not run this time, or not planned
        program: Run = self._programs[id(part)]
        rows = tokens if len(size) == 3 else tokens * size[2]
        if rows != part.shape.m and not self._programs[id(part)].any_rows:
            return original, "rows that its program was not loaded for"
        return (program if self._timer is None else self._timer(part, program)), ""

    def _count(self, reason: str) -> None:
        with self._lock:
            self.fallbacks[reason] += 1
            first = self.fallbacks[reason] == 1
        if first:
            _log.warning("modules run on torch as without a plan: %s", reason)


class _Variant:
    """One plan that a whole pass keeps to."""

    def __init__(self, phases: Sequence[PhaseParts], *, level: int, past: int = 0) -> None:
        self.level, self.past = level, past
        self.prefill = [p for p in phases if p.plan.phase == "prefill"]
        self.decode = [p for p in phases if p.plan.phase == "decode"]
        self.paths = [path for p in phases for path in (*p.parts, *sorted(p.passing))]

    def phase_of(self, tokens: int, programs: Programs) -> PhaseParts | None:
        """The phase whose length is nearest, of those that can run so many tokens."""
        group = (self.decode or self.prefill) if tokens == 1 else self.prefill
        able = [
            p
            for p in group
            if p.plan.length == tokens
            or all(programs[id(part)].any_rows for part in p.parts.values())
        ]
        return min(able, key=lambda p: abs(p.plan.length - tokens), default=None)


def _variants(phases: Sequence[PhaseParts], level: int) -> list[_Variant]:
    """A variant for each decode plan, since a module cannot see how much is in the cache."""
    decode = [p for p in phases if p.plan.phase == "decode"]
    rest = [p for p in phases if p.plan.phase != "decode"]
    if not decode:
        return [_Variant(rest, level=level)]
    return [_Variant([*rest, p], level=level, past=p.plan.past) for p in decode]


def _is_layer(variant: _Variant, path: str) -> bool:
    phases = (*variant.prefill, *variant.decode)
    return any(path in p.parts and p.parts[path].shape.kind == "layer" for p in phases)


def _no_keys(layer: Any) -> torch.Tensor:
    import torch

    attention = layer.self_attn
    heads = attention.k_proj.out_features // attention.head_dim
    return torch.empty(1, heads, 0, attention.head_dim)


def _same(x: Any) -> Any:
    """What a norm does that its readers compute."""
    return x
