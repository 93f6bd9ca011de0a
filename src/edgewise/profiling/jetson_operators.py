"""What operators might cost on a Jetson Orin Nano: a stated model, nothing of it measured.

A call on backend b of an operator with weights of W bytes takes

    overhead_b + arithmetic or traffic, the longer + what it moves besides,

times a deviation of this shape on this backend, lognormal, from a fixed seed: what no formula
knows, such as a kernel that suits one width. Three kinds of numbers stand below, each with its
mark in :class:`Board`:

- *public*: peaks, bandwidth, cores;
- *assumed*: orders of magnitude that public reports give;
- *fitted*: 23 free constants and the seed, chosen so that replay has the shape of the paper's
  Figures 3 and 4. That it has it is no evidence that they are true.

The one assumption that matters: the paper's best single backend does 58 GFLOP/s on average over
its seven traces, 25 to 30 times less than this GPU could. So each CUDA measurement is taken to
include moving operands to the device and waiting for the result, weights among them, faster for
weights that fit the caches. ``cuda="resident"`` leaves that out: what stays then of the gains says
how much of them the assumption makes. docs/background/dispatch.md has the numbers.

Source:
    NVIDIA, Jetson Orin Nano data sheet and Super mode (1,024 CUDA cores at 1.02 GHz, 102 GB/s, six
    A78AE cores at 1.7 GHz, 25 W mode); HeteroLLM (arXiv:2501.14794) for the costs of crossing.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from edgewise.dispatch.forward import RULES, paper_traces
from edgewise.model.transformer import architecture_names, load_architecture
from edgewise.profiles.operators import (
    Energy,
    LatencySummary,
    OperatorCost,
    OperatorShape,
    OperatorTable,
    SwitchCost,
    table_of,
)
from edgewise.profiles.records import ThreadPolicy

Cuda = Literal["moved", "resident"]

TORCH, CUDA, ORT = "torch:cpu", "torch:cuda", "onnxruntime:CPU"
BACKENDS = (TORCH, CUDA, ORT)
SEED = 51  # fitted, one of 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """Every constant of the model.

    Attributes:
        cpu_peak_flops: Six A78AE cores at 1.7 GHz, FP32; public.
        gpu_peak_flops: 1,024 CUDA cores at 1.02 GHz, FP32; public.
        dram_bytes_per_s: Public.
        cpu_stream_ratio: Share of the bandwidth that the CPU's cores get; assumed.
        gpu_stream_ratio: The same of the GPU; assumed.
        cpu_cache_ratio: By how much more they get where weights fit the caches; fitted.
        cache_bytes: Weights of this size fit by half; the board's caches have 4 MB each, of the
            CPU and of the system; fitted.
        sharpness: How suddenly weights cease to fit; fitted.
        ort_efficiency: Share of the CPU's peak that ONNX Runtime gets with many rows; fitted.
        torch_efficiency: The same of torch, besides packing the weights anew; fitted.
        gpu_efficiency: Share of the GPU's peak with many rows; fitted.
        cpu_half_rows: Rows at which the CPU has half of that; fitted.
        gpu_half_rows: The same of the GPU; fitted.
        torch_call_s: One eager operator; fitted.
        ort_call_s: One session's run, buffers bound; fitted.
        ort_node_s: One node within it; fitted.
        gpu_launch_s: One kernel; assumed.
        gpu_wait_s: Synchronising after the last; assumed.
        buffer_s: One buffer that crosses, whatever its size; fitted within 50 to 400 µs.
        buffer_bytes_per_s: What is added for its size; assumed.
        upload_bytes_per_s: Weights that fit no cache, on their way to the GPU; fitted.
        cached_upload_bytes_per_s: Weights that fit; fitted.
        torch_w: Power above idle; fitted.
        ort_w: The same; fitted.
        cuda_w: The same, most of it spent on moving; fitted.
        resident_cuda_w: The same with the GPU at work all the time; assumed.
        small_sigma: Standard deviation of the logarithm of a shape's deviation where its weights
            fit the caches; fitted.
        large_sigma: The same where they do not, and memory or arithmetic decides; fitted.
        shared_ratio: Share of its variance that all row counts of an operator have in common;
            assumed.
        power_sigma: The same of power; fitted.
        framework_switch_s: From torch to ONNX Runtime or back, both on the CPU; fitted.
        device_switch_s: To the GPU; fitted within 50 to 400 µs.
        return_switch_s: From the GPU; the same.
        switch_w: Power above idle meanwhile; assumed.
    """

    cpu_peak_flops: float = 163e9
    gpu_peak_flops: float = 2.1e12
    dram_bytes_per_s: float = 102e9
    cpu_stream_ratio: float = 0.35
    gpu_stream_ratio: float = 0.7
    cpu_cache_ratio: float = 0.33
    cache_bytes: float = 6.1e6
    sharpness: float = 4.0
    ort_efficiency: float = 0.26
    torch_efficiency: float = 0.42
    gpu_efficiency: float = 0.61
    cpu_half_rows: float = 2.1
    gpu_half_rows: float = 9.3
    torch_call_s: float = 26e-6
    ort_call_s: float = 12e-6
    ort_node_s: float = 2.5e-6
    gpu_launch_s: float = 12e-6
    gpu_wait_s: float = 30e-6
    buffer_s: float = 65e-6
    buffer_bytes_per_s: float = 8e9
    upload_bytes_per_s: float = 1.3e9
    cached_upload_bytes_per_s: float = 10e9
    torch_w: float = 8.4
    ort_w: float = 9.0
    cuda_w: float = 9.1
    resident_cuda_w: float = 12.0
    small_sigma: float = 0.27
    large_sigma: float = 0.14
    shared_ratio: float = 0.75
    power_sigma: float = 0.023
    framework_switch_s: float = 10e-6
    device_switch_s: float = 330e-6
    return_switch_s: float = 150e-6
    switch_w: float = 5.0


ORIN_NANO = Board()
_KERNELS = {"rmsnorm": 6, "layernorm": 1, "activation": 1, "linear": 1}  # torch eager's
_NODES = {"rmsnorm": 6, "layernorm": 1, "activation": 2, "linear": 1}  # of an ONNX graph
# Times the input is read or written; several kernels read and write it each.
_PASSES = {"rmsnorm": 10, "layernorm": 2, "activation": 2, "linear": 1}


def jetson_like_table(
    board: Board = ORIN_NANO, *, cuda: Cuda = "moved", seed: int = SEED
) -> OperatorTable:
    """The simulated table: seven models at the paper's lengths, both rules, three backends.

    Args:
        board: Its constants.
        cuda: ``"moved"``: a CUDA call includes moving its operands and weights; ``"resident"``:
            they are there, and moving activations is what a switch costs.
        seed: Of the deviations.
    """
    shapes = _shapes_of_the_paper()
    return table_of(
        [_cost(board, shape, b, cuda, seed) for shape in shapes for b in BACKENDS],
        _switches(board, cuda),
        name="jetson-like" if cuda == "moved" else "jetson-like-resident",
        device_id=f"simulated:jetson-like:{cuda}",
        device={
            "model": "like a Jetson Orin Nano in its 25 W mode; simulated",
            "cpu_cores": 6,
            "cpu_peak_flops": board.cpu_peak_flops,
            "gpu_peak_flops": board.gpu_peak_flops,
            "dram_bytes_per_s": board.dram_bytes_per_s,
        },
        thread_policy=ThreadPolicy(threads=6),
        provenance="simulated",
        notes={
            "made by": "edgewise.profiling.jetson_operators; nothing was measured",
            "cuda": "each call moves its operands and weights to the GPU and its result back"
            if cuda == "moved"
            else "weights and activations stay on the GPU",
            "seed": str(seed),
        },
    )


@functools.cache
def _shapes_of_the_paper() -> tuple[OperatorShape, ...]:
    return tuple(
        dict.fromkeys(
            node.shape
            for name in architecture_names()
            for rule in RULES
            for trace in paper_traces(load_architecture(name), rule=rule)
            for node in trace.operators
        )
    )


def fitting(board: Board, size_bytes: float) -> float:
    """How far weights fit the system cache: 1 small ones, 0 large ones, one half at its size."""
    return 1 / (1 + math.pow(size_bytes / board.cache_bytes, board.sharpness))


def latency_s(board: Board, shape: OperatorShape, backend: str, *, cuda: Cuda = "moved") -> float:
    """Time of one call without the shape's deviation, seconds.

    Source:
        Roofline: S. Williams et al., Communications of the ACM 52(4), 2009; efficiency with few
        rows as M / (M + half), a saturating line.
    """
    kind, work, held = shape.kind, float(shape.flops), float(shape.weight_bytes)
    moved = _PASSES[kind] * float(shape.input_bytes) + shape.output_bytes
    fits = fitting(board, held)
    stream = board.dram_bytes_per_s * board.cpu_stream_ratio
    stream *= 1 + board.cpu_cache_ratio * fits
    rows = shape.m / (shape.m + board.cpu_half_rows)
    if backend == CUDA:
        rate = board.gpu_peak_flops * board.gpu_efficiency
        rate *= shape.m / (shape.m + board.gpu_half_rows)
        traffic = (held + moved) / (board.dram_bytes_per_s * board.gpu_stream_ratio)
        took = _KERNELS[kind] * board.gpu_launch_s + board.gpu_wait_s + max(work / rate, traffic)
        if cuda == "resident":
            return took
        cached, plain = board.cached_upload_bytes_per_s, board.upload_bytes_per_s
        crossing = (shape.input_bytes + shape.output_bytes) / board.buffer_bytes_per_s
        return took + 2 * board.buffer_s + crossing + held * (fits / cached + (1 - fits) / plain)
    if backend == ORT:
        rate = board.cpu_peak_flops * board.ort_efficiency * rows
        call = board.ort_call_s + _NODES[kind] * board.ort_node_s
        return call + max(work / rate, (held + moved) / stream)
    rate = board.cpu_peak_flops * board.torch_efficiency * rows
    packing = 2 * held if shape.m > 1 else 0.0  # read and written again by every call
    took = max(work / rate, (held + moved) / stream) + packing / stream
    return _KERNELS[kind] * board.torch_call_s + took


def _cost(board: Board, shape: OperatorShape, backend: str, cuda: Cuda, seed: int) -> OperatorCost:
    width, own, watts = (
        _normal(seed, backend, word)
        for word in (f"{shape.kind} {shape.k} {shape.n}", shape.key, f"power {shape.key}")
    )
    seconds = latency_s(board, shape, backend, cuda=cuda)
    fits = fitting(board, shape.weight_bytes)
    sigma = board.small_sigma * fits + board.large_sigma * (1 - fits)
    shared, alone = math.sqrt(board.shared_ratio), math.sqrt(1 - board.shared_ratio)
    seconds *= math.exp(sigma * (shared * width + alone * own))
    power = {TORCH: board.torch_w, ORT: board.ort_w, CUDA: board.cuda_w}[backend]
    if backend == CUDA and cuda == "resident":
        power = board.resident_cuda_w
    joules = power * math.exp(board.power_sigma * watts) * seconds
    return OperatorCost(
        shape=shape,
        backend=backend,
        latency=_exact(seconds),
        correctness=None,
        energy=Energy(energy_j=joules, low_j=joules, high_j=joules, note="simulated"),
        thread_policy=ThreadPolicy(threads=6),
    )


def _normal(seed: int, backend: str, word: str) -> float:
    """A standard normal number that depends on nothing but these words."""
    digest = hashlib.sha256(f"{seed} {backend} {word}".encode()).digest()
    return float(np.random.default_rng(int.from_bytes(digest[:8], "big")).standard_normal())


def _exact(seconds: float) -> LatencySummary:
    names = ("mean", "median", "min", "max", "p90", "p95", "p99", "median_low", "median_high")
    return LatencySummary(
        **dict.fromkeys((f"{n}_s" for n in names), seconds), std_s=0.0, calls=1, samples=1
    )


def _switches(board: Board, cuda: Cuda) -> Iterable[SwitchCost]:
    for source in BACKENDS:
        for target in BACKENDS:
            if source == target:
                continue
            seconds = board.framework_switch_s
            per_byte = 0.0
            if CUDA in {source, target}:
                seconds = board.device_switch_s if target == CUDA else board.return_switch_s
                if ORT in {source, target}:
                    seconds += board.framework_switch_s
                if cuda == "resident":
                    per_byte = 1 / board.buffer_bytes_per_s
            yield SwitchCost(
                source=source,
                target=target,
                fixed_s=seconds,
                per_byte_s=per_byte,
                fixed_j=seconds * board.switch_w,
                per_byte_j=per_byte * board.switch_w,
            )
