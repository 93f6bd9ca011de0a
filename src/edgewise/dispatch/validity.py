"""Whether a plan can run: it covers a model once and in order, and its pieces have no cycle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from edgewise.dispatch.plan import DispatchPlan, PhasePlan, Step
from edgewise.dispatch.trace import Candidate, Trace
from edgewise.errors import BackendUnavailable, ConfigError, nearest_names
from edgewise.profiles.records import ThreadPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """What goes into a piece of a plan and comes out of it; each tensor once.

    Attributes:
        name: Of the piece.
        backend: Who runs it.
        inputs: Names of the tensors it reads from outside.
        outputs: Names of those that others read, or that are the answer.
        size_bytes: Of all of them.
    """

    name: str
    backend: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCheck:
    """What was found in a plan that can run.

    Attributes:
        boundaries: Of the pieces of each phase.
        warnings: What makes its predictions doubtful here.
    """

    boundaries: tuple[tuple[Boundary, ...], ...]
    warnings: tuple[str, ...] = ()


def check_plan(
    plan: DispatchPlan,
    traces: Sequence[Trace],
    *,
    backends: Collection[str],
    thread_policy: ThreadPolicy | None = None,
    device_id: str | None = None,
) -> PlanCheck:
    """Check that a plan can run here, and that it means what it says.

    Args:
        plan: What to check.
        traces: The model's forward passes; one for each phase of the plan, in order.
        backends: Names of those that are here.
        thread_policy: In force here; ``None`` does not ask.
        device_id: Of this device; ``None`` does not ask.

    Raises:
        ConfigError: The plan is of another model, or leaves out, repeats or disorders operators;
            a segment is none of the model's, or data would leave it and come back.
        BackendUnavailable: It names a backend that is not here.
    """
    if len(plan.phases) != len(traces):
        raise ConfigError(
            f"the plan of {plan.model!r} has {len(plan.phases)} phases, found {len(traces)} traces"
        )
    _check_backends(plan, backends)
    boundaries = tuple(
        check_phase(phase, trace) for phase, trace in zip(plan.phases, traces, strict=True)
    )
    warnings = []
    if device_id is not None and device_id != plan.device_id:
        warnings.append(
            f"the plan is for device {plan.device_id}, this is {device_id}: costs differ here;"
            " edgewise dispatch measure, then plan again"
        )
    if thread_policy is not None and thread_policy != plan.thread_policy:
        warnings.append(
            f"the plan is for {plan.thread_policy.key}, in force is {thread_policy.key}: costs"
            " differ"
        )
    return PlanCheck(boundaries=boundaries, warnings=tuple(warnings))


def _check_backends(plan: DispatchPlan, here: Collection[str]) -> None:
    used = {step.backend: step for phase in plan.phases for step in phase.steps}
    for name, step in used.items():
        if name not in here:
            raise BackendUnavailable(
                f"the plan of {plan.model!r} runs {step.name!r} on {name!r}, which is not"
                f" available; here are {', '.join(sorted(here))}",
                help=f"install it (see edgewise doctor), or plan without it: edgewise dispatch plan"
                f" {plan.model} --backends {','.join(sorted(here))}",
            )


def check_phase(phase: PhasePlan, trace: Trace) -> tuple[Boundary, ...]:
    """Check one phase against the forward pass it is for.

    Returns:
        The boundary of each step, in order.

    Raises:
        ConfigError: As :func:`check_plan`.
    """
    where = f"plan of {trace.model!r}, {phase.what}"
    if (phase.phase, phase.length, phase.past) != (trace.phase, trace.length, trace.past):
        raise ConfigError(f"{where}: the forward pass is {trace.what}")
    _check_cover(phase, trace, where)
    pieces = [_nodes_of(step, trace) for step in phase.steps]
    if circle := find_circle(trace, pieces):
        names = [phase.steps[n].name if n >= 0 else trace.nodes[-1 - n].name for n in circle]
        raise ConfigError(
            f"{where}: data goes round in a circle: {' -> '.join(names)}",
            help="split the segment that it leaves and enters again",
        )
    _check_order(phase, trace, where)
    for step in phase.steps:
        _check_segment(step, trace, where)
    return tuple(
        boundary(trace, piece, name=step.name, backend=step.backend)
        for step, piece in zip(phase.steps, pieces, strict=True)
    )


def boundary(trace: Trace, nodes: Collection[int], *, name: str, backend: str) -> Boundary:
    """Tensors that cross into and out of some nodes; the fewest there can be: each once.

    Args:
        trace: The forward pass.
        nodes: Numbers of the nodes.
        name: Of the piece.
        backend: Who runs it.
    """
    inside = set(nodes)
    made = {trace.nodes[i].output for i in inside}
    read = dict.fromkeys(t for i in sorted(inside) for t in trace.nodes[i].inputs)
    outside = {t for i, n in enumerate(trace.nodes) if i not in inside for t in n.inputs}
    if trace.nodes:
        outside.add(trace.nodes[-1].output)
    inputs = [t for t in read if t not in made]
    outputs = [t for t in sorted(made) if t in outside]
    return Boundary(
        name=name,
        backend=backend,
        inputs=tuple(trace.tensors[t].name for t in inputs),
        outputs=tuple(trace.tensors[t].name for t in outputs),
        size_bytes=sum(trace.tensors[t].size_bytes for t in (*inputs, *outputs)),
    )


def find_circle(trace: Trace, pieces: Sequence[Collection[int]]) -> tuple[int, ...]:
    """Find pieces of which none can run first, since each waits for data of another.

    That is so where data leaves a piece and comes back to it.

    Args:
        trace: The forward pass.
        pieces: Numbers of the nodes of each; no node in two.

    Returns:
        Numbers of the pieces in the circle, the first again at the end; a node that is in no piece
        stands there as -1 less its number. Empty where there is no circle.
    """
    owner = {node: number for number, piece in enumerate(pieces) for node in piece}
    makers = {node.output: i for i, node in enumerate(trace.nodes)}
    graph: dict[int, set[int]] = {}
    for i, node in enumerate(trace.nodes):
        mine = owner.get(i, -1 - i)
        before = (makers[t] for t in node.inputs if t in makers)
        graph.setdefault(mine, set()).update(
            theirs for j in before if (theirs := owner.get(j, -1 - j)) != mine
        )
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return tuple(error.args[1])
    return ()


def _check_cover(phase: PhasePlan, trace: Trace, where: str) -> None:
    wanted = [node.name for node in trace.operators]
    covered = Counter(name for step in phase.steps for name in step.covers)
    for name, times in covered.items():
        if name not in wanted:
            raise ConfigError(
                f"{where}: it names operator {name!r}, which the model has not;"
                f" {nearest_names(name, wanted)}",
                help=_AGAIN,
            )
        if times > 1:
            raise ConfigError(f"{where}: operator {name!r} is covered {times} times", help=_AGAIN)
    missing = [name for name in wanted if name not in covered]
    if missing:
        raise ConfigError(
            f"{where}: {len(missing)} operators have no backend, first {missing[0]!r}", help=_AGAIN
        )


def _check_order(phase: PhasePlan, trace: Trace, where: str) -> None:
    covered = [name for step in phase.steps for name in step.covers]
    for found, node in zip(covered, trace.operators, strict=True):
        if found != node.name:
            raise ConfigError(f"{where}: {found!r} stands where {node.name!r} runs", help=_AGAIN)


_AGAIN = "make the plan again: edgewise dispatch plan"


def _check_segment(step: Step, trace: Trace, where: str) -> None:
    if len(step.covers) > 1 and _candidate(step, trace) is None:
        raise ConfigError(
            f"{where}: {step.name!r} joins {', '.join(step.covers)} as one {step.kind}, which is"
            " no segment of this model",
            help=_AGAIN,
        )


def _nodes_of(step: Step, trace: Trace) -> frozenset[int]:
    """Numbers of the nodes that a step computes; in a segment, those that stay on torch too."""
    candidate = _candidate(step, trace)
    if candidate is not None:
        return frozenset(range(candidate.start, candidate.stop))
    nodes = enumerate(trace.nodes)
    return frozenset(i for i, node in nodes if node.supported and node.name in step.covers)


def _candidate(step: Step, trace: Trace) -> Candidate | None:
    for candidate in trace.candidates:
        inside = trace.nodes[candidate.start : candidate.stop]
        covers = tuple(node.name for node in inside if node.supported)
        if (candidate.kind, covers) == (step.kind, step.covers):
            return candidate
    return None
