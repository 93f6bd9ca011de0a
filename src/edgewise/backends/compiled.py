"""What runtimes that compile ONNX pieces share: one piece per segment and head, bound once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgewise.backends.base import ArrayContext, Program, Segment, empty_aligned
from edgewise.backends.onnx_pieces import head_proto

if TYPE_CHECKING:
    from edgewise.model.staged import StagedModel

Float32 = npt.NDArray[np.float32]


class CompiledProgram(Program):
    """Compiled pieces of one model; a batch size is compiled when first asked for.

    A runtime's file says how a piece is compiled and how it is bound to arrays.
    """

    def __init__(
        self, model: StagedModel, *, threads: int, segments: Sequence[Segment] | None
    ) -> None:
        super().__init__(model, threads=threads, segments=segments)
        self._pieces: dict[int, tuple[dict[Segment, Any], dict[int, Any]]] = {}

    @abstractmethod
    def compile(self, proto: Any) -> Any:
        """Compile one piece.

        Args:
            proto: A complete onnx.ModelProto.

        Raises:
            BackendError: The runtime refuses it.
        """

    @abstractmethod
    def bind(self, compiled: Any, source: Float32, target: Float32) -> Callable[[], object]:
        """Return a call that runs a compiled piece from one array into another."""

    def pieces(self, batch: int) -> tuple[dict[Segment, Any], dict[int, Any]]:
        """Segments and heads for a batch size. Two threads may compile the same; one is kept."""
        if batch not in self._pieces:
            stages, source = self.model.stages, self.model.source
            segments = {
                (i, j): self.compile(
                    source.onnx_segment(stages[i].start.name, stages[j - 1].stop.name, batch=batch)
                )
                for i, j in self.segments
            }
            heads = {
                e.index: self.compile(head_proto(e.head, batch=batch))
                for e in self.model.exits
                if e.head is not None
            }
            self._pieces.setdefault(batch, (segments, heads))
        return self._pieces[batch]

    def _make_context(self, batch: int) -> CompiledContext:
        return CompiledContext(self, batch)


class CompiledContext(ArrayContext):
    """Boundary arrays that every piece reads and writes in place."""

    def __init__(self, program: CompiledProgram, batch: int) -> None:
        super().__init__(program, batch)
        self._program = program
        segments, heads = program.pieces(batch)
        classes = program.model.num_classes
        self._logits = [empty_aligned((batch, classes)) for _ in program.model.exits]
        self._segments = {
            (i, j): program.bind(piece, self.arrays[i], self.arrays[j])
            for (i, j), piece in segments.items()
        }
        self._heads = {
            k: program.bind(piece, self.arrays[k + 1], self._logits[k])
            for k, piece in heads.items()
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
