"""Several requests together, each with its own budget: who must stop leaves, the rest regroup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edgewise.errors import ConfigError
from edgewise.exits import LOOK, REJECT
from edgewise.runtime.request import Request

if TYPE_CHECKING:
    from edgewise.runtime.answer import Answer
    from edgewise.runtime.request import Setting, Unit

Float32 = npt.NDArray[np.float32]


def padded_size(count: int) -> int:
    """The power of two that a group is padded to, so that few sizes are ever compiled.

    Example:
        >>> [padded_size(n) for n in (1, 3, 8)]
        [1, 4, 8]
    """
    return 1 << (count - 1).bit_length()


def execute_batch(
    setting: Setting, xs: Float32, *, budgets_s: Sequence[float], arrival_s: float
) -> list[Answer]:
    """Run samples together, stage by stage.

    A policy knows the cost of one sample. A group of B costs ``batch_factor(B)`` times as much, so
    its samples are shown a clock that runs slower by that factor. Nothing is learnt from a batch.

    Args:
        setting: The session's model, policy, costs and clock.
        xs: [N, ...], checked.
        budgets_s: [N], seconds.
        arrival_s: When all of them arrived.

    Returns:
        [N] answers in order.

    Raises:
        ConfigError: The policy looks back and cannot be run on a batch.
    """
    policy = setting.policy
    if policy.hindsight:
        raise ConfigError(
            f"policy {policy.name!r} looks back at one request and cannot run a batch",
            help="use session.run for each sample",
        )
    group = _Group(setting, xs, budgets_s=budgets_s, arrival_s=arrival_s)
    while group.active:
        stopping = [i for i, n in enumerate(group.active) if group.actions[n] <= group.position]
        if stopping:
            group.answer(stopping)
        else:
            group.advance()
    return [answer for answer in group.answers if answer is not None]


class _Group:
    """Samples that have come equally far."""

    def __init__(
        self, setting: Setting, xs: Float32, *, budgets_s: Sequence[float], arrival_s: float
    ) -> None:
        self._setting = setting
        self.position = 0
        start_s = setting.clock.now_s()
        factor = self._factor(len(xs))
        self._requests = [
            Request(
                policy=setting.policy.begin(),
                budget_s=budget_s,
                arrival_s=arrival_s,
                start_s=start_s,
                feasible=setting.policy.feasible((arrival_s + budget_s - start_s) / factor),
            )
            for budget_s in budgets_s
        ]
        self.actions = [self._ask(request, factor) for request in self._requests]
        self.answers = [
            request.rejected(setting) if action == REJECT else None
            for request, action in zip(self._requests, self.actions, strict=True)
        ]
        self.active = [n for n, answer in enumerate(self.answers) if answer is None]
        self._rows = xs[self.active]

    def advance(self) -> None:
        """Run everybody as far as the most cautious wants to go, and ask again."""
        start, stop = self.position, min(self.actions[n] for n in self.active)
        size = padded_size(len(self.active))
        with self._setting.program.context(size) as context:
            context.set_boundary(start, _padded(self._rows, size))
            context.run_segment(start, stop)
            self._rows = context.boundary(stop)[: len(self.active)]
        self._account(self._setting.segments[start, stop], self.active)
        self.position = stop
        for n in self.active:
            self.actions[n] = self._ask(self._requests[n], self._factor(len(self.active)))

    def answer(self, stopping: list[int]) -> None:
        """Run the head for some rows; who is content with its answer leaves the group."""
        exit_index = self.position - 1
        size = padded_size(len(stopping))
        with self._setting.program.context(size) as context:
            context.set_boundary(self.position, _padded(self._rows[stopping], size))
            logits = context.run_head(exit_index)
        self._account(self._setting.heads[exit_index], [self.active[i] for i in stopping])
        at_end = self.position == len(self._setting.heads)
        for i, row in zip(stopping, logits, strict=False):
            n = self.active[i]
            request, action = self._requests[n], self.actions[n]
            content = action != LOOK or request.policy.accept(exit_index, row[None]) or at_end
            if content:
                self.answers[n] = request.answered(self._setting, row, exit_index, action)
            else:
                self.actions[n] = self.position + 1
        staying = [i for i, n in enumerate(self.active) if self.answers[n] is None]
        self.active = [self.active[i] for i in staying]
        self._rows = self._rows[staying]

    def _ask(self, request: Request, factor: float) -> int:
        start_s = request.start_s
        now_s = start_s + (self._setting.clock.now_s() - start_s) / factor
        deadline_s = start_s + (request.arrival_s + request.budget_s - start_s) / factor
        return request.policy.decide(self.position, now_s, start_s, deadline_s)

    def _account(self, unit: Unit, ran: list[int]) -> None:
        now_s, factor = self._setting.clock.now_s(), self._factor(len(ran))
        for n in ran:
            self._requests[n].add(unit, now_s, factor=factor)

    def _factor(self, count: int) -> float:
        return self._setting.costs.batch_factor(padded_size(count))


def _padded(rows: Float32, size: int) -> Float32:
    missing = size - len(rows)
    if not missing:
        return rows
    return np.concatenate([rows, np.zeros((missing, *rows.shape[1:]), dtype=rows.dtype)])
