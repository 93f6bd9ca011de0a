"""OpenVINO: one compiled model per piece, tensors shared with our buffers, threads explicit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgewise.backends.base import Program, Segment, import_runtime
from edgewise.backends.compiled import CompiledProgram
from edgewise.backends.onnx_pieces import verify
from edgewise.backends.threads import openvino_settings
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
    openvino = import_runtime("openvino", backend=f"openvino:{device}", extra="openvino")
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


class OpenVinoProgram(CompiledProgram):
    """Compiled models of one staged model."""

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
        self._openvino = openvino
        self._core = core
        self._device = device
        self.pieces(1)

    def compile(self, proto: Any) -> Any:
        """Compile for the device."""
        settings = openvino_settings(self.threads, self._device)
        try:
            network = self._core.read_model(proto.SerializeToString())
            return self._core.compile_model(network, self._device, settings)
        except Exception as error:
            raise BackendError(
                f"OpenVINO refuses a stage of {self.model.name!r}: {error}"
            ) from error

    def bind(self, compiled: Any, source: Float32, target: Float32) -> Callable[[], object]:
        """Make an infer request whose tensors are our arrays."""
        request = compiled.create_infer_request()
        request.set_input_tensor(self._openvino.Tensor(source, shared_memory=True))
        request.set_output_tensor(self._openvino.Tensor(target, shared_memory=True))
        # In the calling thread: handing over to one of OpenVINO's costs twice as much, and now and
        # then milliseconds. Sharing spares a copy of the result that nobody reads.
        return functools.partial(request.infer, share_inputs=True, share_outputs=True)
