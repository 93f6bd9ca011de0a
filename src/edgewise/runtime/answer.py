"""What a request got, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from edgewise.exits import Step

Float32 = npt.NDArray[np.float32]
Outcome = Literal["in_time", "late", "ran_anyway", "rejected"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """What a request got, and why. All that an answer says is ``None`` when it was rejected.

    Attributes:
        outcome: ``"in_time"``; ``"late"``; ``"ran_anyway"`` (late, and foreseen at the start: not
            even the soonest exit fitted); ``"rejected"`` (foreseen, and nothing ran).
        feasible: Whether, at the start, any exit was predicted to fit; ``None`` where the policy
            does not predict.
        logits: [C], raw.
        label: Index of the most likely class.
        class_name: Its name, where the model knows names.
        probability: Calibrated probability of that class, 0 to 1.
        exit_index: Which exit answered.
        exit_name: Its name.
        depth_ratio: Work before it as a share of the backbone's.
        budget_s: What the request was given, from its arrival, seconds.
        wait_s: Arrival to the first decision, seconds.
        observed_s: Arrival to logits on the host, seconds: ``wait_s`` and all steps. A policy that
            learns does so afterwards.
        predicted_s: What the units that ran were expected to take, seconds.
        reason: Why it ended there, for people.
        policy: Which policy decided.
        backend: Where it ran.
        state: What was known of the device's state when the request ended, of the quantities that
            costs are predicted from; empty where nobody watches it.
        steps: Units that ran, in order.
    """

    outcome: Outcome
    feasible: bool | None
    logits: Float32 | None = field(default=None, repr=False)
    label: int | None = None
    class_name: str | None = None
    probability: float | None = None
    exit_index: int | None = None
    exit_name: str | None = None
    depth_ratio: float | None = None
    budget_s: float
    wait_s: float
    observed_s: float
    predicted_s: float | None = None
    reason: str
    policy: str
    backend: str
    state: Mapping[str, float] = field(default_factory=dict, repr=False)
    steps: tuple[Step, ...] = field(default=(), repr=False)

    @property
    def met(self) -> bool:
        """Whether the answer came by its deadline."""
        return self.outcome == "in_time"

    def to_json(self) -> dict[str, Any]:
        """The record as plain types, logits left out."""
        record = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "logits"}
        return record | {"steps": [asdict(step) for step in self.steps]}
