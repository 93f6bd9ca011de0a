"""``edgewise bench dispatch``: what planning costs, what plans are worth, how they really run."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from edgewise.bench.dispatch_peers import PEERS, open_peer
from edgewise.bench.dispatch_runs import (
    EAGER,
    PLAN,
    Integrated,
    Pass,
    PassResult,
    measure_passes,
    open_contenders,
    passes_of,
    plan_for,
    run_in_turns,
    run_integrated,
    traces_of,
)
from edgewise.device import load_between, read_cpu_counters
from edgewise.dispatch.forward import paper_traces
from edgewise.dispatch.plan import DispatchPlan
from edgewise.dispatch.problem import build_problem
from edgewise.dispatch.replay import Replay, replay
from edgewise.dispatch.search import decide
from edgewise.dispatch.trace import Trace
from edgewise.errors import EdgeError
from edgewise.model.transformer import Architecture, architecture_names, load_architecture
from edgewise.profiles.operator_tables import default_operator_table, load_operator_table
from edgewise.profiles.operators import OperatorTable

Say = Callable[[str], None]

MODEL = "smollm2-135m"
_SIMULATED = "jetson-like"
_PAST = 64
_TOLERANCE = 1e-9  # of a total, for sums in another order


def run(*, quick: bool = False, say: Say = lambda _: None) -> dict[str, Any]:
    """Measure all figures of this bench.

    Args:
        quick: Fewer lengths and rounds, and no peers, which take minutes to compile.
        say: Told what is being measured.

    Returns:
        A mapping ready for JSON. Unknown figures are ``None`` with the reason under ``notes``.
    """
    from edgewise.backends.threads import govern

    notes: list[str] = []
    policy = govern(1)
    before, began_s = read_cpu_counters(), time.perf_counter()
    result: dict[str, Any] = {}
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "planning": lambda: planning_figures(rounds=2 if quick else 5),
        "decision": lambda: decision_figures(blocks=50 if quick else 300),
        "coresidency": lambda: coresidency_figures(rounds=4 if quick else 12),
        "replay": lambda: replay_figures(notes),
        "integrated": lambda: integrated_figures(notes, quick=quick, say=say),
    }
    for name, measure in parts.items():
        say(name)
        try:
            result |= measure()
        except EdgeError as error:
            result[name] = None
            notes.append(f"{name}: {error.message}")
    load = load_between(before, read_cpu_counters(), window_s=time.perf_counter() - began_s)
    if load.other_ratio is not None:
        quiet = "quiet" if load.other_ratio < 0.1 else "not quiet"
        notes.append(
            f"other processes used {load.other_ratio:.0%} of the machine meanwhile: {quiet}"
        )
    notes.append(f"thread policy of every runtime: {policy.key}")
    notes.append(
        "planning, decision, coresidency and integrated are measured; replay adds costs of a table"
    )
    return {**result, "threads": policy.threads, "provenance": "measured", "notes": notes}


# --- deciding --------------------------------------------------------------------------------


def planning_figures(*, rounds: int) -> dict[str, Any]:
    """Time to plan the seven traces of the paper, 9,584 operators; the problem's arrays included.

    Args:
        rounds: The median counts.
    """
    table = load_operator_table(_SIMULATED)
    traces = {name: paper_traces(load_architecture(name), rule="paper") for name in _names()}
    samples = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        operators = 0
        for passes in traces.values():
            problem = build_problem(passes, table)
            decide(problem, method="viterbi")
            operators += problem.num_operators
        samples.append(time.perf_counter() - began_s)
    return {"viterbi_9584_s": statistics.median(samples), "viterbi_operators": operators}


def decision_figures(*, blocks: int, calls: int = 1000) -> dict[str, Any]:
    """What choosing a program costs at run time, for each operator.

    A norm that a segment takes in does nothing but choose: its call, less a call of nothing.

    Args:
        blocks: The median over blocks counts.
        calls: In each block.
    """
    import torch

    from edgewise.runtime.dispatching import dispatch_model
    from edgewise.runtime.dispatching.build import build_model

    architecture = _small()
    traces = traces_of(architecture, [Pass(phase="prefill", length=8)])
    model = build_model(architecture)
    plan = _with_segments(traces)
    x = torch.zeros(1, 8, architecture.hidden_size)
    with torch.no_grad(), dispatch_model(model, plan) as dispatched:
        dispatched(torch.zeros(1, 8, dtype=torch.int64))
        chosen = model.model.layers[0].post_attention_layernorm.forward
        if chosen(x) is not x:
            raise AssertionError("expected a norm that hands on what it gets")

        def nothing(x: torch.Tensor) -> torch.Tensor:
            return x

        samples = [_mean_s(chosen, x, calls) - _mean_s(nothing, x, calls) for _ in range(blocks)]
    return {"decision_p50_s": max(0.0, statistics.median(samples))}


def _mean_s(call: Callable[[Any], Any], x: Any, calls: int) -> float:
    began_s = time.perf_counter()
    for _ in range(calls):
        call(x)
    return (time.perf_counter() - began_s) / calls


def _small() -> Architecture:
    import dataclasses

    return dataclasses.replace(
        load_architecture(MODEL), num_hidden_layers=2, hidden_size=64, intermediate_size=96,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=128,
    )  # fmt: skip


def _with_segments(traces: Sequence[Trace]) -> DispatchPlan:
    """A plan on torch whose MLPs take their norms in."""
    from edgewise.dispatch.plan import PhasePlan, Step
    from edgewise.dispatch.problem import HOME
    from edgewise.profiles.records import ThreadPolicy

    phases = []
    for trace in traces:
        steps = [
            Step(
                name=c.name,
                kind=c.kind,
                backend=HOME,
                covers=tuple(n.name for n in trace.nodes[c.start : c.stop] if n.supported),
                shapes=tuple(part.key for part in c.parts),
                predicted_s=0.0,
                reason="segment",
            )
            for c in trace.candidates
            if c.kind == "norm_mlp"
        ]
        phases.append(
            PhasePlan(
                phase=trace.phase,
                length=trace.length,
                past=trace.past,
                steps=tuple(steps),
                predicted_s=0.0,
                predicted_j=None,
                best_static=HOME,
                best_static_s=0.0,
            )
        )
    return DispatchPlan(
        model=traces[0].model,
        objective="latency",
        method="by hand",
        backends=(HOME,),
        state="calm",
        device_id="",
        thread_policy=ThreadPolicy(threads=1),
        provenance="estimated",
        table="none",
        phases=tuple(phases),
    )


def coresidency_figures(*, rounds: int) -> dict[str, Any]:
    """Torch and ONNX Runtime in turn over both alone, governed and as they come.

    Args:
        rounds: Of each setting.
    """
    from edgewise.backends.threads import coresidency

    found = coresidency(rounds=rounds)
    return {
        "coresidency_ratio": found.governed.ratio,
        "coresidency_naive_ratio": found.naive.ratio,
        "coresidency_naive_over_governed": found.naive_over_governed,
    }


# --- replaying -------------------------------------------------------------------------------


def replay_figures(notes: list[str]) -> dict[str, Any]:
    """Ways to choose on two tables: the simulated one, and the one that was measured.

    Args:
        notes: Told what a table lacks.
    """
    found = {"simulated": _replayed(load_operator_table(_SIMULATED), notes)}
    found["measured_table"] = _replayed(default_operator_table(), notes)
    return {
        "order_holds": all(f["order_holds"] for f in found.values() if f is not None),
        "replay": found,
    }


def _replayed(table: OperatorTable, notes: list[str]) -> dict[str, Any] | None:
    traces = {}
    for name in _names():
        passes = paper_traces(load_architecture(name))
        try:
            build_problem(passes, table)
        except EdgeError as error:
            notes.append(f"table {table.name!r} lacks {name}: {error.message}")
        else:
            traces[name] = passes
    if not traces:
        return None
    energy = all(c.energy.energy_j is not None for c in table.costs.values() if c.usable)
    objectives: Any = ("latency", "energy", "edp") if energy else ("latency",)
    with_segments = replay(traces, table, objectives=("latency",), methods=("best",), segments=True)
    alone = replay(traces, table, objectives=objectives)
    return {
        "table": table.name,
        "provenance": table.provenance,
        "models": list(traces),
        "order_holds": order_holds(alone),
        "objectives": {o: _gains(alone, o) for o in objectives},
        "gain_with_segments": _gain(with_segments, "latency", "best"),
    }


def order_holds(found: Replay) -> bool:
    """Whether operator-local is never better than greedy, nor greedy than Viterbi."""
    for row in found.rows:
        costs = [row.outcomes[m].totals.of(row.objective) for m in ("local", "greedy", "viterbi")]
        if any(b > a * (1 + _TOLERANCE) for a, b in itertools.pairwise(costs)):
            return False
    return True


def _gains(found: Replay, objective: Any) -> dict[str, Any]:
    methods = ("local", "greedy", "viterbi")
    return {
        **{f"gain_{m}": _gain(found, objective, m) for m in methods},
        "switches_saved": found.fewer_switches(objective, "viterbi"),
        "switches_saved_by_greedy": found.fewer_switches(objective, "greedy"),
        "greedy_gap_max": max((r.greedy_gap or 0.0 for r in found.of(objective)), default=None),
    }


def _gain(found: Replay, objective: Any, method: str) -> dict[str, float | None] | None:
    gain = found.means.get((objective, method))
    if gain is None:
        return None
    return {"ratio": gain.ratio, "low": gain.low, "high": gain.high}


def _names() -> tuple[str, ...]:
    return architecture_names()


# --- running ---------------------------------------------------------------------------------


def integrated_figures(notes: list[str], *, quick: bool, say: Say) -> dict[str, Any]:
    """SmolLM2-135M by torch, every backend alone, the plan, and its peers.

    The plan's costs are measured first, in the same minutes.

    Args:
        notes: Told what could not be run.
        quick: Fewer lengths and rounds.
        say: Told what is done.
    """
    from edgewise.runtime.dispatching.build import build_model

    architecture = load_architecture(MODEL)
    passes = passes_of(architecture, (16, 64) if quick else (16, 32, 64, 128), past=_PAST)
    traces = traces_of(architecture, passes)
    table = measure_passes(traces, time_cap_s=0.1 if quick else 0.4, say=say)
    notes += [f"{key} of the table: {table.notes[key]}" for key in ("said",) if key in table.notes]
    plan = plan_for(traces, table)
    say("building the model")
    found = open_contenders(build_model(architecture), architecture, plan, table=table, say=say)
    results = run_integrated(
        found, num_layers=architecture.num_hidden_layers, rounds=3 if quick else 9, say=say
    )
    notes += found.notes
    peers = _peers(found, passes, notes, quick=quick, say=say)
    return {**summary(results, found), "peers": peers}


def summary(results: Sequence[PassResult], found: Integrated) -> dict[str, Any]:
    """The figures of an integrated run.

    Args:
        results: By pass.
        found: What ran.
    """
    statics = {_key(r.what): r.ratio(r.best_static) for r in results}
    eager = {_key(r.what): r.ratio(EAGER) for r in results}
    predicted = {_key(r.what): r.predicted_s[PLAN] / r.times[PLAN].median_s for r in results}
    return {
        "integrated_vs_best_static": _mean(statics.values()),
        "integrated_vs_torch_eager": _mean(eager.values()),
        "predicted_over_measured": sum(r.predicted_s[PLAN] for r in results)
        / sum(r.times[PLAN].median_s for r in results),
        "below_best_static": [name for name, ratio in statics.items() if ratio and ratio < 1.0],
        "largest_deviation": max(r.times[PLAN].deviation or 0.0 for r in results),
        "fallbacks": sum(found.dispatched[PLAN].fallbacks.values()),
        "passes": {
            _key(r.what): {
                "vs_best_static": statics[_key(r.what)],
                "vs_torch_eager": eager[_key(r.what)],
                "predicted_over_measured": predicted[_key(r.what)],
                "best_static": r.best_static,
                "switches": len(r.switches),
                "median_s": {name: t.median_s for name, t in r.times.items()},
                "interval_s": {name: [t.low_s, t.high_s] for name, t in r.times.items()},
            }
            for r in results
        },
    }


def _key(each: Pass) -> str:
    return "decode" if each.phase == "decode" else f"prefill_{each.length}"


def _mean(ratios: Any) -> float | None:
    """Geometric mean of ratios; ``None`` without any."""
    known = [r for r in ratios if r is not None]
    return statistics.geometric_mean(known) if known else None


def _peers(
    found: Integrated, passes: Sequence[Pass], notes: list[str], *, quick: bool, say: Say
) -> Mapping[str, Any]:
    """Whole-model compilers against eager and the plan, one by one: memory holds few copies."""
    each = next(p for p in passes if p.length == 64)
    own = [c for c in found.contenders if c.name in {EAGER, PLAN}]
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="edgewise-") as made:
        folder = Path(made)
        for name in PEERS:
            if quick and name != "AITune":
                rows[name] = None
                notes.append(f"{name}: left out by --quick")
                continue
            say(f"compiling with {name}")
            try:
                peer = open_peer(name, found.runner, each, threads=1, folder=folder)
            except EdgeError as error:
                rows[name] = None
                notes.append(f"{name}: {error.message}")
                continue
            times = run_in_turns([*own, peer], [each], rounds=3 if quick else 7, say=say)
            peer_s = times[name, each].median_s
            rows[name] = {
                "pass": _key(each),
                "median_s": peer_s,
                "vs_torch_eager": peer_s / times[EAGER, each].median_s,
                "plan_vs_peer": times[PLAN, each].median_s / peer_s,
                "deviation": times[name, each].deviation,
            }
    return rows
