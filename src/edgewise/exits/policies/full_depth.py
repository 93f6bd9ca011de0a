"""Always the whole network: the baseline that knows no deadline."""

from __future__ import annotations

from edgewise.exits.policy import ANSWER, Policy, PolicyInputs


def make(inputs: PolicyInputs) -> FullDepth:
    """Make the policy; it has no options."""
    return FullDepth(inputs)


class FullDepth(Policy):
    """Runs the longest compiled pieces to the last exit."""

    name = "full_depth"

    def __init__(self, inputs: PolicyInputs) -> None:
        num = inputs.num_exits
        self._next = (*(inputs.longest_step(p, num) for p in range(num)), ANSWER)

    def decide(self, position: int, now_s: float, start_s: float, deadline_s: float) -> int:  # noqa: ARG002
        """Go on to the end."""
        return self._next[position]

    def explain(self, exit_index: int) -> str:  # noqa: ARG002
        """Always the same."""
        return "full depth was asked for"
