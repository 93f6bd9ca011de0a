"""Where a model may be cut in two with one tensor crossing, and which of those places to use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from edgewise.errors import ConfigError, ModelError, nearest_names
from edgewise.model.graph import Graph, Op, TensorSpec

_FLOAT_TYPES = ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A place where exactly one tensor crosses from the operators before to those after.

    Attributes:
        index: The cut lies after ``graph.ops[index]``.
        tensor: The tensor that crosses.
        flops: Work before the cut, for one sample.
        depth_ratio: That work as a share of the whole graph's, 0 to 1.
        scope: Module path of the operator that wrote the tensor, ``""`` where unknown.
    """

    index: int
    tensor: TensorSpec
    flops: float
    depth_ratio: float
    scope: str


def _free_of_inputs(graph: Graph) -> set[str]:
    """Names of tensors that depend on no input: each slice can compute them again for nothing."""
    dependent = set(graph.inputs)
    for op in graph.ops:
        if any(name in dependent for name in op.inputs):
            dependent.update(op.outputs)
    return {name for op in graph.ops for name in op.outputs} - dependent


def legal_cuts(graph: Graph) -> tuple[Cut, ...]:
    """Find every place where the graph falls in two with one tensor crossing.

    Liveness over the operator order: after each operator, the tensors written so far and still
    read later. One live tensor is a cut. Tensors that depend on no input do not count, since either
    side can compute them. Several live tensors that are all views of one count as that one, since
    a view costs nothing to make again.

    The order cannot hide a cut: an operator that is neither before nor after a tensor lies on a
    path around it, so that tensor does not separate the graph in any order.

    Args:
        graph: The operators.

    Returns:
        Cuts in order, without the inputs and the last output. Two cuts never name the same tensor.

    Source:
        Live-variable analysis, as in any compiler text; brute force over all pairs of tensors in
        ``tests/model/test_cuts.py``.
    """
    constant = _free_of_inputs(graph)
    last_use: dict[str, int] = dict.fromkeys(graph.outputs, len(graph.ops))
    for i, op in enumerate(graph.ops):
        for name in op.inputs:
            last_use[name] = max(last_use.get(name, -1), i)

    view_of = {op.outputs[0]: op.inputs[0] for op in graph.ops if op.is_view and op.inputs}

    def root(name: str) -> str:
        while name in view_of:
            name = view_of[name]
        return name

    total = graph.flops
    scopes = {name: op.scope for op in graph.ops for name in op.outputs}
    live = {name for name in graph.inputs if name in last_use}
    done = 0.0
    cuts: list[Cut] = []
    seen = set(graph.inputs) | set(graph.outputs)
    for i, op in enumerate(graph.ops):
        done += op.flops
        live.update(n for n in op.outputs if n not in constant and last_use.get(n, -1) > i)
        live = {n for n in live if last_use[n] > i}
        crossing = live if len(live) == 1 else {root(n) for n in live}
        if len(crossing) != 1:
            continue
        (name,) = crossing
        spec = graph.tensors.get(name)
        if name in seen or spec is None or spec.dtype not in _FLOAT_TYPES:
            continue
        seen.add(name)
        cuts.append(
            Cut(
                index=i,
                tensor=spec,
                flops=done,
                depth_ratio=done / total if total else (i + 1) / len(graph.ops),
                scope=scopes.get(name, ""),
            )
        )
    return tuple(cuts)


def _settled(graph: Graph, cuts: Sequence[Cut]) -> list[Cut]:
    """Keep one cut per run of operators without a contraction between them.

    Between two convolutions the normalisation and activation move no work, so the cuts there
    differ only in what crosses. The smallest tensor wins, then the latest: fused runtimes
    would otherwise have a convolution and its normalisation torn apart.
    """
    kept: list[Cut] = []
    for cut in cuts:
        previous = kept[-1] if kept else None
        if previous is not None and not any(
            op.is_contraction for op in graph.ops[previous.index + 1 : cut.index + 1]
        ):
            if cut.tensor.nbytes <= previous.tensor.nbytes:
                kept[-1] = cut
        else:
            kept.append(cut)
    return kept


def _nearest(cuts: Sequence[Cut], ratio: float, *, step: float) -> Cut:
    """Take a cut near a depth, trading closeness for a smaller crossing tensor.

    Half a step away costs as much as a tensor four times as large: what crosses is converted and
    copied at every request, while a few per cent of depth hardly move an exit's accuracy. Cuts more
    than half a step away are taken only where there is no nearer one.
    """
    near = [c for c in cuts if abs(c.depth_ratio - ratio) <= step / 2]
    if not near:
        return min(cuts, key=lambda c: abs(c.depth_ratio - ratio))
    return min(
        near,
        key=lambda c: abs(c.depth_ratio - ratio) / step + 0.25 * math.log2(max(c.tensor.nbytes, 1)),
    )


def choose_cuts(
    graph: Graph,
    exits: int | Sequence[float] | Sequence[str] = 8,
    *,
    cuts: Sequence[Cut] | None = None,
) -> tuple[Cut, ...]:
    """Choose the inner boundaries of stages: all exits but the last, which is the model's end.

    Args:
        graph: The operators.
        exits: A count: that many exits at equal steps of FLOPs, the last at the model's end.
            Fractions of the FLOPs, in (0, 1]: the nearest cut to each. Names: of a tensor, or of
            a module, whose last legal cut is taken.
        cuts: The legal cuts, when already found.

    Returns:
        Inner cuts in order of depth, without duplicates; one fewer than the exits wanted, or
        fewer still where the model has not that many places.

    Raises:
        ModelError: The model has no legal cut.
        ConfigError: The count is below one, a fraction is outside (0, 1], or a name has no cut.
    """
    if isinstance(exits, int):
        if exits < 1:
            raise ConfigError(f"expected at least one exit, found exits={exits}")
        if exits == 1:
            return ()
    found = list(legal_cuts(graph) if cuts is None else cuts)
    if not found:
        raise ModelError(
            f"the model has no legal cut: at every place more than one tensor crosses"
            f" ({len(graph.ops)} operators searched)",
            help="pass exits=1 to run it whole, or stage a model whose blocks follow one another",
        )
    if isinstance(exits, int):
        candidates = _settled(graph, found)
        step = 1.0 / exits
        chosen = [_nearest(candidates, (k + 1) * step, step=step) for k in range(exits - 1)]
    else:
        candidates = _settled(graph, found)
        chosen = []
        for wanted in exits:
            if isinstance(wanted, str):
                chosen.append(_by_name(found, wanted))
            elif isinstance(wanted, bool) or not 0.0 < wanted <= 1.0:
                raise ConfigError(
                    f"expected exit fractions in (0, 1], found {wanted!r}",
                    help="give fractions of the model's FLOPs, for example exits=[0.25, 0.5, 1.0]",
                )
            elif wanted < 1.0:
                chosen.append(min(candidates, key=lambda c: abs(c.depth_ratio - wanted)))
    unique = {cut.index: cut for cut in chosen}
    return tuple(unique[i] for i in sorted(unique))


def _by_name(cuts: Sequence[Cut], name: str) -> Cut:
    """The cut at a tensor of that name, else the last cut inside a module of that name."""
    for cut in cuts:
        if cut.tensor.name == name:
            return cut
    inside = [c for c in cuts if c.scope == name or c.scope.startswith(name + ".")]
    if not inside:
        scopes = {c.scope for c in cuts if c.scope} | {c.tensor.name for c in cuts}
        raise ConfigError(
            f"no legal cut is named {name!r}",
            help=nearest_names(name, scopes),
        )
    return inside[-1]


def contraction_flops(ops: Sequence[Op]) -> float:
    """Work of convolutions and matrix products alone, for one sample."""
    return math.fsum(op.flops for op in ops if op.is_contraction)
