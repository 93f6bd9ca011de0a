"""``edgewise bench exits``: what a decision costs, what staging costs, what a runtime gains."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from edgewise.backends import Context, Program, available_backends, load_program
from edgewise.backends.base import probe_input
from edgewise.clock import VirtualClock
from edgewise.errors import EdgeError
from edgewise.exits import PolicyInputs, make_policy
from edgewise.frontends.outline import outline_model
from edgewise.predict import CostTable
from edgewise.runtime import Session

NETS = ("resnet50", "mobilenet_v2")
Say = Callable[[str], None]


def run(*, quick: bool = False, say: Say = lambda _: None) -> dict[str, Any]:
    """Measure all figures of this bench.

    Args:
        quick: Fewer rounds.
        say: Told what is being measured.

    Returns:
        A mapping ready for JSON. Unknown figures are ``None`` with the reason under ``notes``.
    """
    notes: list[str] = []
    say("the router's decision")
    result: dict[str, Any] = decision_figures(calls=20_000 if quick else 100_000)
    nets: dict[str, Any] = {}
    for net in NETS:
        say(f"{net}: staged and whole on each backend")
        try:
            nets[net] = net_figures(net, rounds=6 if quick else 24)
        except EdgeError as error:
            nets[net] = None
            notes.append(f"{net}: {error.message}")
    result["nets"] = nets
    for key in ("staged_ratio", "staged_single_ratio", "staged_roomy_ratio"):
        result[key] = {
            backend: {net: figures[key][backend] for net, figures in nets.items() if figures}
            for backend in sorted({b for f in nets.values() if f for b in f[key]})
        }
    result["speedup_vs_torch"] = {n: f and f["speedup_vs_torch"] for n, f in nets.items()}
    say("importing edgewise in fresh processes")
    result["import_s"] = import_s(runs=5 if quick else 11)
    result["threads"] = 1
    result["provenance"] = "measured"
    result["notes"] = notes
    return result


def decision_figures(*, calls: int) -> dict[str, float]:
    """Time the decision a request takes: the clock, the published table, the comparison.

    Called with times left that spread over everything from hopeless to roomy, at every position of
    a model of 8 exits. The timer's own cost is measured the same way and subtracted.
    """
    model = outline_model(8)
    program = load_program(model, "null", clock=VirtualClock())
    costs = CostTable.from_costs([1e-3] * 8, [1e-4] * 7 + [0.0])
    policy = make_policy("edgewise", PolicyInputs.of(model, costs, segments=program.segments))
    rng = np.random.default_rng(0)
    positions = rng.integers(0, 8, calls).tolist()
    left = rng.uniform(0.0, 0.016, calls).tolist()
    decide, now_s, timer = policy.decide, time.perf_counter, time.perf_counter_ns
    samples = np.empty(calls)
    empty = np.empty(calls)
    for n, (position, left_s) in enumerate(zip(positions, left, strict=True)):
        begin = timer()
        end = timer()
        empty[n] = end - begin
        deadline_s = now_s() + left_s
        begin = timer()
        decide(position, now_s(), 0.0, deadline_s)
        samples[n] = timer() - begin
    samples = np.maximum(samples - np.median(empty), 0) * 1e-9
    request = Session(program, costs, clock=program.clock)  # type: ignore[attr-defined]
    x = np.zeros((1, 3, 8, 8), dtype=np.float32)
    steps = request.run(x, budget_s=1.0).steps
    learn = []
    for _ in range(1000):
        begin_s = now_s()
        policy.observe(steps, met=True, feasible=True)
        learn.append(now_s() - begin_s)
    return {
        "decision_p50_s": float(np.quantile(samples, 0.5)),
        "decision_p99_s": float(np.quantile(samples, 0.99)),
        "publish_p50_s": statistics.median(learn[200:]),
    }


def net_figures(net: str, *, rounds: int) -> dict[str, Any]:
    """Staged against whole on each backend, and every backend against torch, interleaved.

    Three staged paths, each to the last exit with all 8 exits present and none taken: every stage
    on its own; the first half fused and then single stages, as a request runs whose deadline is
    near the end; and what the router runs when the budget is three times the full depth.

    Raises:
        BackendUnavailable: torch or transformers is missing.
    """
    from edgewise.backends.threads import set_torch_threads
    from edgewise.frontends.torch_module import import_torch
    from edgewise.frontends.zoo import build_backbone

    torch = import_torch()
    set_torch_threads(1)
    backbone = build_backbone(net)
    model = backbone.stage(8).with_random_heads()
    names = [n for n in available_backends() if not n.startswith("numpy")]
    programs = {n: load_program(model, n) for n in names}
    x = probe_input(model)
    tensor = torch.from_numpy(x)

    def torch_whole() -> None:
        with torch.inference_mode():
            backbone.module(tensor)

    paths: dict[tuple[str, str], Callable[[], None]] = {}
    borrowed = []
    for name, program in programs.items():
        manager = program.context()
        context = manager.__enter__()
        borrowed.append(manager)
        context.set_boundary(0, x)
        paths |= {(name, k): p for k, p in _paths(program, context).items()}
    if "torch:cpu" in programs:
        paths["torch:cpu", "whole"] = torch_whole
    samples: dict[tuple[str, str], list[float]] = {k: [] for k in paths}
    keys = list(paths)
    for n in range(rounds + 2):
        # Each round begins elsewhere: what ran before leaves its data in the caches.
        turn = n % len(keys)
        for key in keys[turn:] + keys[:turn]:
            begin_s = time.perf_counter()
            paths[key]()
            if n >= 2:
                samples[key].append(time.perf_counter() - begin_s)
    for manager in borrowed:
        manager.__exit__(None, None, None)
    medians = {k: statistics.median(v) for k, v in samples.items()}

    def ratio(path: str) -> dict[str, float]:
        return {
            b: statistics.median(
                s / w for s, w in zip(samples[b, path], samples[b, "whole"], strict=True)
            )
            for b in programs
        }

    whole = {b: medians[b, "whole"] for b in programs}
    best = min(whole, key=lambda b: whole[b])
    return {
        "whole_s": whole,
        "whole_spread_s": {b: _spread(samples[b, "whole"]) for b in programs},
        "staged_ratio": ratio("half"),
        "staged_single_ratio": ratio("single"),
        "staged_roomy_ratio": ratio("roomy"),
        "best_backend": best,
        "speedup_vs_torch": whole["torch:cpu"] / whole[best] if "torch:cpu" in whole else None,
        "boundaries": [list(s.stop.shape) for s in model.stages],
        "rounds": rounds,
    }


def _spread(values: list[float]) -> list[float]:
    return [min(values), max(values)]


def _paths(program: Program, context: Context) -> Mapping[str, Callable[[], None]]:
    num = len(program.model.stages)
    half = (num + 1) // 2
    costs = CostTable.from_costs([1e-3] * num, [1e-5] * num)
    policy = make_policy(
        "edgewise", PolicyInputs.of(program.model, costs, segments=program.segments)
    )

    def whole() -> None:
        context.run_segment(0, num)

    def single() -> None:
        for k in range(num):
            context.run_segment(k, k + 1)

    def half_fused() -> None:
        context.run_segment(0, half)
        for k in range(half, num):
            context.run_segment(k, k + 1)

    def roomy() -> None:
        position, deadline_s = 0, time.perf_counter() + 3e-3 * num
        while position < num:
            action = policy.decide(position, deadline_s - 3e-3 * (num - position), 0.0, deadline_s)
            context.run_segment(position, action)
            position = action

    return {"whole": whole, "single": single, "half": half_fused, "roomy": roomy}


def import_s(*, runs: int) -> float:
    """Seconds that ``import edgewise`` adds to a fresh process, median of differences."""

    def once(code: str) -> float:
        begin_s = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603 - our own code
        return time.perf_counter() - begin_s

    pairs = [(once("pass"), once("import edgewise")) for _ in range(runs)]
    return max(0.0, statistics.median(b - a for a, b in pairs))
