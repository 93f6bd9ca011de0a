"""Whole-model compilers beside a plan: torch.compile, OpenVINO, ONNX Runtime, AITune.

Each is a contender in an integrated run, for a prefill: none of them keeps a cache without being
told how, so decoding is left out.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgewise.backends.threads import onnxruntime_options, openvino_settings
from edgewise.bench.dispatch_runs import Call, Contender, Pass, Runner
from edgewise.errors import BackendUnavailable

if TYPE_CHECKING:
    import torch

Open = Callable[[Runner, Pass, int, Path], Call]


def open_peer(name: str, runner: Runner, each: Pass, *, threads: int, folder: Path) -> Contender:
    """Compile the whole model for one prefill.

    Args:
        name: Of :data:`PEERS`.
        runner: Of the model.
        each: The prefill.
        threads: Of each call.
        folder: Where the exported model is kept for the next; for as long as the peer runs.

    Raises:
        BackendUnavailable: It is not here, or does not take this model; its own words are in it.
    """
    import torch

    try:
        with torch.no_grad():
            call = PEERS[name](runner, each, threads, folder)
            call(each)  # a compiler may begin with the first call
    except BackendUnavailable:
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        raise BackendUnavailable(f"{type(error).__name__}: {said}") from error
    return Contender(name=name, call=call)


def _compiled(runner: Runner, each: Pass, threads: int, folder: Path) -> Call:
    import torch

    del each, threads, folder  # one graph for each size; threads are torch's
    compiled: Any = torch.compile(runner.model, dynamic=False)

    def call(one: Pass) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = compiled(runner.tokens(one), use_cache=False).logits
        return logits

    return call


class _Logits:
    """A model that answers with one tensor, for exporters; made late, since it needs torch."""

    def __new__(cls, model: Any) -> Any:
        import torch

        class Logits(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = model

            def forward(self, tokens: torch.Tensor) -> Any:
                return self.inner(tokens, use_cache=False).logits

        return Logits().eval()


def _exported(runner: Runner, each: Pass, folder: Path) -> Path:
    """The model as an ONNX file for that prefill; written once in a folder."""
    _need("onnxscript")
    import torch

    file = folder / f"prefill-{each.length}.onnx"
    if not file.exists():
        example = (runner.tokens(each),)
        torch.onnx.export(
            _Logits(runner.model),
            example,
            str(file),
            dynamo=True,
            external_data=True,
            verbose=False,
        )
    return file


def _openvino(runner: Runner, each: Pass, threads: int, folder: Path) -> Call:
    _need("openvino")
    import openvino
    import torch

    # By way of ONNX: OpenVINO's own conversion from torch does not take these models.
    network = openvino.Core().read_model(_exported(runner, each, folder))
    compiled = openvino.Core().compile_model(network, "CPU", openvino_settings(threads))
    request = compiled.create_infer_request()

    def call(one: Pass) -> torch.Tensor:
        answer = request.infer([runner.tokens(one).numpy()], share_inputs=True)
        return torch.from_numpy(answer[0])

    return call


def _onnxruntime(runner: Runner, each: Pass, threads: int, folder: Path) -> Call:
    _need("onnxruntime")
    import onnxruntime
    import torch

    session = onnxruntime.InferenceSession(
        _exported(runner, each, folder),
        onnxruntime_options(threads),
        providers=["CPUExecutionProvider"],
    )
    name = session.get_inputs()[0].name

    def call(one: Pass) -> torch.Tensor:
        return torch.from_numpy(session.run(None, {name: runner.tokens(one).numpy()})[0])

    return call


def _aitune(runner: Runner, each: Pass, threads: int, folder: Path) -> Call:
    del runner, each, threads, folder
    _need("aitune")
    raise BackendUnavailable("AITune is installed, but tunes for a GPU alone")


def _need(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise BackendUnavailable(f"{module} is not installed")


PEERS: Mapping[str, Open] = {
    "torch.compile": _compiled,
    "ONNX Runtime whole model": _onnxruntime,
    "OpenVINO whole model": _openvino,
    "AITune": _aitune,
}
