"""ONNX Runtime on the CPU: one session per piece, buffers bound once, no spinning threads."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgewise.backends.base import ArrayContext, Program, Segment, empty_aligned
from edgewise.backends.onnx_pieces import head_proto, verify
from edgewise.errors import BackendError, BackendUnavailable

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
    try:
        runtime = importlib.import_module("onnxruntime")
    except ImportError as error:
        raise BackendUnavailable(
            f"backend {NAME!r} needs onnxruntime, which is not installed ({error})",
            help="pip install 'edgewise[onnx]'",
        ) from error
    program = OnnxRuntimeProgram(model, runtime=runtime, threads=threads, segments=segments)
    if check:
        verify(program)
    return program


class OnnxRuntimeProgram(Program):
    """Sessions of one model; compiled for a batch size when first asked."""

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
        self._pieces: dict[int, tuple[dict[Segment, Any], dict[int, Any]]] = {}
        self._compiled(1)

    def _session(self, proto: Any) -> Any:
        options = self._runtime.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry("session.inter_op.allow_spinning", "0")
        try:
            return self._runtime.InferenceSession(
                proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            raise BackendError(
                f"ONNX Runtime refuses a stage of {self.model.name!r}: {error}"
            ) from error

    def _compiled(self, batch: int) -> tuple[dict[Segment, Any], dict[int, Any]]:
        """Sessions for a batch size. Two threads may compile the same; one result is kept."""
        if batch not in self._pieces:
            stages, source = self.model.stages, self.model.source
            segments = {
                (i, j): self._session(
                    source.onnx_segment(stages[i].start.name, stages[j - 1].stop.name, batch=batch)
                )
                for i, j in self.segments
            }
            heads = {
                e.index: self._session(head_proto(e.head, batch=batch))
                for e in self.model.exits
                if e.head is not None
            }
            self._pieces.setdefault(batch, (segments, heads))
        return self._pieces[batch]

    def _make_context(self, batch: int) -> OnnxRuntimeContext:
        segments, heads = self._compiled(batch)
        return OnnxRuntimeContext(self, batch, segments, heads)


class OnnxRuntimeContext(ArrayContext):
    """Boundary arrays bound to each session once."""

    def __init__(
        self,
        program: OnnxRuntimeProgram,
        batch: int,
        segments: dict[Segment, Any],
        heads: dict[int, Any],
    ) -> None:
        super().__init__(program, batch)
        self._program = program
        classes = program.model.num_classes
        self._logits = [empty_aligned((batch, classes)) for _ in program.model.exits]
        self._segments = {
            (i, j): _bind(session, self.arrays[i], self.arrays[j])
            for (i, j), session in segments.items()
        }
        self._heads = {
            k: _bind(session, self.arrays[k + 1], self._logits[k]) for k, session in heads.items()
        }

    def run_segment(self, start: int, stop: int) -> None:
        """Run a compiled run of stages."""
        try:
            run, binding = self._segments[start, stop]
            run(binding)
        except KeyError:
            raise self._program.unknown_segment(start, stop) from None
        except Exception as error:
            raise self._program.failed(f"segment {start}-{stop}", error) from error

    def run_head(self, exit_index: int) -> Float32:
        """Answer at an exit."""
        bound = self._heads.get(exit_index)
        if bound is None:
            return self.arrays[self._program.model.check_exit(exit_index) + 1].copy()
        run, binding = bound
        try:
            run(binding)
        except Exception as error:
            raise self._program.failed(f"head {exit_index}", error) from error
        return self._logits[exit_index].copy()


def _bind(session: Any, source: Float32, target: Float32) -> tuple[Any, Any]:
    binding = session.io_binding()
    binding.bind_input(
        session.get_inputs()[0].name, "cpu", 0, np.float32, source.shape, source.ctypes.data
    )
    binding.bind_output(
        session.get_outputs()[0].name, "cpu", 0, np.float32, target.shape, target.ctypes.data
    )
    return session.run_with_iobinding, binding
