"""No model at all: costs on a virtual clock, for tests and simulations of decisions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edgewise.backends.base import ArrayContext, Program, Segment
from edgewise.clock import Clock, VirtualClock

if TYPE_CHECKING:
    from edgewise.model.staged import StagedModel

Float32 = npt.NDArray[np.float32]
NAME = "null"


def load(  # noqa: PLR0913 - each is one knob of a simulation
    model: StagedModel,
    *,
    threads: int = 1,
    segments: Sequence[Segment] | None = None,
    check: bool = True,  # noqa: ARG001 - nothing is computed, so nothing can differ
    clock: Clock | None = None,
    cost_s: Callable[[str], float] | None = None,
    logits: Callable[[int, Float32], Float32] | None = None,
) -> NullProgram:
    """Load a staged model on nothing.

    Args:
        model: Any; only its shape is used.
        threads: Kept for the record.
        segments: As for other backends.
        check: Without effect.
        clock: Moved forward by each unit's cost; a new virtual clock by default.
        cost_s: Unit name (``"segment:0-1"``, ``"head:2"``) to seconds; zero by default.
        logits: Exit index and input [B, ...] to logits [B, classes]; zeros by default.
    """
    return NullProgram(
        model, threads=threads, segments=segments, clock=clock, cost_s=cost_s, logits=logits
    )


class NullProgram(Program):
    """Counts and charges what would have run.

    Attributes:
        clock: The clock that units are charged to.
        ran: Names of the units that ran, in order, over all contexts.
    """

    backend = NAME

    def __init__(  # noqa: PLR0913 - each is one knob of a simulation
        self,
        model: StagedModel,
        *,
        threads: int = 1,
        segments: Sequence[Segment] | None = None,
        clock: Clock | None = None,
        cost_s: Callable[[str], float] | None = None,
        logits: Callable[[int, Float32], Float32] | None = None,
    ) -> None:
        super().__init__(model, threads=threads, segments=segments)
        self.clock = clock or VirtualClock()
        self.ran: list[str] = []
        self.cost_s = cost_s or (lambda _: 0.0)
        self.logits = logits

    def _make_context(self, batch: int) -> NullContext:
        return NullContext(self, batch)


class NullContext(ArrayContext):
    """Charges units to the program's clock."""

    def __init__(self, program: NullProgram, batch: int) -> None:
        super().__init__(program, batch)
        for array in self.arrays:
            array[...] = 0
        self._program = program

    def _charge(self, unit: str) -> None:
        self._program.ran.append(unit)
        self._program.clock.sleep_s(self._program.cost_s(unit))

    def run_segment(self, start: int, stop: int) -> None:
        """Charge a run of stages."""
        if (start, stop) not in self._program.segments:
            raise self._program.unknown_segment(start, stop)
        self._charge(f"segment:{start}-{stop}")

    def run_head(self, exit_index: int) -> Float32:
        """Charge a head and return made-up logits."""
        self._charge(f"head:{self._program.model.check_exit(exit_index)}")
        if self._program.logits is not None:
            return np.array(self._program.logits(exit_index, self.arrays[0]), dtype=np.float32)
        return np.zeros((self.batch, self._program.model.num_classes), dtype=np.float32)
