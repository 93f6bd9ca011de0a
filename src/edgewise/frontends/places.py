"""Places to cut a model of any format in two, from its graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from edgewise.errors import ConfigError, ModelError
from edgewise.frontends.partition import Place
from edgewise.model.cuts import Cut, choose_cuts, cut_runs, legal_cuts, settled_cuts, spread_cuts
from edgewise.model.graph import Graph

_INTEGERS = frozenset({"int8", "uint8", "int16"})
_DTYPES = _INTEGERS | {"float32", "float16", "float64"}

Constants = Callable[[str, str], Mapping[Any, int]]


def check_ends(name: str, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Refuse a model that does not turn one array into one array.

    Raises:
        ModelError: It has several inputs or answers, or none.
    """
    for what, found in (("input", inputs), ("answer", outputs)):
        if len(found) != 1:
            raise ModelError(
                f"expected one {what} of the model {name!r}, found {len(found)}"
                + (f": {', '.join(found)}" if found else ""),
                help="export it for one image in and one array out",
            )


def choose_places(
    graph: Graph, wanted: int | Sequence[str] | None, *, constants: Constants
) -> tuple[Place, ...]:
    """Choose where a model can be cut, its input and its answer included.

    Quantised graphs are cut where the small integers cross: between those and the next
    convolution runtimes fuse, so a cut at the float between would change the rounding.

    Args:
        graph: With one input and one output.
        wanted: How many inner places at most, names, or ``None`` for all, as `read_partitioned`.
        constants: What the operators between two tensors read: an identity and its size in bytes.

    Raises:
        ModelError: The shape of the input or of the answer is not known.
        ConfigError: A name is no place to cut, or the number is negative.
    """
    start, stop = graph.inputs[0], graph.outputs[0]
    for name in (start, stop):
        if name not in graph.tensors:
            raise ModelError(
                f"the size of {name!r} is not known before the model runs",
                help="export it for one input size",
            )
    cuts = _choose(graph, wanted, ends={start, stop})
    names = [start, *(cut.tensor.name for cut in cuts), stop]
    flops = [0.0, *(cut.flops for cut in cuts), graph.flops]
    depths = [0.0, *(min(cut.depth_ratio, 1.0) for cut in cuts), 1.0]
    sizes: dict[Hashable, int] = {}
    places = []
    for k, name in enumerate(names):
        if k:
            sizes.update(constants(names[k - 1], name))
        spec = graph.tensors[name]
        places.append(
            Place(
                tensor=name,
                shape=spec.shape,
                dtype=spec.dtype,
                nbytes=spec.nbytes,
                prefix_bytes=sum(sizes.values()),
                flops=flops[k],
                depth_ratio=depths[k],
            )
        )
    return tuple(places)


def _choose(graph: Graph, wanted: int | Sequence[str] | None, *, ends: set[str]) -> Sequence[Cut]:
    if isinstance(wanted, int) and wanted < 0:
        raise ConfigError(f"expected a number of places of at least 0, found {wanted}")
    cuts = [cut for run in _runs(graph) for cut in run]
    if wanted is None or isinstance(wanted, int):
        heavy = [i for i, op in enumerate(graph.ops) if op.is_contraction]
        # Before the first and after the last contraction a cut would only repeat the ends.
        cuts = [c for c in cuts if heavy and heavy[0] <= c.index < heavy[-1]]
        settled = settled_cuts(graph, cuts)
        if wanted is None or wanted >= len(settled):
            return settled
        taken = {c.index: c for c in spread_cuts(settled, wanted + 1)}
        return [taken[i] for i in sorted(taken)]
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    inner = [name for name in names if name not in ends]
    if inner and not cuts:
        raise ConfigError(f"no place is named {inner[0]!r}: the model can only be used whole")
    return choose_cuts(graph, inner, cuts=cuts) if inner else ()


def _runs(graph: Graph) -> list[list[Cut]]:
    """Legal cuts between the same contractions; integers alone where any cross."""
    runs = cut_runs(graph, legal_cuts(graph, dtypes=_DTYPES))
    return [[c for c in run if c.tensor.dtype in _INTEGERS] or run for run in runs]
