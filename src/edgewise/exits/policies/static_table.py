"""A table measured once, with or without SPINN's scale factor."""

from __future__ import annotations

from edgewise.exits.policy import ANSWER, Policy, PolicyInputs


def make(inputs: PolicyInputs, *, scale_factor: bool = False) -> StaticTable:
    """Make the policy.

    Args:
        inputs: Costs and validated accuracy.
        scale_factor: Multiply the table by measured / predicted time of this request so far, and
            decide again at each exit. Without it the exit is chosen once, at the start.
    """
    return StaticTable(inputs, scale_factor=scale_factor)


class StaticTable(Policy):
    """Chooses the most accurate exit whose median time fits the budget.

    Source:
        After SPINN (Laskaridis et al., MobiCom 2020): profiled latency times a scale factor
        measured on the part just run. Our reading: no code of theirs is public.
    """

    def __init__(self, inputs: PolicyInputs, *, scale_factor: bool) -> None:
        self.name = "static_table_scaled" if scale_factor else "static_table"
        costs = inputs.costs
        self._scaled = scale_factor
        num = costs.num_exits
        self._ahead = tuple(
            tuple((costs.remaining_s(p, k), k) for k in inputs.better_exits(p))
            for p in range(num + 1)
        )
        self._soonest = min(range(num), key=lambda k: costs.remaining_s(0, k))
        self._done_s = tuple(float(costs.stage_s[:p].sum()) for p in range(num + 1))
        self._step = tuple(
            tuple(inputs.longest_step(p, k + 1) for k in range(num)) for p in range(num)
        )

    def decide(self, position: int, now_s: float, start_s: float, deadline_s: float) -> int:
        """Compare the table, perhaps scaled, with the time left."""
        if not self._scaled:
            # The plan made at the start, found again instead of remembered.
            target = self._target(0, deadline_s - start_s, 1.0)
            return self._step[position][target] if position <= target else ANSWER
        scale = 1.0
        if position:
            scale = max((now_s - start_s) / max(self._done_s[position], 1e-9), 1e-3)
        target = self._target(position, deadline_s - now_s, scale)
        return position + 1 if target >= position else ANSWER

    def _target(self, position: int, left_s: float, scale: float) -> int:
        for need_s, k in self._ahead[position]:
            if need_s * scale <= left_s:
                return k
        return position - 1 if position else self._soonest

    def explain(self, exit_index: int) -> str:  # noqa: ARG002
        """Always the table."""
        return "the table's medians said it fits"
