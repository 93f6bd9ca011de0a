"""Plain numpy, through ONNX's own evaluator: slow, simple, and what other backends are held to."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edgewise.backends.base import ArrayContext, Program, Segment, import_runtime
from edgewise.backends.onnx_pieces import verify

if TYPE_CHECKING:
    from edgewise.model.staged import StagedModel

Float32 = npt.NDArray[np.float32]
NAME = "numpy:CPU"


def load(
    model: StagedModel,
    *,
    threads: int = 1,
    segments: Sequence[Segment] | None = None,
    check: bool = True,
) -> Program:
    """Load a staged model on the reference backend.

    Args:
        model: With a head at every exit.
        threads: Kept for the record; numpy's BLAS follows its own settings.
        segments: Runs of stages that may be asked for at once; ``buddy_segments`` by default.
        check: Compare every stage with torch where the model came from torch.

    Raises:
        BackendUnavailable: The ``onnx`` package is not installed.
    """
    import_runtime("onnx.reference", backend=NAME, extra="onnx", said="the onnx package")
    program = NumpyProgram(model, threads=threads, segments=segments)
    if check:
        verify(program)
    return program


class NumpyProgram(Program):
    """ONNX evaluators of one model."""

    backend = NAME

    def _make_context(self, batch: int) -> NumpyContext:
        return NumpyContext(self, batch)


class NumpyContext(ArrayContext):
    """Evaluates a piece by its operators' definitions."""

    def __init__(self, program: NumpyProgram, batch: int) -> None:
        super().__init__(program, batch)
        evaluator = importlib.import_module("onnx.reference").ReferenceEvaluator
        stages, source = program.model.stages, program.model.source
        self._program = program
        self._singles = [
            evaluator(source.onnx_segment(s.start.name, s.stop.name, batch=batch)) for s in stages
        ]

    def run_segment(self, start: int, stop: int) -> None:
        """Run stages one after another."""
        if (start, stop) not in self._program.segments:
            raise self._program.unknown_segment(start, stop)
        try:
            for k in range(start, stop):
                evaluator = self._singles[k]
                (result,) = evaluator.run(None, {evaluator.input_names[0]: self.arrays[k]})
                self.arrays[k + 1][...] = result
        except Exception as error:
            raise self._program.failed(f"segment {start}-{stop}", error) from error

    def run_head(self, exit_index: int) -> Float32:
        """Answer at an exit."""
        model = self._program.model
        head = model.exits[model.check_exit(exit_index)].head
        features = self.arrays[exit_index + 1]
        return features.copy() if head is None else head(features)
