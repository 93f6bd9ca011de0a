"""The process that lets torch and ONNX Runtime take turns; prints medians of its blocks as JSON.

Run as ``python -m edgewise.backends.threads.interference_worker JOB``; the job is a JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from edgewise.backends.threads.governor import govern, onnxruntime_options
from edgewise.clock import MonotonicClock
from edgewise.errors import EdgeError

_ROWS, _WIDTH, _OUT = 32, 576, 1536
_PAUSE_S = 0.02  # threads that spin for a while have given up by then
_NAP_S = 0.01
_WARM_UP = 3

Call = Callable[[], object]


def measure(*, threads: int, spinning: bool, rounds: int, calls: int) -> dict[str, list[float]]:
    """Measure under one setting; before this, no runtime may have been imported.

    Args:
        threads: Of each runtime.
        spinning: Leave the runtimes as they come.
        rounds: See :func:`edgewise.backends.threads.interference`.
        calls: Of each block and runtime.
    """
    if not spinning:
        govern(threads)
    torch_call, onnxruntime_call = _torch_call(threads), _onnxruntime_call(threads, spinning)
    blocks: dict[str, tuple[Call, ...]] = {
        "torch": (torch_call,),
        "onnxruntime": (onnxruntime_call,),
        "in_turn": (torch_call, onnxruntime_call),
    }
    found: dict[str, list[float]] = {}
    for _ in range(_WARM_UP):
        torch_call(), onnxruntime_call()
    names = list(blocks)
    for n in range(rounds):
        for name in names[n % 3 :] + names[: n % 3]:
            medians = _block(blocks[name], calls)
            keys = ("torch_in_turn", "onnxruntime_in_turn") if name == "in_turn" else (name,)
            for key, median in zip(keys, medians, strict=True):
                found.setdefault(key, []).append(median)
        found.setdefault("idle_cores", []).append(_idle_cores((torch_call, onnxruntime_call)))
    return found


def _block(turns: tuple[Call, ...], calls: int) -> list[float]:
    """Median seconds of each call where they take turns."""
    clock = MonotonicClock()
    clock.sleep_s(_PAUSE_S)
    spent_s: list[list[float]] = [[] for _ in turns]
    for n in range(_WARM_UP + calls):
        for call, samples in zip(turns, spent_s, strict=True):
            start_s = clock.now_s()
            call()
            if n >= _WARM_UP:
                samples.append(clock.now_s() - start_s)
    return [float(np.median(samples)) for samples in spent_s]


def _idle_cores(turns: tuple[Call, ...]) -> float:
    """Processor time over time while this thread, the only one with work, sleeps after calls."""
    for call in turns:
        call()
    start_s, burnt_s = time.perf_counter(), time.process_time()
    time.sleep(_NAP_S)
    return (time.process_time() - burnt_s) / (time.perf_counter() - start_s)


def _torch_call(threads: int) -> Call:
    import torch

    torch.set_num_threads(threads)
    layer = torch.nn.Linear(_WIDTH, _OUT, bias=False)
    x = torch.randn(_ROWS, _WIDTH)

    def call() -> object:
        with torch.inference_mode():
            return layer(x)

    return call


def _onnxruntime_call(threads: int, spinning: bool) -> Call:  # noqa: FBT001 - of a job
    import onnxruntime

    if spinning:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
    else:
        options = onnxruntime_options(threads)
    session = onnxruntime.InferenceSession(_linear(), options, providers=["CPUExecutionProvider"])
    x = np.random.default_rng(0).standard_normal((_ROWS, _WIDTH)).astype(np.float32)
    y = np.empty((_ROWS, _OUT), np.float32)
    binding = session.io_binding()
    binding.bind_input("x", "cpu", 0, np.float32, x.shape, x.ctypes.data)
    binding.bind_output("y", "cpu", 0, np.float32, y.shape, y.ctypes.data)

    def call(_kept: Any = (x, y)) -> object:
        return session.run_with_iobinding(binding)

    return call


def _linear() -> bytes:
    """The layer as an ONNX file."""
    import onnx

    helper, real = onnx.helper, onnx.TensorProto.FLOAT
    weight = np.random.default_rng(1).standard_normal((_WIDTH, _OUT)).astype(np.float32) / 24
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "linear",
        [helper.make_tensor_value_info("x", real, [_ROWS, _WIDTH])],
        [helper.make_tensor_value_info("y", real, [_ROWS, _OUT])],
        [onnx.numpy_helper.from_array(weight, "w")],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    content: bytes = proto.SerializeToString()
    return content


def main(job: str) -> int:
    """Do a job and print what was found."""
    asked = json.loads(job)
    try:
        found = measure(**{k: asked[k] for k in ("threads", "spinning", "rounds", "calls")})
    except EdgeError as error:
        sys.stderr.write(error.message + "\n")
        return 1
    sys.stdout.write("\n" + json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
