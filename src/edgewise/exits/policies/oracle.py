"""The best choice in hindsight: a bound for every policy, not a policy."""

from __future__ import annotations

from collections.abc import Sequence

from edgewise.exits.policy import ANSWER, Policy, PolicyInputs


def make(inputs: PolicyInputs) -> Oracle:
    """Make the bound; it has no options."""
    return Oracle(inputs)


class Oracle(Policy):
    """Runs all stages and heads, then picks the most accurate exit that was reached in time.

    Its latency is what the request would have taken had it known: the stages up to the chosen exit,
    one by one, and that head alone. What fusing stages saves is not in it.
    """

    name = "oracle"
    hindsight = True

    def __init__(self, inputs: PolicyInputs) -> None:
        self._ranked = inputs.ranked_exits()
        self._last = inputs.num_exits

    def decide(self, position: int, now_s: float, start_s: float, deadline_s: float) -> int:  # noqa: ARG002
        """Go on, stage by stage."""
        return position + 1 if position < self._last else ANSWER

    def choose(self, latency_s: Sequence[float], budget_s: float) -> int:
        """The most accurate exit whose latency was within the budget, else the fastest.

        Args:
            latency_s: [E], arrival to answer at each exit, as measured.
            budget_s: Seconds.
        """
        for k in self._ranked:
            if latency_s[k] <= budget_s:
                return k
        return min(self._ranked, key=lambda k: latency_s[k])

    def explain(self, exit_index: int) -> str:  # noqa: ARG002
        """Always hindsight."""
        return "best in hindsight"
