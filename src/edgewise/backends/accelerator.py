"""What every accelerator promises: prefixes are loaded by key, run one at a time, may be lost."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from edgewise.backends.piece import Array, ArraySpec, PieceFormat
from edgewise.device.accelerator import Accelerator
from edgewise.errors import BackendError


class AcceleratorLost(BackendError):
    """The device is gone, hung, or its process died; a restart may bring it back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """A model's first part, ready for an accelerator.

    Attributes:
        key: Unique on a device, for example ``"lobby/7"``: tenant and place of the cut.
        model: Content of the model file.
        format: Of that file.
        weight_bytes: F, its parameters.
        sram_bytes: Memory for it, where a compiler said so; the device's own where ``None``.
        compute_s: Time of its computing alone, for devices that are simulated; ``None`` else.
        input: What goes in.
        output: What comes out.
    """

    key: str
    model: bytes
    format: PieceFormat
    weight_bytes: int
    sram_bytes: int | None = None
    compute_s: float | None = None
    input: ArraySpec
    output: ArraySpec


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorAnswer:
    """What a call gave.

    Attributes:
        output: Fresh array.
        service_s: How long the device was busy, loading included, seconds.
        load_s: Of that, bringing parameters in that another model had displaced; ``None`` where
            the device does not tell.
        missed: Whether they had to be brought in; ``None`` where the device does not tell.
    """

    output: Array
    service_s: float
    load_s: float | None
    missed: bool | None


class AcceleratorDevice(ABC):
    """One device, used by one thread at a time (the engine's accelerator worker).

    Attributes:
        description: What the planner was told about it.
        provenance: ``"measured"`` where its times are real, ``"simulated"`` else.
    """

    description: Accelerator
    provenance: str

    @abstractmethod
    def load(self, prefix: Prefix) -> None:
        """Make a prefix ready to run. Loading a key again replaces it.

        Raises:
            BackendError: The device refuses it; others that are loaded stay usable.
            AcceleratorLost: The device is gone.
        """

    @abstractmethod
    def unload(self, key: str) -> None:
        """Forget a prefix; unknown keys are ignored."""

    @abstractmethod
    def run(self, key: str, x: Array) -> AcceleratorAnswer:
        """Run a loaded prefix and return when its output is readable.

        Raises:
            ShapeError: ``x`` does not fit.
            BackendError: The prefix failed at invocation; the device is still there.
            AcceleratorLost: The device is gone, hung past its watchdog, or held by another.
        """

    @abstractmethod
    def restart(self) -> None:
        """Bring a lost device back with everything that was loaded, within a restart budget.

        Raises:
            AcceleratorLost: It cannot be brought back now; the message says when to try again.
        """

    def pin(self, shares_bytes: Mapping[str, int]) -> None:
        """Give prefixes fixed shares of the memory, as when they are compiled together.

        Args:
            shares_bytes: By key; empty to go back to switching.

        Raises:
            BackendError: This device has no fixed shares.
        """
        if shares_bytes:
            raise BackendError(
                f"accelerator {self.description.name!r} cannot give models fixed shares of its"
                " memory while it runs",
                help="compile the prefixes together, or plan with residency 'switch'",
            )

    @property
    @abstractmethod
    def resident(self) -> tuple[str, ...]:
        """Keys whose parameters are in the device's memory, as far as is known, oldest first."""

    def close(self) -> None:  # noqa: B027 - nothing to give back, by default
        """Give the device back; no child process is left."""
