"""Why a plan is as it is: equal pieces as one line, with by how much each was chosen."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from edgewise.dispatch.plan import PhasePlan, Reason, Step
from edgewise.dispatch.problem import Objective
from edgewise.profiles.operators import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Pieces of a plan that do the same on the same backend for the same reason.

    Attributes:
        name: Their path, with ``*`` for the numbers of layers.
        count: How many.
        kind: Of the operators or segments.
        shapes: Keys of what is run.
        backend: Who runs them.
        predicted_s: All of them together, seconds.
        predicted_j: The same, joules; ``None`` where not known.
        switch_s: Switches to them, together, seconds.
        best_other: The next best backend; ``None`` where there is none.
        margin_s: How much more that one costs, all together, seconds; negative where these are
            dearer by themselves.
        margin_ratio: How much more that one costs in what is made small, over what these cost;
            negative likewise, ``None`` where there is no other.
        one_by_one_s: Of segments: their operators one by one, together; ``None`` for operators.
        tie: The measurements do not tell them apart.
        reason: Why.
        text: All that in words.
    """

    name: str
    count: int
    kind: Kind
    shapes: tuple[str, ...]
    backend: str
    predicted_s: float
    predicted_j: float | None
    switch_s: float
    best_other: str | None
    margin_s: float | None
    margin_ratio: float | None
    one_by_one_s: float | None
    tie: bool
    reason: Reason
    text: str


def explain_phase(phase: PhasePlan, objective: Objective = "latency") -> tuple[Row, ...]:
    """Explain a plan for one forward pass.

    Args:
        phase: The pass.
        objective: What was made small.

    Returns:
        One row for each class of pieces, in the order of their first; pieces are of one class
        when everything but the number of their layer is the same.
    """
    groups: dict[tuple[object, ...], list[Step]] = {}
    for step in phase.steps:
        key = (
            class_of(step.name),
            step.kind,
            step.shapes,
            step.backend,
            step.best_other,
            step.tie,
            step.reason,
        )
        groups.setdefault(key, []).append(step)
    weights = {
        "latency": (1.0, 0.0),
        "energy": (0.0, 1.0),
        "edp": (phase.predicted_j or 0.0, phase.predicted_s),  # d(E L) = E dL + L dE
    }[objective]
    return tuple(_row(steps, weights) for steps in groups.values())


def class_of(name: str) -> str:
    """A module's path with ``*`` for the number of its layer.

    Example:
        >>> class_of("model.layers.12.mlp.gate_proj")
        'model.layers.*.mlp.gate_proj'
    """
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def seconds_by_class(phase: PhasePlan) -> dict[str, float]:
    """Predicted seconds of each kind of operator and segment, the longest first.

    Switches and what stays on torch are kinds of their own.
    """
    found: dict[str, float] = {}
    for step in phase.steps:
        found[step.kind] = found.get(step.kind, 0.0) + step.predicted_s
    found["switches"], found["fixed"] = phase.switch_s, phase.fixed_s
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _row(steps: list[Step], weights: tuple[float, float]) -> Row:
    first = steps[0]
    predicted_s = sum(step.predicted_s for step in steps)
    predicted_j = _sum(step.predicted_j for step in steps)
    margin_s = _sum(step.margin_s for step in steps)
    margin = _weigh(weights, margin_s, _sum(step.margin_j for step in steps))
    whole = _weigh(weights, predicted_s, predicted_j)
    found = Row(
        name=class_of(first.name),
        count=len(steps),
        kind=first.kind,
        shapes=first.shapes,
        backend=first.backend,
        predicted_s=predicted_s,
        predicted_j=predicted_j,
        switch_s=sum(step.switch_s for step in steps),
        best_other=first.best_other,
        margin_s=margin_s,
        margin_ratio=margin / whole if margin is not None and whole else None,
        one_by_one_s=_sum(step.one_by_one_s for step in steps),
        tie=first.tie,
        reason=first.reason,
        text="",
    )
    return replace(found, text=say_reason(found))


def _weigh(
    weights: tuple[float, float], seconds: float | None, joules: float | None
) -> float | None:
    if seconds is None or (joules is None and weights[1]):
        return None
    return weights[0] * seconds + weights[1] * (joules or 0.0)


def _sum(values: Iterable[float | None]) -> float | None:
    found = list(values)
    return None if None in found else sum(v for v in found if v is not None)


def say_reason(row: Row) -> str:
    """Why a row is where it is, in words."""
    other, share = row.best_other, row.margin_ratio
    if other is None or share is None:
        return f"only {row.backend} can run it"
    by = f"{100 * abs(share):.1f} %"
    text = {
        "tie": f"a tie with {other}: {by} {'less' if share >= 0 else 'more'}, within what was"
        " measured",
        "cheapest": f"{other} takes {by} more",
        "segment": f"one piece; {other} takes {by} more",
        "saves a switch": f"{other} takes {by} less by itself, a switch there costs more",
        "guard": f"{other} takes {by} less, not beyond doubt: the best single backend stays",
        "constraint": f"{other} takes {by} less, a limit forbids it",
        "method": f"{other} takes {by} less even with switches, the method does not see it",
        "only one": f"only {row.backend} can run it",
    }[row.reason]
    if row.one_by_one_s is not None and row.predicted_s > 0:
        more = row.one_by_one_s / row.predicted_s - 1
        text += f"; one by one {100 * abs(more):.1f} % {'more' if more >= 0 else 'less'}"
    return text
