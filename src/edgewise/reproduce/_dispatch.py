"""What the claims of transition-aware dispatch share: the paper's values, tables, and replays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgewise.dispatch.forward import paper_traces
from edgewise.dispatch.problem import Objective
from edgewise.dispatch.replay import Replay, missing_shapes, replay
from edgewise.dispatch.trace import Trace
from edgewise.errors import ProfileError
from edgewise.model.transformer import load_architecture
from edgewise.profiles.operator_tables import default_operator_table, load_operator_table
from edgewise.profiles.operators import OperatorTable
from edgewise.profiling.jetson_operators import jetson_like_table
from edgewise.reproduce.registry import Figure, Setup, Verdict

SOURCE = "Transition-Aware Backend Dispatch for Edge LLM Inference"
ON_THE_BOARD = (
    "Jetson Orin Nano, 25 W mode, FP32; torch eager on CPU and CUDA and ONNX Runtime on CPU;"
    " measured operators, replayed, never run together"
)
MODELS = (  # in the order of the paper's text
    "modernbert-base",
    "olmo2-1b",
    "tinyllama-1.1b",
    "qwen2.5-0.5b",
    "qwen3-0.6b",
    "smollm2-360m",
    "smollm2-135m",
)
SIMULATED = "jetson-like"

# Gains over the best static backend, per cent.
PAPER_GREEDY: dict[Objective, float] = {"latency": 17.4, "energy": 14.4, "edp": 28.5}
PAPER_LOCAL: dict[Objective, float] = {"latency": 16.8, "energy": 13.7, "edp": 27.4}
PAPER_FEWER: dict[Objective, float] = {
    "latency": 14.9,
    "energy": 14.8,
    "edp": 14.0,
}  # backend switches, per cent
PAPER_EDP = {
    "modernbert-base": 14.2,
    "olmo2-1b": 14.1,
    "qwen2.5-0.5b": 32.1,
    "qwen3-0.6b": 30.5,
    "smollm2-360m": 37.2,
    "smollm2-135m": 57.3,
}
PAPER_SMALLEST: dict[Objective, float] = {"latency": 37.1, "energy": 32.0}  # SmolLM2-135M
PAPER_STATIC: dict[Objective, float] = {
    "latency": 4.7820,
    "energy": 39.10,
}  # seconds and joules, mean of traces
PAPER_POLICY: dict[Objective, float] = {"latency": 4.0124, "energy": 34.07}


@dataclass(frozen=True, slots=True, kw_only=True)
class Replays:
    """The same models on several tables.

    Attributes:
        simulated: On the Jetson-like table.
        resident: On the same with the GPU's operands in place; ``None`` where not asked for.
        measured: On the table of this machine, or one that ships; ``None`` where there is none.
        segments: On that table with segments.
        missing: What a measured one lacks, or why there is none; empty where neither.
    """

    simulated: Replay
    resident: Replay | None
    measured: Replay | None
    segments: Replay | None
    missing: str = ""

    @property
    def all(self) -> tuple[Replay, ...]:
        """Those that there are."""
        every = (self.simulated, self.resident, self.measured, self.segments)
        return tuple(found for found in every if found is not None)


def replays(setup: Setup, *, resident: bool = False) -> Replays:
    """Replay the paper's models on every table.

    Args:
        setup: ``models`` to replay, by names of configurations that ship; ``seed`` of the draws
            of intervals; ``quick`` leaves segments out.
        resident: Replay the Jetson-like table with operands in place, too.

    Raises:
        ConfigError: There is no such model.
    """
    models = [load_architecture(name) for name in setup.models or MODELS]
    traces = {each.name: paper_traces(each) for each in models}

    def on(
        table: OperatorTable, those: Mapping[str, Sequence[Trace]], *, segments: bool = False
    ) -> Replay:
        setup.say(f"{table.name}{', segments' if segments else ''}")
        return replay(those, table, segments=segments, seed=setup.seed)

    missing, measured, with_segments = "", None, None
    try:
        table = default_operator_table()
        covered = {n: t for n, t in traces.items() if not missing_shapes(t, table)}
        if covered:
            measured = on(table, covered)
            with_segments = None if setup.quick else on(table, covered, segments=True)
        if len(covered) < len(traces):
            lacking = ", ".join(name for name in traces if name not in covered)
            missing = f"table {table.name!r} does not cover {lacking}"
    except ProfileError as error:
        missing = error.message
    return Replays(
        simulated=on(load_operator_table(SIMULATED), traces),
        resident=on(jetson_like_table(cuda="resident"), traces) if resident else None,
        measured=measured,
        segments=with_segments,
        missing=missing,
    )


def made(found: Replays) -> str:
    """What our numbers are of, in words."""
    simulated = (
        f"{SIMULATED}: a stated model of such a board, its free constants fitted to these figures"
    )
    if found.measured is None:
        return f"{simulated}; no measured table: {found.missing}"
    return (
        f"{simulated}; {found.measured.table}: {', '.join(found.measured.backends)} measured with"
        f" {found.measured.thread_policy.key}" + (f"; {found.missing}" if found.missing else "")
    )


def gain(found: Replay, objective: Objective, method: str, name: str, **fields: Any) -> Figure:
    """The mean gain of a method as a figure.

    Args:
        found: On one table.
        objective: Whose.
        method: Which.
        name: Of the figure.
        **fields: The rest of `Figure`.
    """
    mean = found.means[objective, method]
    return Figure(
        name=name,
        unit="%",
        ours=100 * mean.ratio,
        provenance=found.provenance,
        low=None if mean.low is None else 100 * mean.low,
        high=None if mean.high is None else 100 * mean.high,
        **fields,
    )


def objectives_of(found: Replay) -> list[Objective]:
    """Objectives that could be judged, in order."""
    return list(dict.fromkeys(row.objective for row in found.rows))


def in_order(found: Replay) -> Verdict:
    """Whether operator-local, greedy and exact gain ever more, on every trace and objective."""
    wrong = []
    for row in found.rows:
        costs = [row.outcomes[m].totals.of(row.objective) for m in ("local", "greedy", "viterbi")]
        if not (costs[0] >= costs[1] * (1 - _EQUAL) and costs[1] >= costs[2] * (1 - _EQUAL)):
            wrong.append(f"{row.model}, {row.objective}: {_excess(costs)}")
    return Verdict(
        claim=f"operator-local <= greedy <= exact in gain on every trace, {found.table}",
        holds=not wrong,
        detail="; ".join(wrong) or f"{len(found.rows)} traces and objectives",
    )


_EQUAL = 1e-9  # sums of ten thousand terms differ by less


def _excess(costs: Sequence[float]) -> str:
    return "above the exact optimum by {:.3%} (local) and {:.3%} (greedy)".format(
        *(cost / costs[2] - 1 for cost in costs[:2])
    )
