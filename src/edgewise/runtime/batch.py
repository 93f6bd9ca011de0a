"""Several requests together, each with its own budget: who must stop leaves, the rest regroup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edgewise.errors import ConfigError
from edgewise.exits.policy import ANSWER, LOOK, REJECT, Policy, Step
from edgewise.runtime.executor import Answer, Labels, answer_of, rejected

if TYPE_CHECKING:
    from edgewise.backends import Program
    from edgewise.clock import Clock
    from edgewise.predict import CostTable

Float32 = npt.NDArray[np.float32]


def padded_size(count: int) -> int:
    """The power of two that a group is padded to, so that few sizes are ever compiled.

    Example:
        >>> [padded_size(n) for n in (1, 3, 8)]
        [1, 4, 8]
    """
    return 1 << (count - 1).bit_length()


def _pad(rows: Float32) -> Float32:
    missing = padded_size(len(rows)) - len(rows)
    if not missing:
        return rows
    return np.concatenate([rows, np.zeros((missing, *rows.shape[1:]), dtype=rows.dtype)])


def execute_batch(  # noqa: PLR0913 - a batch's whole circumstances
    program: Program,
    xs: Float32,
    *,
    policy: Policy,
    costs: CostTable,
    labels: Labels,
    clock: Clock,
    budgets_s: Sequence[float],
    arrival_s: float,
) -> list[Answer]:
    """Run samples together, stage by stage.

    A policy knows the cost of one sample. For a group of B, time passes ``batch_factor(B)`` times as
    fast, so each sample is shown its time left divided by that factor.

    Args:
        program: The loaded model.
        xs: [N, ...], checked.
        policy: Decides for each sample alone.
        costs: For the batch factor.
        labels: Of the units.
        clock: Tells time.
        budgets_s: [N], seconds.
        arrival_s: When all of them arrived.

    Returns:
        [N] answers in order.

    Raises:
        ConfigError: The policy looks back and cannot be run on a batch.
    """
    if policy.hindsight:
        raise ConfigError(
            f"policy {policy.name!r} looks back at one request and cannot run a batch",
            help="use session.run for each sample",
        )
    model, backend = program.model, program.backend
    deadlines_s = [arrival_s + b for b in budgets_s]
    answers: list[Answer | None] = [None] * len(xs)
    steps: list[list[Step]] = [[] for _ in xs]
    start_s = clock.now_s()
    feasible = [policy.feasible(d - start_s) for d in deadlines_s]

    def ask(position: int, n: int, group: int) -> int:
        now_s = clock.now_s()
        left_s = (deadlines_s[n] - now_s) / costs.batch_factor(padded_size(group))
        return policy.decide(position, now_s, arrival_s, now_s + left_s)

    active = []
    for n in range(len(xs)):
        if ask(0, n, len(xs)) == REJECT:
            answers[n] = rejected(
                model, policy, backend, budget_s=budgets_s[n], waited_s=clock.now_s() - arrival_s
            )
        else:
            active.append(n)
    position = 0
    rows = xs[active]
    num = len(model.stages)
    while active:
        before_s = clock.now_s()
        with program.context(padded_size(len(active))) as context:
            context.set_boundary(position, _pad(rows))
            context.run_segment(position, position + 1)
            rows = context.boundary(position + 1)[: len(active)]
        unit, predicted_s = labels.segments[position, position + 1]
        spent_s = clock.now_s() - before_s
        step = Step(unit=unit, predicted_s=predicted_s, observed_s=spent_s)
        for n in active:
            steps[n].append(step)
        position += 1
        wanted = {n: ask(position, n, len(active)) for n in active}
        looking = [
            i
            for i, n in enumerate(active)
            if wanted[n] in (ANSWER, LOOK) or position == num
        ]
        if not looking:
            continue
        before_s = clock.now_s()
        with program.context(padded_size(len(looking))) as context:
            context.set_boundary(position, _pad(rows[looking]))
            logits = context.run_head(position - 1)[: len(looking)]
        unit, predicted_s = labels.heads[position - 1]
        done_s = clock.now_s()
        head = Step(unit=unit, predicted_s=predicted_s, observed_s=done_s - before_s)
        leaving = []
        for row, i in zip(logits, looking, strict=True):
            n = active[i]
            steps[n].append(head)
            if wanted[n] == LOOK and position < num and not policy.accept(position - 1, row[None]):
                continue
            leaving.append(i)
            answers[n] = answer_of(
                row[None],
                position - 1,
                tuple(steps[n]),
                model=model,
                policy=policy,
                backend=backend,
                budget_s=budgets_s[n],
                observed_s=done_s - arrival_s,
                feasible=feasible[n],
            )
        staying = [i for i in range(len(active)) if i not in set(leaving)]
        active = [active[i] for i in staying]
        rows = rows[staying]
    return [a for a in answers if a is not None]
