"""One request from arrival to answer: asks a policy, runs what it says, records what happened."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from edgewise.exits.policy import ANSWER, LOOK, REJECT, Policy, Step
from edgewise.scores import softmax
from edgewise.units import format_duration

if TYPE_CHECKING:
    from edgewise.backends import Context
    from edgewise.clock import Clock
    from edgewise.exits.policies.oracle import Oracle
    from edgewise.model import StagedModel
    from edgewise.predict import CostTable

Float32 = npt.NDArray[np.float32]
Outcome = Literal["in_time", "late", "ran_anyway", "rejected"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a request got, and why.

    Attributes:
        outcome: ``"in_time"``; ``"late"``; ``"ran_anyway"`` (late, and foreseen at the start: even
            the first exit did not fit); ``"rejected"`` (foreseen, and nothing ran).
        feasible: Whether, at the start, any exit was predicted to fit; ``None`` where the policy
            does not predict.
        logits: [C], raw; ``None`` when rejected.
        label: Index of the most likely class; ``None`` when rejected.
        class_name: Its name, where the model knows names.
        probability: Calibrated probability of that class, 0 to 1.
        exit_index: Which exit answered; ``None`` when rejected.
        exit_name: Its name.
        depth_ratio: Work before it as a share of the backbone's.
        budget_s: What the request was given, from its arrival.
        observed_s: Arrival to answer, seconds.
        predicted_s: What the units that ran were expected to take, seconds.
        reason: Why it ended there, for people.
        policy: Which policy decided.
        backend: Where it ran.
        steps: Units that ran, in order.
    """

    outcome: Outcome
    feasible: bool | None
    logits: Float32 | None = field(repr=False)
    label: int | None
    class_name: str | None
    probability: float | None
    exit_index: int | None
    exit_name: str | None
    depth_ratio: float | None
    budget_s: float
    observed_s: float
    predicted_s: float | None
    reason: str
    policy: str
    backend: str
    steps: tuple[Step, ...] = field(default=(), repr=False)

    @property
    def met(self) -> bool:
        """Whether the answer came by its deadline."""
        return self.outcome == "in_time"

    def to_json(self) -> dict[str, Any]:
        """The record as plain types, logits left out."""
        return {
            "outcome": self.outcome,
            "feasible": self.feasible,
            "label": self.label,
            "class_name": self.class_name,
            "probability": self.probability,
            "exit_index": self.exit_index,
            "exit_name": self.exit_name,
            "depth_ratio": self.depth_ratio,
            "budget_s": self.budget_s,
            "observed_s": self.observed_s,
            "predicted_s": self.predicted_s,
            "reason": self.reason,
            "policy": self.policy,
            "backend": self.backend,
            "steps": [
                {"unit": s.unit, "predicted_s": s.predicted_s, "observed_s": s.observed_s}
                for s in self.steps
            ],
        }


@dataclass(frozen=True, slots=True)
class Labels:
    """Unit names and static medians, looked up instead of formatted while a request runs."""

    segments: dict[tuple[int, int], tuple[str, float]]
    heads: tuple[tuple[str, float], ...]

    @classmethod
    def of(cls, costs: CostTable, segments: frozenset[tuple[int, int]]) -> Labels:
        """Prepare them for a cost table."""
        return cls(
            segments={
                (i, j): (
                    f"segment:{i}-{j}",
                    float(costs.segment_s.get((i, j), costs.stage_s[i:j].sum())),
                )
                for i, j in segments
            },
            heads=tuple((f"head:{k}", float(s)) for k, s in enumerate(costs.head_s)),
        )


def execute(  # noqa: PLR0913 - one request's whole circumstances
    context: Context,
    x: Float32,
    *,
    model: StagedModel,
    policy: Policy,
    labels: Labels,
    clock: Clock,
    budget_s: float,
    arrival_s: float,
    backend: str,
) -> Answer:
    """Run one request.

    A head runs only where the policy says so, and no stage runs twice.

    Args:
        context: Borrowed for this request alone.
        x: [1, ...] input, checked.
        model: Names and temperatures.
        policy: Decides.
        labels: Of the units.
        clock: Tells time.
        budget_s: From arrival to answer, seconds.
        arrival_s: When the request arrived, on ``clock``; waiting counts.
        backend: For the record.

    Returns:
        The answer, or the refusal.
    """
    now_s = clock.now_s
    deadline_s = arrival_s + budget_s
    position = 0
    done: list[tuple[str, float, float]] = []
    before_s = now_s()
    left_s = deadline_s - before_s
    action = policy.decide(0, before_s, arrival_s, deadline_s)
    if action == REJECT:
        return rejected(model, policy, backend, budget_s=budget_s, waited_s=now_s() - arrival_s)
    context.set_boundary(0, x)
    while True:
        if action > position:
            context.run_segment(position, action)
            after_s = now_s()
            unit, predicted_s = labels.segments[position, action]
            done.append((unit, predicted_s, after_s - before_s))
            position, before_s = action, after_s
        else:
            logits = context.run_head(position - 1)
            after_s = now_s()
            unit, predicted_s = labels.heads[position - 1]
            done.append((unit, predicted_s, after_s - before_s))
            before_s = after_s
            if action == ANSWER or policy.accept(position - 1, logits):
                break
            # A head that was looked at and not accepted: go on by one stage.
            action = position + 1
            continue
        action = policy.decide(position, before_s, arrival_s, deadline_s)
        if action == LOOK and position == len(model.stages):
            action = ANSWER
    observed_s = now_s() - arrival_s
    exit_index = position - 1
    steps = tuple(Step(unit=u, predicted_s=p, observed_s=o) for u, p, o in done)
    if policy.hindsight:
        return _hindsight(
            context, steps, logits, model=model, policy=policy, backend=backend,
            budget_s=budget_s, started_s=observed_s - sum(s.observed_s for s in steps),
            labels=labels, clock=clock,
        )  # fmt: skip
    feasible = policy.feasible(left_s)
    policy.observe(steps)
    return answer_of(
        logits, exit_index, steps, model=model, policy=policy, backend=backend,
        budget_s=budget_s, observed_s=observed_s, feasible=feasible,
    )  # fmt: skip


def answer_of(  # noqa: PLR0913
    logits: Float32,
    exit_index: int,
    steps: tuple[Step, ...],
    *,
    model: StagedModel,
    policy: Policy,
    backend: str,
    budget_s: float,
    observed_s: float,
    feasible: bool | None,
) -> Answer:
    """Put an answer together: label, probability, outcome and reason."""
    place = model.exits[exit_index]
    row = logits[0]
    label = int(row.argmax())
    temperature = place.head.temperature if place.head else 1.0
    met = observed_s <= budget_s
    reason = policy.explain(exit_index)
    if feasible is False:
        reason = "no exit was predicted to fit the budget"
    if not met:
        reason += f"; late by {format_duration(observed_s - budget_s)}"
    return Answer(
        outcome="in_time" if met else "ran_anyway" if feasible is False else "late",
        feasible=feasible,
        logits=row,
        label=label,
        class_name=model.class_names[label] if label < len(model.class_names) else None,
        probability=float(softmax(row, temperature=temperature)[label]),
        exit_index=exit_index,
        exit_name=place.name,
        depth_ratio=place.depth_ratio,
        budget_s=budget_s,
        observed_s=observed_s,
        predicted_s=policy.expected_s(sum(s.predicted_s for s in steps)),
        reason=reason,
        policy=policy.name,
        backend=backend,
        steps=steps,
    )


def rejected(
    model: StagedModel, policy: Policy, backend: str, *, budget_s: float, waited_s: float
) -> Answer:
    """Put a refusal together."""
    return Answer(
        outcome="rejected",
        feasible=False,
        logits=None,
        label=None,
        class_name=None,
        probability=None,
        exit_index=None,
        exit_name=None,
        depth_ratio=None,
        budget_s=budget_s,
        observed_s=waited_s,
        predicted_s=None,
        reason=f"even exit 0 ({model.exits[0].name}) does not fit the budget",
        policy=policy.name,
        backend=backend,
    )


def _hindsight(  # noqa: PLR0913
    context: Context,
    steps: tuple[Step, ...],
    logits: Float32,
    *,
    model: StagedModel,
    policy: Policy,
    backend: str,
    budget_s: float,
    started_s: float,
    labels: Labels,
    clock: Clock,
) -> Answer:
    """Time the other heads too and take the best exit the request could have had."""
    num = len(model.stages)
    ends, at = [], started_s
    for step in steps[:num]:
        at += step.observed_s
        ends.append(at)
    answers: list[Float32] = []
    heads: list[Step] = []
    for k in range(num - 1):
        before_s = clock.now_s()
        answers.append(context.run_head(k))
        unit, predicted_s = labels.heads[k]
        heads.append(
            Step(unit=unit, predicted_s=predicted_s, observed_s=clock.now_s() - before_s)
        )
    answers.append(logits)
    heads.append(steps[num])
    latency_s = [end + head.observed_s for end, head in zip(ends, heads, strict=True)]
    oracle: Oracle = policy  # type: ignore[assignment]  # only it looks back
    k = oracle.choose(latency_s, budget_s)
    return answer_of(
        answers[k], k, (*steps[: k + 1], heads[k]), model=model, policy=policy, backend=backend,
        budget_s=budget_s, observed_s=latency_s[k], feasible=min(latency_s) <= budget_s,
    )  # fmt: skip
