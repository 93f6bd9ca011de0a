"""What the tenant engine is given, and what it tells of every request and every change of plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from edgewise.placement.plan import Placement
from edgewise.profiles.partition import PartitionProfile

Array = npt.NDArray[Any]
Outcome = Literal["answered", "refused", "cancelled", "failed", "dropped"]


class Cuttable(Protocol):
    """A model whose pieces can be had; `PartitionedModel` is one."""

    @property
    def name(self) -> str:
        """For people."""
        ...

    @property
    def last(self) -> int:
        """P."""
        ...

    @property
    def format(self) -> Any:
        """Of its pieces, ``"onnx"`` or ``"tflite"``."""
        ...

    @property
    def places(self) -> tuple[Any, ...]:
        """With ``shape``, ``dtype``, ``nbytes`` and ``prefix_bytes`` each."""
        ...

    def segment(self, start: int, stop: int) -> bytes:
        """Content of the model file between two places."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantModel:
    """A tenant as the engine runs it.

    Attributes:
        name: The same as in the placement.
        model: Makes prefixes and suffixes.
        profile: Its costs; times of a simulated device come from here.
        deadline_s: Relative deadline of its requests; ``None`` for none.
        priority: 0 first.
    """

    name: str
    model: Cuttable
    profile: PartitionProfile
    deadline_s: float | None = None
    priority: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRule:
    """In which order the accelerator serves.

    Attributes:
        discipline: ``fcfs``: as they came. ``switch-aware``: the resident tenant's queue first,
            at most ``burst`` in a row while others wait.
        burst: Requests in a row, at least 1.
        threshold: A tenant that is not resident becomes ready when so many of its requests wait...
        timeout_s: ... or when its oldest has waited so long. 0 for at once.
    """

    discipline: Literal["fcfs", "switch-aware"] = "switch-aware"
    burst: int = 16
    threshold: int = 1
    timeout_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantAnswer:
    """How one request ended. Instants are of the engine's clock, seconds.

    Attributes:
        tenant: Whose.
        number: Of the request, rising from 0 over all tenants.
        outcome: Whether there is an output.
        output: The answer; ``None`` unless answered.
        reason: Why not, for people; ``""`` where answered.
        retry_after_s: When a refused one may be sent again, from ``done_s``; ``None`` where
            waiting does not help, or nothing is known.
        due_s: When it should have been sent: the arrival that latency is counted from.
        done_s: When it ended.
        plan: Number of the plan it ran under.
        accelerator_wait_s: Until its prefix began; ``None`` where it has none.
        service_s: Its prefix, loading included; ``None`` likewise.
        load_s: Of that, reloading of parameters; ``None`` where not told.
        missed: Whether it had to; ``None`` where not told.
        cpu_wait_s: Until its suffix began; ``None`` where it has none.
        cpu_s: Its suffix; ``None`` likewise.
        exit_index: Where it left early, for tenants with exits; ``None`` else.
    """

    tenant: str
    number: int
    outcome: Outcome
    output: Array | None = field(repr=False)
    reason: str = ""
    retry_after_s: float | None = None
    due_s: float
    done_s: float
    plan: int
    accelerator_wait_s: float | None = None
    service_s: float | None = None
    load_s: float | None = None
    missed: bool | None = None
    cpu_wait_s: float | None = None
    cpu_s: float | None = None
    exit_index: int | None = None

    @property
    def response_s(self) -> float:
        """From its due instant to its end."""
        return self.done_s - self.due_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChange:
    """One change of plan, carried out without dropping a request.

    Attributes:
        number: Of the new plan, rising from 0 for the first.
        placement: The new plan.
        began_s: When warming began.
        routed_s: When new requests went to it.
        drained_s: When the last request of the old plan ended; ``None`` while some run.
        reason: Why it changed.
    """

    number: int
    placement: Placement
    began_s: float
    routed_s: float
    drained_s: float | None = None
    reason: str = ""


Done = Callable[[TenantAnswer], None]


def zeros_for(model: Cuttable) -> Array:
    """An input of the right shape and type for warming a model up."""
    place = model.places[0]
    return np.zeros(place.shape, dtype=place.dtype)
