"""What dispatch decided: which backend runs each operator or segment of a forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from edgewise.dispatch.problem import HOME, Objective
from edgewise.dispatch.trace import Phase
from edgewise.profiles.operators import Kind
from edgewise.profiles.records import Provenance, ThreadPolicy

Reason = Literal["cheapest", "saves a switch", "segment", "only one", "tie", "guard", "constraint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One piece of a plan, in the order they run.

    Attributes:
        name: Module path of the operator, or of the segment's module.
        kind: Of the operator or segment.
        backend: Who runs it.
        covers: Module paths of the operators that it computes, in order; one for an operator.
        shapes: Keys of the shapes that are run, in order; one for an operator.
        predicted_s: Its cost, seconds, without the switch to it.
        switch_s: Of going there from the step before.
        predicted_j: Its energy, joules; ``None`` where not known.
        best_other: The next best backend for it alone; ``None`` where there is none.
        margin_s: How much more that one costs by itself, seconds; negative where this step is
            dearer by itself and pays off by saving switches.
        tie: The intervals of both medians overlap.
        reason: Why this backend.
    """

    name: str
    kind: Kind
    backend: str
    covers: tuple[str, ...]
    shapes: tuple[str, ...]
    predicted_s: float
    switch_s: float = 0.0
    predicted_j: float | None = None
    best_other: str | None = None
    margin_s: float | None = None
    tie: bool = False
    reason: Reason = "cheapest"


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePlan:
    """The plan for one forward pass: one phase and length.

    Attributes:
        phase: Prefill or decode.
        length: Tokens that go in.
        past: Tokens in the cache before.
        steps: In the order they run.
        predicted_s: Total with switches and with operators that stay on torch, seconds.
        predicted_j: The same, joules; ``None`` where not known.
        best_static: Name of the best single backend.
        best_static_s: What it is predicted to take.
    """

    phase: Phase
    length: int
    past: int
    steps: tuple[Step, ...]
    predicted_s: float
    predicted_j: float | None
    best_static: str
    best_static_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchPlan:
    """Plans for the phases and lengths of one model in one state of the device.

    A forward pass of another length takes the phase's plan of the nearest planned length.

    Attributes:
        model: Name of the model.
        objective: What was made small.
        method: How it was found.
        backends: That were considered.
        state: Of the device that the costs are of: ``"calm"``, or what ran beside.
        device_id: Fingerprint of that device.
        thread_policy: Threads that every backend has.
        provenance: Of the costs.
        table: Name of the table.
        phases: At least one.
        home: Where operators run that are not dispatched.
        notes: Facts for people.
    """

    model: str
    objective: Objective
    method: str
    backends: tuple[str, ...]
    state: str
    device_id: str
    thread_policy: ThreadPolicy
    provenance: Provenance
    table: str
    phases: tuple[PhasePlan, ...]
    home: str = HOME
    notes: Mapping[str, str] = field(default_factory=dict)
