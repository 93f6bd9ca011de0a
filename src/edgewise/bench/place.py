"""``edgewise bench place``: what planning costs, how good plans are, how they are carried out."""

from __future__ import annotations

import contextlib
import gc
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from edgewise.backends.piece import load_piece
from edgewise.bench.placement_runs import (
    FCFS,
    Models,
    compare,
    contended,
    mape,
    measured_around,
    play,
    repriced,
    steady_arrivals,
    tenants_of,
)
from edgewise.device import load_between, read_cpu_counters
from edgewise.device.accelerator import load_accelerator
from edgewise.errors import BackendError, EdgeError
from edgewise.frontends.zoo_int8 import models_folder
from edgewise.placement.plan import make_placement
from edgewise.placement.problem import Problem
from edgewise.placement.search import plan, search
from edgewise.placement.simulate import QueueOrder, simulate
from edgewise.placement.study import random_mixes, search_gaps
from edgewise.profiles.shipped_partitions import load_partition_profile, partition_profile_names
from edgewise.runtime.tenants.engine import TenantEngine

Say = Callable[[str], None]

ACCELERATOR = "coral-usb"
_METHODS = ("published", "greedy", "multi-start", "alpha-zero", "threshold", "compiler")
_SINGLE, _MULTI = "mobilenet_v2", ("mobilenet_v2", "squeezenet", "resnet18")
_BUSY = 0.4
_CHANGE_EVERY_S = 0.6


def run(*, quick: bool = False, say: Say = lambda _: None) -> dict[str, Any]:
    """Measure all figures of this bench.

    Args:
        quick: Fewer mixes, requests and rounds.
        say: Told what is being measured.

    Returns:
        A mapping ready for JSON. Unknown figures are ``None`` with the reason under ``notes``.
    """
    notes: list[str] = []
    before, began_s = read_cpu_counters(), time.perf_counter()
    say("decisions")
    result: dict[str, Any] = {"decisions": decision_figures(rounds=5 if quick else 40)}
    say("searches against the optimum")
    result["gaps"] = gap_figures(mixes=9 if quick else 60)
    say("the order of the accelerator's queue")
    result["queue"] = queue_figures(requests=20_000 if quick else 200_000)
    say("loading and unloading")
    result["cycles"] = cycle_figures(cycles=40 if quick else 200)
    models = Models(
        load_accelerator(ACCELERATOR),
        models_folder(),
        rounds=8 if quick else 40,
        time_cap_s=20.0 if quick else 90.0,
        say=say,
    )
    played: dict[str, Callable[[], dict[str, Any]]] = {
        "model_error": lambda: error_figures(models, requests=150 if quick else 1500, say=say),
        "plan_changes": lambda: change_figures(models, changes=10 if quick else 100, say=say),
    }
    for key, measure in played.items():
        say(key.replace("_", " "))
        try:
            result[key] = measure()
        except EdgeError as error:
            result[key] = None
            notes.append(f"{key}: {error.message}")
    load = load_between(before, read_cpu_counters(), window_s=time.perf_counter() - began_s)
    if load.other_ratio is not None:
        notes.append(f"other processes used {load.other_ratio:.0%} of the machine meanwhile")
    notes.append(
        "decisions, cycles, model_error and plan_changes are measured (the accelerator in the last"
        " two is simulated on the real clock); gaps and queue are computed"
    )
    notes.append(
        "latency against the compiler's placement: edgewise reproduce swapless-fig7, -fig8"
    )
    return {**result, "threads": 1, "provenance": "measured", "notes": notes}


def decision_figures(*, rounds: int) -> dict[str, Any]:
    """Time of decisions when rates have changed, for ten places a tenant and four cores.

    Args:
        rounds: Of each; the median counts.
    """
    problems = {
        n: random_mixes(1, load_accelerator(ACCELERATOR), seed=n, tenants=(n,))[0] for n in (3, 4)
    }
    timed = {
        "greedy_4_tenants_s": (4, "greedy"),
        "exact_3_tenants_s": (3, "exact"),
        "exact_4_tenants_s": (4, "exact"),
        "best_4_tenants_s": (4, "best"),
    }
    samples: dict[str, list[float]] = {name: [] for name in timed}
    generator = np.random.default_rng(0)
    for _ in range(rounds):
        for name, (tenants, method) in timed.items():
            rates = problems[tenants].rates * generator.uniform(0.8, 1.2, tenants)
            began_s = time.perf_counter()
            search(problems[tenants].with_rates(rates), method)
            samples[name].append(time.perf_counter() - began_s)
    return {name: statistics.median(values) for name, values in samples.items()}


def gap_figures(*, mixes: int) -> dict[str, Any]:
    """How far searches are from the optimum over random mixes of the shipped networks.

    Args:
        mixes: How many.
    """
    problems = random_mixes(
        mixes,
        load_accelerator(ACCELERATOR),
        seed=0,
        profiles=[load_partition_profile(name) for name in partition_profile_names()],
    )
    return {
        row.method.replace("-", "_"): {
            "problems": row.problems,
            "stuck": row.stuck,
            "mean_gap_ratio": row.mean_gap_ratio,
            "max_gap_ratio": row.max_gap_ratio,
        }
        for row in search_gaps(problems, _METHODS)
    }


def queue_figures(*, requests: int) -> dict[str, Any]:
    """Switch-aware order against first come first served, where reloading takes most of the time.

    Two small models that do not fit together, the accelerator 80 % busy in order of arrival.

    Args:
        requests: To simulate.
    """
    device = load_accelerator(ACCELERATOR)
    found = [load_partition_profile(name) for name in ("efficientnet_b0", "mnasnet")]
    problem = _loaded(found, device, busy=0.8)
    cores = [0] * len(found)
    rows = {}
    for name, order in (
        ("fcfs", QueueOrder()),
        ("switch_aware", QueueOrder(discipline="switch-aware")),
    ):
        seen = simulate(problem, problem.last, cores, requests=requests, order=order, seed=1)
        rows[name] = {
            "mean_s": seen.mean_s,
            "p99_s": float(np.quantile(np.concatenate([t.response_s for t in seen.tenants]), 0.99)),
            "max_wait_s": max(t.max_wait_s for t in seen.tenants),
            "accelerator_busy": seen.accelerator_busy,
        }
    return {
        **rows,
        "mean_reduction_ratio": 1 - rows["switch_aware"]["mean_s"] / rows["fcfs"]["mean_s"],
    }


def _loaded(found: Any, device: Any, *, busy: float) -> Problem:
    """Equal loads that keep the accelerator so busy, reloads counted."""
    named = [(f"{k}-{p.model_id}", p) for k, p in enumerate(found)]
    problem = Problem.of(_tenants(named), device, cores=2)
    rows = np.arange(len(found))
    service = problem.service_s[rows, problem.last]
    shares = (1 / service) / (1 / service).sum()
    spent = service + (1 - shares) * problem.load_s[rows, problem.last]
    return problem.with_rates(busy * shares / float((shares * spent).sum()))


def _tenants(named: Any) -> list[Any]:
    from edgewise.placement.problem import Tenant

    return [Tenant(name=name, profile=profile, rate_per_s=1.0) for name, profile in named]


def cycle_figures(*, cycles: int) -> dict[str, Any]:
    """Growth of memory over loading, running, unloading and refused loading, in that order.

    Args:
        cycles: How many; as many before them warm the allocator up.
    """
    from edgewise.frontends.partition import read_partitioned

    with tempfile.TemporaryDirectory(prefix="edgewise-") as folder:
        file = Path(folder) / "chain.onnx"
        file.write_bytes(_chain())
        model = read_partitioned(file)
        content = model.segment(0, model.last)
    place = model.places[0]
    x = np.zeros(place.shape, dtype=place.dtype)

    def cycle() -> None:
        piece = load_piece(content, "onnx")
        piece.run(x)
        piece.close()
        with contextlib.suppress(BackendError):
            load_piece(content[: len(content) // 2], "onnx")

    for _ in range(cycles):
        cycle()
    gc.collect()
    before = _resident_bytes()
    for _ in range(cycles):
        cycle()
    gc.collect()
    return {"cycles": cycles, "growth_bytes": _resident_bytes() - before}


def _resident_bytes() -> int:
    import resource

    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def _chain(layers: int = 4, channels: int = 32) -> bytes:
    """A chain of convolutions as an ONNX file."""
    from edgewise.frontends.onnx_file import import_onnx

    onnx = import_onnx()
    generator = np.random.default_rng(0)
    nodes, weights = [], []
    for k in range(layers):
        inputs = 3 if k == 0 else channels
        values = generator.standard_normal((channels, inputs, 3, 3)).astype(np.float32)
        weights.append(onnx.numpy_helper.from_array(values, f"w{k}"))
        nodes.append(
            onnx.helper.make_node(
                "Conv", [f"x{k}", f"w{k}"], [f"x{k + 1}"], pads=[1, 1, 1, 1], name=f"conv{k}"
            )
        )
    sizes = {"x0": [1, 3, 32, 32], f"x{layers}": [1, channels, 32, 32]}
    given, answer = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in sizes.items()
    )
    graph = onnx.helper.make_graph(nodes, "chain", [given], [answer], weights)
    proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])
    proto.ir_version = 8
    content: bytes = proto.SerializeToString()
    return content


def error_figures(models: Models, *, requests: int, say: Say) -> dict[str, Any]:
    """Predicted against observed mean responses of real requests, in order of arrival.

    Args:
        models: Measured as they are needed.
        requests: Of each play.
        say: Told what is played.

    Raises:
        EdgeError: A network cannot be built, or a play fails.
    """
    one = models.get(_SINGLE, places=9)
    rows = []
    for place in range(0, one.profile.last + 1, 3):
        problem = _at_load([one], busy=0.2, models=models)
        slowest = max(problem.service_s[0, place], problem.cpu_s[0, place, 1])
        problem = problem.with_rates([0.2 / slowest])
        say(f"model error: {_SINGLE} cut at {place}")
        rows += _played([one], problem, [place], requests=requests)
    several = [models.get(name, places=9) for name in _MULTI]
    together = []
    for number, places in enumerate(_mixed_places(several)):
        say(f"model error: {' + '.join(_MULTI)}, plan {number + 1}")
        problem = _at_load(several, busy=_BUSY, models=models)
        together += _played(several, problem, places, requests=requests)
    return {
        "single_mape_ratio": mape(rows),
        "multi_mape_ratio": mape(together),
        "single_given_times_mape_ratio": mape(rows, "given"),
        "multi_given_times_mape_ratio": mape(together, "given"),
        "single_paper_mape_ratio": _finite(mape(rows, "paper")),
        "multi_paper_mape_ratio": _finite(mape(together, "paper")),
        "plays": len(rows) + len(together) // len(_MULTI),
    }


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def _at_load(own: Any, *, busy: float, models: Models) -> Problem:
    problem = Problem.of(tenants_of(own, [1.0] * len(own)), models.accelerator, cores=2)
    rows = np.arange(len(own))
    service = (
        problem.service_s[rows, problem.last]
        + (len(own) > 1) * (problem.load_s[rows, problem.last])
    )
    return problem.with_rates(busy / len(own) / service)


def _mixed_places(own: Any) -> list[list[int]]:
    """All on the accelerator, and the last two of three cut in the middle: two cores, two tails."""
    last = [m.profile.last for m in own]
    return [last, [last[0], last[1] // 2, last[2] * 2 // 3]]


def _played(own: Any, problem: Problem, places: Any, *, requests: int) -> Any:
    cores = [int(p < m.profile.last) for p, m in zip(places, own, strict=True)]
    placement = make_placement(problem, places, cores, method="bench")
    arrivals = steady_arrivals(
        problem.rates.tolist(), requests=requests, rng=np.random.default_rng(0)
    )
    played, then = measured_around(
        own, places, lambda: play(own, problem, placement, arrivals, queue=FCFS)
    )
    real = contended(then, repriced(problem, [m.profile for m in then]), places, cores)
    return compare("bench", real, placement, arrivals, played)


def change_figures(models: Models, *, changes: int, say: Say) -> dict[str, Any]:
    """Many changes of plan under constant load: nothing may fail or be lost.

    Args:
        models: Measured as they are needed.
        changes: How many, one every `_CHANGE_EVERY_S`; as long a play without any comes first.
        say: Told what is played.

    Raises:
        EdgeError: A network cannot be built, or a play fails.
    """
    own = [models.get(name, places=9) for name in _MULTI[:2]]
    problem = _at_load(own, busy=0.3, models=models)
    first = plan(problem, "compiler")
    half = [m.profile.last // 2 for m in own]
    plans = (make_placement(problem, half, [1, 1], method="bench"), first)
    arrivals = steady_arrivals(
        problem.rates.tolist(),
        requests=round(float(problem.rates.sum()) * _CHANGE_EVERY_S * (changes + 1)),
        rng=np.random.default_rng(0),
    )

    @contextlib.contextmanager
    def changing(engine: TenantEngine) -> Iterator[list[float]]:
        stop, took_s = threading.Event(), list[float]()

        def change() -> None:
            for number in range(changes):
                began_s = time.perf_counter()
                engine.apply(plans[number % 2], reason="bench")
                took_s.append(time.perf_counter() - began_s)
                if stop.wait(max(0.0, _CHANGE_EVERY_S - took_s[-1])):
                    return

        thread = threading.Thread(target=change, name="edgewise-bench-changes", daemon=True)
        thread.start()
        try:
            yield took_s
        finally:
            stop.set()
            thread.join()

    say("plan changes: calm")
    calm = play(own, problem, first, arrivals)
    say("plan changes: changing")
    busy = play(own, problem, first, arrivals, beside=changing)
    return {
        "changes": len(busy.changes) - 1,
        "requests": len(busy.requests),
        "failed_or_lost": busy.lost,
        "change_p50_s": statistics.median(busy.extra) if busy.extra else None,
        "calm_p99_s": _p99_s(calm),
        "changing_p99_s": _p99_s(busy),
        "calm_p50_s": _p99_s(calm, 0.5),
        "changing_p50_s": _p99_s(busy, 0.5),
    }


def _p99_s(played: Any, q: float = 0.99) -> float | None:
    found = [r.response_s for r in played.of()]
    return float(np.quantile(found, q)) if found else None
