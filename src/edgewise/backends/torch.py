"""Torch, eager: the module's own operators, cut at the stages. The baseline of every speed-up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgewise.backends.base import Context, Program, Segment, check_values, import_runtime
from edgewise.backends.onnx_pieces import verify
from edgewise.backends.threads import set_torch_threads
from edgewise.errors import OpUnsupported

if TYPE_CHECKING:
    from edgewise.model.heads import ExitHead
    from edgewise.model.staged import StagedModel

Float32 = npt.NDArray[np.float32]
NAME = "torch:cpu"


def load(
    model: StagedModel,
    *,
    threads: int = 1,
    segments: Sequence[Segment] | None = None,
    check: bool = True,
) -> Program:
    """Load a staged model on torch.

    Torch has one thread count per process: this call sets it.

    Args:
        model: Staged from a torch module, with a head at every exit.
        threads: Intra-op threads of the whole process.
        segments: Runs of stages to build as one piece; ``buddy_segments`` by default.
        check: Compare the cut pieces with each other and heads with numpy.

    Raises:
        BackendUnavailable: torch is not installed.
        OpUnsupported: The model did not come from a torch module.
    """
    torch = import_runtime("torch", backend=NAME, extra="torch")
    program = TorchProgram(model, torch=torch, threads=threads, segments=segments)
    set_torch_threads(threads)
    if check:
        verify(program)
    return program


class TorchProgram(Program):
    """Pieces of one exported module; any batch size the export allows."""

    backend = NAME

    def __init__(
        self,
        model: StagedModel,
        *,
        torch: Any,
        threads: int,
        segments: Sequence[Segment] | None,
    ) -> None:
        super().__init__(model, threads=threads, segments=segments)
        self.torch = torch
        stages = model.stages
        self.pieces: dict[Segment, Callable[[Any], Any]] = {}
        for i, j in self.segments:
            piece = model.source.torch_segment(stages[i].start.name, stages[j - 1].stop.name)
            if piece is None:
                raise OpUnsupported(
                    f"model {model.name!r} has no torch form",
                    help="use 'onnxruntime:CPU' or 'openvino:CPU', or stage the torch module",
                )
            self.pieces[i, j] = piece
        self.heads = {e.index: torch_head(torch, e.head) for e in model.exits if e.head is not None}

    def _make_context(self, batch: int) -> TorchContext:
        return TorchContext(self, batch)


def torch_head(torch: Any, head: ExitHead) -> Callable[[Any], Any]:
    """A head's inference form on torch tensors."""
    w = {k: torch.from_numpy(np.array(v)) for k, v in head.weights.items()}
    linear = torch.nn.functional.linear
    if head.spec.kind == "conv":
        kernel = w["hidden.weight"].reshape(head.spec.width, head.spec.channels, 1, 1)

        def run(x: Any) -> Any:
            hidden = torch.nn.functional.conv2d(x, kernel, w["hidden.bias"])
            return linear(hidden.relu_().mean((2, 3)), w["linear.weight"], w["linear.bias"])

    else:
        axes = (1,) if head.spec.kind == "token" else (2, 3)

        def run(x: Any) -> Any:
            hidden = linear(x.mean(axes), w["hidden.weight"], w["hidden.bias"])
            return linear(hidden.relu_(), w["linear.weight"], w["linear.bias"])

    return run


class TorchContext(Context):
    """The boundary tensors of one request."""

    def __init__(self, program: TorchProgram, batch: int) -> None:
        self.batch = batch
        self._program = program
        self._torch = program.torch
        self._tensors: list[Any] = [None] * (len(program.model.stages) + 1)

    def set_boundary(self, position: int, values: Float32) -> None:
        """Copy values in; the caller's array is only read."""
        shape = self._program.boundary_shape(position, self.batch)
        check_values(values, shape, position=position)
        self._tensors[position] = self._torch.from_numpy(np.array(values, dtype=np.float32))

    def boundary(self, position: int) -> Float32:
        """Return a copy."""
        return np.array(self._tensors[position].numpy(), dtype=np.float32)

    def run_segment(self, start: int, stop: int) -> None:
        """Run a piece."""
        piece = self._program.pieces.get((start, stop))
        if piece is None:
            raise self._program.unknown_segment(start, stop)
        try:
            with self._torch.inference_mode():
                self._tensors[stop] = piece(self._tensors[start])
        except Exception as error:
            raise self._program.failed(f"segment {start}-{stop}", error) from error

    def run_head(self, exit_index: int) -> Float32:
        """Answer at an exit."""
        features = self._tensors[self._program.model.check_exit(exit_index) + 1]
        head = self._program.heads.get(exit_index)
        if head is None:
            return np.array(features.numpy(), dtype=np.float32)
        try:
            with self._torch.inference_mode():
                return np.array(head(features).numpy(), dtype=np.float32)
        except Exception as error:
            raise self._program.failed(f"head {exit_index}", error) from error
