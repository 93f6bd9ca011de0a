"""What dispatch decided: which backend runs each operator or segment of a forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from edgewise.dispatch.problem import HOME, Objective
from edgewise.dispatch.trace import Phase, say_pass
from edgewise.profiles.operators import Kind
from edgewise.profiles.records import Provenance, ThreadPolicy

Reason = Literal[
    "cheapest",
    "saves a switch",
    "segment",
    "only one",
    "tie",
    "guard",
    "constraint",
    "method",  # a better choice was there; the way of choosing does not look for it
]
REASONS: tuple[Reason, ...] = get_args(Reason)


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
        best_other: The next best backend for it alone, by the objective; ``None`` where there is
            none.
        margin_s: How much more that one costs by itself, seconds; negative where this step is
            dearer by itself and pays off by saving switches.
        margin_j: The same, joules; ``None`` where not known.
        one_by_one_s: Of a segment: what its operators cost one by one on the best single backend,
            seconds; ``None`` for an operator.
        tie: The intervals of both overlap: 95 % of the medians, or of the energies where energy is
            what is made small.
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
    margin_j: float | None = None
    one_by_one_s: float | None = None
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
        best_static: Name of the best single backend, by the objective; empty where none can run
            everything.
        best_static_s: What it is predicted to take, seconds; infinite where there is none.
        switches: How often tensors go from one backend to another.
        switch_s: What that costs, part of ``predicted_s``.
        fixed_s: Operators that stay on torch and are in no segment, part of ``predicted_s``.
        static_s: What each single backend is predicted to take, one operator at a time, seconds;
            without those that cannot run everything.
        static_j: The same, joules; empty where not known.
    """

    phase: Phase
    length: int
    past: int
    steps: tuple[Step, ...]
    predicted_s: float
    predicted_j: float | None
    best_static: str
    best_static_s: float
    switches: int = 0
    switch_s: float = 0.0
    fixed_s: float = 0.0
    static_s: Mapping[str, float] = field(default_factory=dict)
    static_j: Mapping[str, float] = field(default_factory=dict)

    @property
    def what(self) -> str:
        """Phase and length in words."""
        return say_pass(self.phase, self.length, self.past)


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
