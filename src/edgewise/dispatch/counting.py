"""How many operators, groups and measured rows traces come to, by either rule of counting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from edgewise.dispatch.forward import group_key
from edgewise.dispatch.trace import Trace
from edgewise.model.transformer import Architecture


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """What some forward passes consist of.

    Attributes:
        forwards: Forward passes.
        instances: Operators whose backend is chosen.
        by_kind: The same by kind.
        fixed: Operators that stay on torch.
        groups: Distinct operators as the paper tells them apart: see
            :func:`edgewise.dispatch.forward.group_key`.
        shapes: Distinct shapes, bias included: what is measured.
        flops: Of all instances, twice the multiply-accumulates.
        weight_bytes: Of the parameters that one pass reads, each tensor once; summed over models.
    """

    forwards: int
    instances: int
    by_kind: Mapping[str, int] = field(default_factory=dict)
    fixed: int
    groups: int
    shapes: int
    flops: int
    weight_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateCount:
    """What the paper calls rows, for groups of operators on B backends.

    Attributes:
        shape_backend_rows: Measured: one for each group and backend.
        contexts: Decisions to make: one for each group and backend that ran before.
        candidate_rows: Choices in all contexts.
        same_backend: Of those, that stay where the operator before ran.
        directed_changes: Of those, that go elsewhere.
    """

    shape_backend_rows: int
    contexts: int
    candidate_rows: int
    same_backend: int
    directed_changes: int


def count(traces: Sequence[tuple[Architecture, Trace]]) -> Count:
    """Count what forward passes consist of.

    Args:
        traces: Each with the model it is of.
    """
    kinds: Counter[str] = Counter()
    groups, shapes = set(), set()
    weights: dict[tuple[str, str], int] = {}
    flops = fixed = 0
    for architecture, trace in traces:
        for node in trace.nodes:
            if not node.supported:
                fixed += 1
                continue
            kinds[node.shape.kind] += 1
            groups.add(group_key(architecture, trace, node))
            shapes.add(node.shape)
            flops += node.shape.flops
            weights[trace.model, node.name] = node.shape.weight_bytes
    return Count(
        forwards=len(traces),
        instances=kinds.total(),
        by_kind=dict(kinds),
        fixed=fixed,
        groups=len(groups),
        shapes=len(shapes),
        flops=flops,
        weight_bytes=sum(weights.values()),
    )


def candidates(groups: int, *, backends: int = 3) -> CandidateCount:
    """Count the paper's rows.

    Example:
        >>> candidates(278).candidate_rows
        2502
    """
    contexts = groups * backends
    return CandidateCount(
        shape_backend_rows=groups * backends,
        contexts=contexts,
        candidate_rows=contexts * backends,
        same_backend=contexts,
        directed_changes=contexts * (backends - 1),
    )
