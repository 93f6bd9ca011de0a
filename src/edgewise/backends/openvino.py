"""OpenVINO: one compiled model per piece, tensors shared with our buffers, threads explicit."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgewise.backends.base import ArrayContext, Program, Segment, empty_aligned
from edgewise.backends.onnx_pieces import head_proto, verify
from edgewise.errors import BackendError, BackendUnavailable

if TYPE_CHECKING:
    from edgewise.model.staged import StagedModel

Float32 = npt.NDArray[np.float32]


def load(
    model: StagedModel,
    *,
    threads: int = 1,
    segments: Sequence[Segment] | None = None,
    check: bool = True,
    device: str = "CPU",
) -> Program:
    """Compile a staged model for OpenVINO.

    Args:
        model: With a head at every exit.
        threads: Inference threads of each call.
        segments: Runs of stages to compile as one piece; ``buddy_segments`` by default.
        check: Compare every stage with the reference before the program is returned.
        device: OpenVINO's name of the device.

    Raises:
        BackendUnavailable: openvino is not installed, or has no such device here.
        BackendError: A stage cannot be compiled, or computes something else than the reference.
    """
    try:
        openvino = importlib.import_module("openvino")
    except ImportError as error:
        raise BackendUnavailable(
            f"backend 'openvino:{device}' needs openvino, which is not installed ({error})",
            help="pip install 'edgewise[openvino]'",
        ) from error
    core = openvino.Core()
    devices = core.available_devices
    if device not in devices:
        raise BackendUnavailable(
            f"backend 'openvino:{device}' is not available: OpenVINO lists"
            f" {', '.join(devices) or 'no device'}",
            help="edgewise doctor --backends",
        )
    program = OpenVinoProgram(
        model, openvino=openvino, core=core, device=device, threads=threads, segments=segments
    )
    if check:
        verify(program)
    return program


class OpenVinoProgram(Program):
    """Compiled models of one staged model; compiled for a batch size when first asked."""

    def __init__(  # noqa: PLR0913 - what `load` found, passed in
        self,
        model: StagedModel,
        *,
        openvino: Any,
        core: Any,
        device: str,
        threads: int,
        segments: Sequence[Segment] | None,
    ) -> None:
        super().__init__(model, threads=threads, segments=segments)
        self.backend = f"openvino:{device}"
        self.openvino = openvino
        self._core = core
        self._device = device
        self._pieces: dict[int, tuple[dict[Segment, Any], dict[int, Any]]] = {}
        self._compiled(1)

    def _compile(self, proto: Any) -> Any:
        settings: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32", "NUM_STREAMS": "1"}
        if self._device == "CPU":
            settings |= {"INFERENCE_NUM_THREADS": self.threads, "ENABLE_CPU_PINNING": False}
        try:
            network = self._core.read_model(proto.SerializeToString())
            return self._core.compile_model(network, self._device, settings)
        except Exception as error:
            raise BackendError(
                f"OpenVINO refuses a stage of {self.model.name!r}: {error}"
            ) from error

    def _compiled(self, batch: int) -> tuple[dict[Segment, Any], dict[int, Any]]:
        """Compiled models for a batch size. Two threads may compile the same; one is kept."""
        if batch not in self._pieces:
            stages, source = self.model.stages, self.model.source
            segments = {
                (i, j): self._compile(
                    source.onnx_segment(stages[i].start.name, stages[j - 1].stop.name, batch=batch)
                )
                for i, j in self.segments
            }
            heads = {
                e.index: self._compile(head_proto(e.head, batch=batch))
                for e in self.model.exits
                if e.head is not None
            }
            self._pieces.setdefault(batch, (segments, heads))
        return self._pieces[batch]

    def _make_context(self, batch: int) -> OpenVinoContext:
        segments, heads = self._compiled(batch)
        return OpenVinoContext(self, batch, segments, heads)


class OpenVinoContext(ArrayContext):
    """Infer requests whose tensors are our boundary arrays."""

    def __init__(
        self,
        program: OpenVinoProgram,
        batch: int,
        segments: dict[Segment, Any],
        heads: dict[int, Any],
    ) -> None:
        super().__init__(program, batch)
        self._program = program
        openvino = program.openvino
        classes = program.model.num_classes
        self._logits = [empty_aligned((batch, classes)) for _ in program.model.exits]
        tensors = [openvino.Tensor(a, shared_memory=True) for a in self.arrays]
        answers = [openvino.Tensor(a, shared_memory=True) for a in self._logits]
        self._segments = {
            (i, j): _bind(compiled, tensors[i], tensors[j]) for (i, j), compiled in segments.items()
        }
        self._heads = {
            k: _bind(compiled, tensors[k + 1], answers[k]) for k, compiled in heads.items()
        }

    def run_segment(self, start: int, stop: int) -> None:
        """Run a compiled run of stages."""
        try:
            self._segments[start, stop]()
        except KeyError:
            raise self._program.unknown_segment(start, stop) from None
        except Exception as error:
            raise self._program.failed(f"segment {start}-{stop}", error) from error

    def run_head(self, exit_index: int) -> Float32:
        """Answer at an exit."""
        run = self._heads.get(exit_index)
        if run is None:
            return self.arrays[self._program.model.check_exit(exit_index) + 1].copy()
        try:
            run()
        except Exception as error:
            raise self._program.failed(f"head {exit_index}", error) from error
        return self._logits[exit_index].copy()


def _bind(compiled: Any, source: Any, target: Any) -> Callable[[], Any]:
    request = compiled.create_infer_request()
    request.set_input_tensor(source)
    request.set_output_tensor(target)
    # In the calling thread: handing over to one of OpenVINO's costs twice as much, and now and
    # then milliseconds. Sharing spares a copy of the result that nobody reads.
    return functools.partial(request.infer, share_inputs=True, share_outputs=True)
