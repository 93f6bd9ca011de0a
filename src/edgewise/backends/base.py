"""What every backend promises: programs that are shared, contexts that are not."""

from __future__ import annotations

import importlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgewise.errors import BackendError, BackendUnavailable, ConfigError, ShapeError

if TYPE_CHECKING:
    from edgewise.model.staged import StagedModel

Float32 = npt.NDArray[np.float32]
Segment = tuple[int, int]

RTOL = 1e-4
ATOL_OF_SCALE = 1e-5


def buddy_segments(num_stages: int) -> tuple[Segment, ...]:
    """Which runs of stages to compile as one piece: halves of halves, down to single stages.

    A fused piece keeps a runtime's internal layouts across the boundaries inside it. Halving
    keeps the memory at log2(S) + 1 copies of the weights, and offers from most positions a large
    step while the deadline is far away and single stages near it.

    Args:
        num_stages: S, at least 1.

    Returns:
        Pairs (start, stop) with 0 <= start < stop <= S, every single stage among them.

    Example:
        >>> buddy_segments(4)
        ((0, 1), (0, 2), (0, 4), (1, 2), (2, 3), (2, 4), (3, 4))
    """
    found: set[Segment] = set()
    pending = [(0, num_stages)]
    while pending:
        start, stop = pending.pop()
        found.add((start, stop))
        if stop - start > 1:
            middle = (start + stop + 1) // 2
            pending += [(start, middle), (middle, stop)]
    return tuple(sorted(found))


def empty_aligned(shape: Sequence[int]) -> Float32:
    """An uninitialised float32 array on a 64-byte boundary, so that any runtime may share it."""
    size = int(np.prod(shape))
    raw = np.empty(size + 16, dtype=np.float32)
    offset = (-raw.ctypes.data % 64) // 4
    return raw[offset : offset + size].reshape(shape)


def import_runtime(module: str, *, backend: str, extra: str, said: str | None = None) -> Any:
    """Import the package a backend runs on, or say which extra to install.

    Args:
        module: Its name.
        backend: Who needs it, for the message.
        extra: Of Edgewise, that installs it.
        said: What to call the package; its module's name by default.

    Raises:
        BackendUnavailable: It is not installed, or cannot be loaded.
    """
    needs = f"backend {backend!r} needs {said or module}, which"
    install = f"pip install 'edgewise[{extra}]'"
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise BackendUnavailable(f"{needs} is not installed ({error})", help=install) from error
    except (ImportError, OSError, SystemError) as error:  # the last where memory ran out
        raise BackendUnavailable(
            f"{needs} cannot be loaded: {error}", help=f"free memory, or install it anew: {install}"
        ) from error


class Context(ABC):
    """Buffers of one request at a time on one program. Not for two threads at once.

    Positions count finished stages: position 0 is the input, position k the end of stage k - 1.
    """

    batch: int

    @abstractmethod
    def set_boundary(self, position: int, values: Float32) -> None:
        """Copy ``values`` [B, ...] into the tensor at a position; 0 is the model's input.

        Raises:
            ShapeError: They have another shape, or a type that is no number.
        """

    @abstractmethod
    def boundary(self, position: int) -> Float32:
        """Return a copy [B, ...] of the tensor at a position that has been computed."""

    @abstractmethod
    def run_segment(self, start: int, stop: int) -> None:
        """Run the stages from one position to another and return when the result is readable.

        Raises:
            ConfigError: That run of stages was not compiled.
            BackendError: The runtime failed; its own message is the cause.
        """

    @abstractmethod
    def run_head(self, exit_index: int) -> Float32:
        """Answer at an exit whose position has been computed.

        Returns:
            Logits [B, classes], a fresh array on the host.

        Raises:
            ConfigError: There is no such exit.
            BackendError: The runtime failed; its own message is the cause.
        """

    def finish(self, exit_index: int) -> bool:  # noqa: ARG002
        """Do what is left to do once the answer of an exit was taken; part of its head's cost.

        Returns:
            Whether that took time.
        """
        return False


class Program(ABC):
    """A staged model, loaded on one backend with one thread policy; shared by all threads.

    Attributes:
        backend: Runtime on device, for example ``"onnxruntime:CPU"``.
        model: What was loaded.
        threads: How many threads one call uses.
        segments: The runs of stages that were compiled.
    """

    backend: str

    def __init__(
        self, model: StagedModel, *, threads: int, segments: Sequence[Segment] | None = None
    ) -> None:
        if threads < 1:
            raise ConfigError(f"expected at least one thread, found {threads}")
        if not model.has_all_heads:
            missing = [e.index for e in model.exits if e.head is None]
            raise ConfigError(
                f"model {model.name!r} has no head at exit {missing[0]}",
                help="fit heads with `edgewise prepare`, or time it with model.with_random_heads()",
            )
        self.model = model
        self.threads = threads
        num = len(model.stages)
        chosen = buddy_segments(num) if segments is None else tuple(segments)
        singles = {(k, k + 1) for k in range(num)}
        self.segments: frozenset[Segment] = frozenset(singles | set(chosen))
        for start, stop in self.segments:
            if not 0 <= start < stop <= num:
                raise ConfigError(f"segment ({start}, {stop}) is outside a model of {num} stages")
        self._free: dict[int, list[Context]] = {}
        self._lock = threading.Lock()

    @abstractmethod
    def _make_context(self, batch: int) -> Context:
        """Make buffers for a batch size, compiling for it where the runtime must."""

    @contextmanager
    def context(self, batch: int = 1) -> Iterator[Context]:
        """Borrow a context. One that saw an exception is thrown away, not lent again.

        Args:
            batch: Samples per call.

        Raises:
            BackendError: The model cannot run that batch size.
        """
        if batch < 1:
            raise ConfigError(f"expected a batch of at least one sample, found {batch}")
        if batch > 1 and not self.model.source.dynamic_batch:
            raise BackendError(
                f"model {self.model.name!r} was exported for one sample, found a batch of {batch}",
                help="export it with a symbolic first axis, or run samples one by one",
            )
        with self._lock:
            free = self._free.setdefault(batch, [])
            context = free.pop() if free else None
        if context is None:
            context = self._make_context(batch)
        yield context  # an exception leaves here, and the context with it
        with self._lock:
            self._free[batch].append(context)

    def unknown_segment(self, start: int, stop: int) -> ConfigError:
        """Make the error for a run of stages that was not compiled."""
        known = ", ".join(f"{i}-{j}" for i, j in sorted(self.segments))
        return ConfigError(
            f"the segment from position {start} to {stop} of {self.model.name!r} was not compiled",
            help=f"compiled are {known}",
        )

    def failed(self, what: str, error: Exception) -> BackendError:
        """Make the error for a runtime that failed while it ran something."""
        return BackendError(f"backend {self.backend!r} failed in {what}: {error}")

    def boundary_shape(self, position: int, batch: int) -> tuple[int, ...]:
        """Shape of the tensor at a position."""
        spec = self.model.input if position == 0 else self.model.stages[position - 1].stop
        return (batch, *spec.shape[1:])


class ArrayContext(Context):
    """A context whose boundary tensors are numpy arrays that runtimes read and write in place."""

    def __init__(self, program: Program, batch: int) -> None:
        self.batch = batch
        self.arrays = [
            empty_aligned(program.boundary_shape(p, batch))
            for p in range(len(program.model.stages) + 1)
        ]

    def set_boundary(self, position: int, values: Float32) -> None:
        """Copy values in; the caller's array is only read."""
        array = self.arrays[position]
        check_values(values, array.shape, position=position)
        np.copyto(array, values, casting="same_kind")

    def boundary(self, position: int) -> Float32:
        """Return a copy."""
        return self.arrays[position].copy()


def check_values(values: Any, expected: tuple[int, ...], *, position: int) -> None:
    """Raise `ShapeError` unless values can be copied to a position."""
    if not isinstance(values, np.ndarray) or values.shape != expected:
        raise ShapeError(
            f"expected an array of shape {expected} at position {position}, found"
            f" {getattr(values, 'shape', type(values).__name__)}"
        )
    if not np.can_cast(values.dtype, np.float32, casting="same_kind"):
        raise ShapeError(f"expected numbers at position {position}, found {values.dtype}")


def probe_input(model: StagedModel, *, batch: int = 1, seed: int = 0) -> Float32:
    """A seeded input for comparisons and timing: values as a normalised image has them."""
    rng = np.random.default_rng(seed)
    shape = (batch, *model.input.shape[1:])
    return rng.uniform(-1.0, 1.0, shape).astype(np.float32)


def check_close(found: Float32, expected: Float32, *, what: str, backend: str) -> float:
    """Compare a stage's output with the reference's.

    Args:
        found: From the backend.
        expected: From the reference, same shape.
        what: The stage, for the message.
        backend: The backend, for the message.

    Returns:
        Largest error over the tolerance, at most 1.

    Raises:
        BackendError: An element differs by more than 1e-4 of itself plus 1e-5 of the largest
            magnitude, or is not finite where the reference is.
    """
    if found.shape != expected.shape:
        raise BackendError(
            f"backend {backend!r} computes {what} wrongly: its shape is {found.shape}, expected"
            f" {expected.shape}",
            help="choose another backend; `edgewise doctor --backends` lists those here",
        )
    scale = float(np.abs(expected).max(initial=0.0))
    allowed = RTOL * np.abs(expected) + ATOL_OF_SCALE * scale + np.finfo(np.float32).tiny
    with np.errstate(invalid="ignore"):  # infinite on both sides is refused below
        excess = np.abs(found.astype(np.float64) - expected) / allowed
    worst = float(excess.max(initial=0.0))
    if not worst <= 1.0:
        raise BackendError(
            f"backend {backend!r} computes {what} wrongly: the largest error is {worst:.3g} times"
            f" the tolerance (rtol {RTOL:g}, atol {ATOL_OF_SCALE:g} of the scale {scale:.3g})",
            help="choose another backend; `edgewise doctor --backends` lists those here",
        )
    return worst
