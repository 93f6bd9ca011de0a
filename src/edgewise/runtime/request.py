"""One request while it runs: what it was given, what has run for it, and its answer at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edgewise.device.state import FEATURES
from edgewise.exits import LATE, Step
from edgewise.runtime.answer import Answer
from edgewise.scores import softmax
from edgewise.units import format_duration

if TYPE_CHECKING:
    from edgewise.backends import Program
    from edgewise.clock import Clock
    from edgewise.device.state import StateSource
    from edgewise.exits import Policy
    from edgewise.predict import CostTable
    from edgewise.predict.state_costs import UnitCosts

Float32 = npt.NDArray[np.float32]
Unit = tuple[str, float]

_INFEASIBLE = "no exit was predicted to fit the time left"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all requests of a session have in common.

    Attributes:
        program: The loaded model.
        policy: Decides.
        costs: Of the program's model on its backend.
        clock: Tells time.
        segments: Name and static median of each compiled run: looked up, not formatted, while a
            request runs.
        heads: The same of each head.
        source: Who knows the device's state, for the record; ``None`` where nobody does.
        probability: Whether answers say how sure they are: over a vocabulary that takes longer than
            a layer.
    """

    program: Program
    policy: Policy
    costs: CostTable
    clock: Clock
    segments: Mapping[tuple[int, int], Unit]
    heads: Sequence[Unit]
    source: StateSource | None = None
    probability: bool = True

    @classmethod
    def of(  # noqa: PLR0913 - what all requests have in common
        cls,
        program: Program,
        *,
        policy: Policy,
        costs: CostTable,
        clock: Clock,
        source: StateSource | None = None,
        probability: bool = True,
    ) -> Setting:
        """Prepare the names and medians."""
        return cls(
            program=program,
            policy=policy,
            costs=costs,
            clock=clock,
            source=source,
            probability=probability,
            segments={
                (i, j): (
                    f"segment:{i}-{j}",
                    float(costs.segment_s.get((i, j), costs.stage_s[i:j].sum())),
                )
                for i, j in program.segments
            },
            heads=[(f"head:{k}", float(s)) for k, s in enumerate(costs.head_s)],
        )


@dataclass(slots=True, kw_only=True)
class Request:
    """What one request was given, and what has run for it.

    Attributes:
        policy: What decides for it.
        budget_s: From its arrival, seconds.
        arrival_s: On the session's clock.
        start_s: When its first decision was taken.
        feasible: What the policy predicted then.
        costs: What units were predicted to take when the one that runs now began.
        mark_s: Until when its time is accounted for.
        ran: Unit, predicted and observed seconds, and the costs it was predicted by, in order.
    """

    policy: Policy
    budget_s: float
    arrival_s: float
    start_s: float
    feasible: bool | None
    costs: UnitCosts = field(init=False)
    mark_s: float = field(init=False)
    ran: list[tuple[str, float, float, UnitCosts]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.mark_s = self.start_s
        self.costs = self.policy.unit_costs()

    def add(self, unit: Unit, now_s: float, *, factor: float = 1.0) -> None:
        """Account for a unit that ended now.

        Args:
            unit: Which.
            now_s: The present instant.
            factor: Its cost for a batch relative to one sample.
        """
        name, static_s = unit
        predicted_s = self.costs.seconds.get(name, static_s) * factor
        self.ran.append((name, predicted_s, now_s - self.mark_s, self.costs))
        self.mark_s = now_s
        self.costs = self.policy.unit_costs()  # for the next unit

    def extend(self, now_s: float) -> None:
        """Account for what the last unit left to be done once its answer was taken."""
        name, predicted_s, observed_s, costs = self.ran[-1]
        self.ran[-1] = (name, predicted_s, observed_s + now_s - self.mark_s, costs)
        self.mark_s = now_s

    def steps(self) -> tuple[Step, ...]:
        """What ran, as records."""
        return tuple(
            Step(unit=u, predicted_s=p, observed_s=o, whole_s=c.whole_s, regime=c.regime)
            for u, p, o, c in self.ran
        )

    def answered(self, setting: Setting, logits: Float32, exit_index: int, action: int) -> Answer:
        """Put the answer together.

        Args:
            setting: The session's.
            logits: [C].
            exit_index: Where they come from.
            action: The policy's last word.
        """
        model, policy = setting.program.model, self.policy
        place = model.exits[exit_index]
        label = int(logits.argmax())
        sure = None
        if setting.probability:
            temperature = place.head.temperature if place.head else 1.0
            sure = float(softmax(logits, temperature=temperature)[label])
        observed_s = self.mark_s - self.arrival_s
        met = observed_s <= self.budget_s
        if self.feasible is False:
            reason = _INFEASIBLE
        elif action == LATE:
            reason = "no exit fitted the time left any more"
        else:
            reason = policy.explain(exit_index)
        if not met:
            reason += f"; late by {format_duration(observed_s - self.budget_s)}"
        return Answer(
            outcome="in_time" if met else "ran_anyway" if self.feasible is False else "late",
            feasible=self.feasible,
            logits=logits,
            label=label,
            class_name=model.class_names[label] if label < len(model.class_names) else None,
            probability=sure,
            exit_index=exit_index,
            exit_name=place.name,
            depth_ratio=place.depth_ratio,
            budget_s=self.budget_s,
            wait_s=self.start_s - self.arrival_s,
            observed_s=observed_s,
            predicted_s=policy.expected_s(sum(p for _, p, _, _ in self.ran)),
            reason=reason,
            policy=policy.name,
            backend=setting.program.backend,
            state=_known(setting.source),
            steps=self.steps(),
        )

    def rejected(self, setting: Setting) -> Answer:
        """Put the refusal together."""
        return Answer(
            outcome="rejected",
            feasible=False,
            budget_s=self.budget_s,
            wait_s=self.start_s - self.arrival_s,
            observed_s=self.mark_s - self.arrival_s,
            reason=_INFEASIBLE,
            policy=self.policy.name,
            backend=setting.program.backend,
        )


def _known(source: StateSource | None) -> dict[str, float]:
    if source is None:
        return {}
    state = source.latest()
    found = ((name, state.value(name)) for name in FEATURES)
    return {name: value for name, value in found if value is not None}
