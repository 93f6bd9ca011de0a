"""Where a model may be cut in two with one tensor crossing, and which of those places to use."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from numbers import Integral, Real

from edgewise.errors import ConfigError, ModelError, nearest_names
from edgewise.model.graph import Graph, TensorSpec

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


def _on_a_path(graph: Graph) -> list[int]:
    """Indices of the operators that lie between an input and an output.

    The others can be ignored: what depends on no input each side of a cut can compute again, and
    what no output depends on need not be computed at all.
    """
    needed = set(graph.outputs)
    useful = set()
    for i in range(len(graph.ops) - 1, -1, -1):
        if not needed.isdisjoint(graph.ops[i].outputs):
            useful.add(i)
            needed.update(graph.ops[i].inputs)
    dependent = set(graph.inputs)
    found = []
    for i, op in enumerate(graph.ops):
        if i in useful and not dependent.isdisjoint(op.inputs):
            dependent.update(op.outputs)
            found.append(i)
    return found


def legal_cuts(graph: Graph, *, dtypes: Collection[str] = _FLOAT_TYPES) -> tuple[Cut, ...]:
    """Find every place where the graph falls in two with one tensor crossing.

    Liveness over the operator order: after each operator, the tensors written so far and still
    read later. One live tensor is a cut. Tensors that depend on no input do not count, since either
    side can compute them.

    The order cannot hide a cut: an operator that is neither before nor after a tensor lies on a
    path around it, so that tensor does not separate the graph in any order. Nor do views need a
    rule of their own: where several views of one tensor cross, the tensor alone crossed before
    they were taken.

    Args:
        graph: The operators.
        dtypes: Element types that may cross: floating point by default, which a head can read.

    Returns:
        Cuts in order, without the inputs and the outputs. Two cuts never name the same tensor.

    Source:
        Live-variable analysis, as in any compiler text; held against the definition (remove the
        tensor, look for a path around it) in ``tests/model/test_cuts.py``.
    """
    on_path = _on_a_path(graph)
    writers = {name: i for i in on_path for name in graph.ops[i].outputs}
    last_use: dict[str, int] = dict.fromkeys(graph.inputs, -1)
    for i in on_path:
        last_use.update((n, i) for n in graph.ops[i].inputs if n in writers or n in last_use)
    last_use.update(dict.fromkeys(graph.outputs, len(graph.ops)))

    total = graph.flops
    live = {name for name in graph.inputs if last_use[name] >= 0}
    done = list(itertools.accumulate(op.flops for op in graph.ops))
    cuts: list[Cut] = []
    seen = set(graph.inputs) | set(graph.outputs)
    for i in on_path:
        live.update(n for n in graph.ops[i].outputs if n in last_use)
        live = {n for n in live if last_use[n] > i}
        if len(live) != 1:
            continue
        (name,) = live
        spec = graph.tensors.get(name)
        if name in seen or spec is None or spec.dtype not in dtypes:
            continue
        seen.add(name)
        cuts.append(
            Cut(
                index=i,
                tensor=spec,
                flops=done[i],
                depth_ratio=done[i] / total if total else (i + 1) / len(graph.ops),
                scope=graph.ops[writers[name]].scope,
            )
        )
    return tuple(cuts)


def cut_runs(graph: Graph, cuts: Sequence[Cut]) -> list[list[Cut]]:
    """Group cuts that lie between the same two contractions.

    Between two convolutions the normalisation and activation move no work, so the cuts there
    differ only in what crosses.
    """
    runs: list[list[Cut]] = []
    for cut in cuts:
        between = graph.ops[runs[-1][-1].index + 1 : cut.index + 1] if runs else ()
        if not runs or any(op.is_contraction for op in between):
            runs.append([])
        runs[-1].append(cut)
    return runs


def settled_cuts(graph: Graph, cuts: Sequence[Cut]) -> list[Cut]:
    """Keep one cut of each run: the smallest tensor wins, then the latest.

    Fused runtimes would otherwise have a convolution and its normalisation torn apart.
    """
    return [min(reversed(run), key=lambda c: c.tensor.nbytes) for run in cut_runs(graph, cuts)]


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


def spread_cuts(cuts: Sequence[Cut], parts: int) -> list[Cut]:
    """Take cuts for so many parts of about equal work; one may be taken twice."""
    step = 1.0 / parts
    return [_nearest(cuts, (k + 1) * step, step=step) for k in range(parts - 1)]


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
        fewer still where several wanted depths have the same best place. Counts and fractions
        take only tensors that a head can be put on (maps and tokens), if the model has any.

    Raises:
        ModelError: The model has no legal cut.
        ConfigError: The count is below one, a fraction is outside (0, 1], or a name has no cut.
    """
    count, wanted = (int(exits), ()) if isinstance(exits, int | Integral) else (None, exits)
    if isinstance(wanted, str):
        wanted = (wanted,)
    if count is not None and count < 1:
        raise ConfigError(f"expected at least one exit, found exits={count}")
    if count == 1:
        return ()
    if count is None and len(wanted) == 0:
        raise ConfigError("expected at least one exit, found an empty list")
    found = list(legal_cuts(graph) if cuts is None else cuts)
    if not found:
        raise ModelError(
            f"the model has no legal cut: at every place more than one tensor crosses"
            f" ({len(graph.ops)} operators searched)",
            help="pass exits=1 to run it whole, or stage a model whose blocks follow one another",
        )
    places = [c for c in found if len(c.tensor.shape) in (3, 4)] or found
    candidates = settled_cuts(graph, places)
    if count is not None:
        chosen = spread_cuts(candidates, count)
    else:
        chosen = [
            _by_name(found, w) if isinstance(w, str) else _at_fraction(candidates, w)
            for w in wanted
            if isinstance(w, str) or w != 1.0
        ]
    unique = {cut.index: cut for cut in chosen}
    return tuple(unique[i] for i in sorted(unique))


def _at_fraction(cuts: Sequence[Cut], ratio: float) -> Cut:
    if isinstance(ratio, bool) or not isinstance(ratio, Real) or not 0.0 < ratio <= 1.0:
        raise ConfigError(
            f"expected exit fractions in (0, 1], found {ratio!r}",
            help="give fractions of the model's FLOPs, for example exits=[0.25, 0.5, 1.0]",
        )
    return min(cuts, key=lambda c: abs(c.depth_ratio - ratio))


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
