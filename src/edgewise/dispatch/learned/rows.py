"""What selectors learn from: one row for each shape group of the paper, with costs and features."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edgewise.dispatch.forward import Rule, paper_traces
from edgewise.dispatch.problem import Float64, Objective
from edgewise.dispatch.trace import Node, Phase, Trace
from edgewise.errors import ProfileError
from edgewise.model.transformer import Architecture
from edgewise.profiles.operators import OperatorShape, OperatorTable

Int64 = npt.NDArray[np.int64]

# Batch 1 and FP32 are the same everywhere, and a model's name says no more than its sizes do.
FEATURES = (
    "linear",
    "activation",
    "rmsnorm",
    "layernorm",
    "gelu",
    "decode",
    "log2 length",
    "log2 hidden",
    "log2 intermediate",
    "log2 m",
    "log2 n",
    "log2 k",
    "log2 output bytes",
)
CATEGORIES = 6  # the features before the sizes


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Context:
    """All that a selector is told about an operator; equal contexts are one group of the paper.

    Attributes:
        shape: Of the operator, without its bias, as the paper's groups have none.
        phase: Prefill or decode.
        length: Tokens that go into the model.
        hidden: Width of the model's residual stream.
        intermediate: Width inside its MLP.
    """

    shape: OperatorShape
    phase: Phase
    length: int
    hidden: int
    intermediate: int

    @property
    def key(self) -> str:
        """The context in one line."""
        return f"{self.shape.key}, {self.phase} {self.length}, in {self.hidden}x{self.intermediate}"

    def features(self) -> list[float]:
        """Numbers in the order of `FEATURES`."""
        s = self.shape
        sizes = (self.length, self.hidden, self.intermediate, s.m, s.n, s.k, s.output_bytes)
        return [
            *(float(s.kind == kind) for kind in FEATURES[:4]),
            float(s.function == "gelu"),
            float(self.phase == "decode"),
            *(float(np.log2(max(size, 1))) for size in sizes),
        ]


def context_of(architecture: Architecture, trace: Trace, node: Node) -> Context:
    """What a selector is told about an operator of a trace."""
    s = node.shape
    return Context(
        shape=OperatorShape(kind=s.kind, m=s.m, k=s.k, n=s.n, function=s.function),
        phase=trace.phase,
        length=trace.length,
        hidden=architecture.hidden_size,
        intermediate=architecture.intermediate_size,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """G groups, with what each costs on B backends.

    Attributes:
        contexts: Of each group. [G].
        models: Whose each group is; the paper's key has the model's sizes in it. [G].
        counts: Operators in the traces. [G].
        backends: Names. [B].
        op_s: Seconds, [G, B]; ``inf`` where it cannot run.
        op_j: Joules, [G, B]; ``None`` where any is unknown.
        switch_s: Seconds from row to column, [G, B, B].
        switch_j: Joules; ``None`` where any is unknown.
        left_out: Keys of groups of which the table has no usable cost.
    """

    contexts: tuple[Context, ...]
    models: tuple[str, ...]
    counts: Int64
    backends: tuple[str, ...]
    op_s: Float64
    op_j: Float64 | None
    switch_s: Float64
    switch_j: Float64 | None
    left_out: tuple[str, ...] = ()

    @property
    def features(self) -> Float64:
        """[G, F]."""
        return np.array([context.features() for context in self.contexts]).reshape(
            -1, len(FEATURES)
        )

    def take(self, chosen: npt.NDArray[Any]) -> Rows:
        """Some of the groups, by number or as a mask."""
        numbers = np.arange(len(self.contexts))[chosen]
        return Rows(
            contexts=tuple(self.contexts[i] for i in numbers),
            models=tuple(self.models[i] for i in numbers),
            counts=self.counts[numbers],
            backends=self.backends,
            op_s=self.op_s[numbers],
            op_j=None if self.op_j is None else self.op_j[numbers],
            switch_s=self.switch_s[numbers],
            switch_j=None if self.switch_j is None else self.switch_j[numbers],
        )

    def costs(self, objective: Objective, *, transition: bool) -> Float64:
        """What a choice costs by the objective.

        Args:
            objective: EDP is the paper's proxy: latency times energy of the one operator, each
                with its switch. It is not the part that the operator has in a trace's EDP.
            transition: Count the switch from each backend that may have run before.

        Returns:
            [G, B], or [G, B before, B] with transitions.

        Raises:
            ProfileError: It needs energy, which is not known.
        """
        seconds, joules = self.op_s, self.op_j
        if transition:
            seconds = seconds[:, None, :] + self.switch_s
            if joules is not None and self.switch_j is not None:
                joules = joules[:, None, :] + self.switch_j
            else:
                joules = None
        if objective == "latency":
            return seconds
        if joules is None:
            raise ProfileError(
                f"the objective {objective!r} needs energy, which was not measured",
                help="measure where there is an energy meter, or take the objective latency",
            )
        return joules if objective == "energy" else seconds * joules

    def digest(self) -> str:
        """SHA-256 of everything that is learned from."""
        words = [*self.backends, *(context.key for context in self.contexts)]
        found = hashlib.sha256("\n".join(words).encode())
        for array in (self.op_s, self.op_j, self.switch_s, self.switch_j):
            found.update(b"none" if array is None else np.ascontiguousarray(array).tobytes())
        return found.hexdigest()


def training_rows(
    architectures: Sequence[Architecture],
    table: OperatorTable,
    *,
    backends: Sequence[str] | None = None,
    rule: Rule = "clean",
) -> Rows:
    """One row for each shape group of some models' traces.

    A group whose operators differ in bias costs what the first of them costs.

    Args:
        architectures: The models.
        table: Costs.
        backends: Which may be chosen; all of the table's by default.
        rule: How operators are counted.

    Raises:
        ProfileError: No group has a usable cost, or a switch between two backends is missing.
    """
    names = tuple(backends) if backends is not None else table.backends()
    first: dict[Context, tuple[OperatorShape, str]] = {}
    counts: dict[Context, int] = {}
    for architecture in architectures:
        for trace in paper_traces(architecture, rule=rule):
            for node in trace.operators:
                context = context_of(architecture, trace, node)
                first.setdefault(context, (node.shape, architecture.name))
                counts[context] = counts.get(context, 0) + 1
    op_s = np.full((len(first), len(names)), np.inf)
    op_j = np.full_like(op_s, np.nan)
    for g, (shape, _) in enumerate(first.values()):
        for b, name in enumerate(names):
            cost = table.costs.get((shape, name))
            if cost is not None and cost.usable and cost.latency is not None:
                op_s[g, b] = cost.latency.median_s
                op_j[g, b] = np.nan if cost.energy.energy_j is None else cost.energy.energy_j
    known = np.isfinite(op_s).any(axis=1)
    contexts = tuple(context for context, here in zip(first, known, strict=True) if here)
    if not contexts:
        raise ProfileError(
            f"table {table.name!r} has a usable cost of none of the {len(first)} shape groups on"
            f" {', '.join(names) or 'any backend'}",
            help="edgewise dispatch measure adds what is missing",
        )
    sizes = np.array([context.shape.input_bytes for context in contexts], dtype=np.float64)
    switch_s, switch_j = _switches(table, names, sizes)
    op_s, op_j = op_s[known], op_j[known]
    joules_known = not np.isnan(op_j[np.isfinite(op_s)]).any()
    return Rows(
        contexts=contexts,
        models=tuple(first[context][1] for context in contexts),
        counts=np.array(list(counts.values()))[known],
        backends=names,
        op_s=op_s,
        op_j=np.where(np.isfinite(op_s), op_j, np.inf) if joules_known else None,
        switch_s=switch_s,
        switch_j=None if np.isnan(switch_j).any() else switch_j,
        left_out=tuple(c.key for c, here in zip(first, known, strict=True) if not here),
    )


def _switches(
    table: OperatorTable, names: Sequence[str], sizes: Float64
) -> tuple[Float64, Float64]:
    """[G, B, B] seconds and joules of handing over so many bytes; NaN where unknown."""
    switch_s = np.zeros((len(sizes), len(names), len(names)))
    switch_j = np.zeros_like(switch_s)
    for a, source in enumerate(names):
        for b, target in enumerate(names):
            if a == b:
                continue
            cost = table.switch(source, target)
            switch_s[:, a, b] = [cost.at_s(size) for size in sizes]
            joules = [cost.at_j(size) for size in sizes]
            switch_j[:, a, b] = [np.nan if j is None else j for j in joules]
    return switch_s, switch_j
