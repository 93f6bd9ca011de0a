"""ONNX Runtime on the CPU: one session per piece, buffers bound once, no spinning threads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgewise.backends.base import Program, Segment, import_runtime
from edgewise.backends.compiled import CompiledProgram
from edgewise.backends.onnx_pieces import verify
from edgewise.backends.threads import onnxruntime_options
from edgewise.errors import BackendError

if TYPE_CHECKING:
    from edgewise.model.staged import StagedModel

Float32 = npt.NDArray[np.float32]
NAME = "onnxruntime:CPU"


def load(
    model: StagedModel,
    *,
    threads: int = 1,
    segments: Sequence[Segment] | None = None,
    check: bool = True,
) -> Program:
    """Compile a staged model for ONNX Runtime.

    Args:
        model: With a head at every exit.
        threads: Intra-op threads of each call.
        segments: Runs of stages to compile as one piece; ``buddy_segments`` by default.
        check: Compare every stage with the reference before the program is returned.

    Raises:
        BackendUnavailable: onnxruntime is not installed.
        BackendError: A stage cannot be compiled, or computes something else than the reference.
    """
    runtime = import_runtime("onnxruntime", backend=NAME, extra="onnx")
    program = OnnxRuntimeProgram(model, runtime=runtime, threads=threads, segments=segments)
    if check:
        verify(program)
    return program


class OnnxRuntimeProgram(CompiledProgram):
    """Sessions of one model."""

    backend = NAME

    def __init__(
        self,
        model: StagedModel,
        *,
        runtime: Any,
        threads: int,
        segments: Sequence[Segment] | None,
    ) -> None:
        super().__init__(model, threads=threads, segments=segments)
        self._runtime = runtime
        self.pieces(1)

    def compile(self, proto: Any) -> Any:
        """Make a session."""
        options = onnxruntime_options(self.threads)
        try:
            return self._runtime.InferenceSession(
                proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            raise BackendError(
                f"ONNX Runtime refuses a stage of {self.model.name!r}: {error}"
            ) from error

    def bind(self, compiled: Any, source: Float32, target: Float32) -> Callable[[], object]:
        """Bind a session's only input and output."""
        binding = compiled.io_binding()
        binding.bind_input(
            compiled.get_inputs()[0].name, "cpu", 0, np.float32, source.shape, source.ctypes.data
        )
        binding.bind_output(
            compiled.get_outputs()[0].name, "cpu", 0, np.float32, target.shape, target.ctypes.data
        )
        return functools.partial(compiled.run_with_iobinding, binding)
