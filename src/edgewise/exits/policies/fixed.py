"""Always the same exit."""

from __future__ import annotations

from edgewise.errors import ConfigError
from edgewise.exits.policy import ANSWER, Policy, PolicyInputs


def make(inputs: PolicyInputs, *, exit_index: int = 0) -> Fixed:
    """Make the policy.

    Args:
        inputs: Costs.
        exit_index: Where every request ends.

    Raises:
        ConfigError: There is no such exit.
    """
    if isinstance(exit_index, bool) or not 0 <= exit_index < inputs.num_exits:
        raise ConfigError(
            f"expected an exit index from 0 to {inputs.num_exits - 1}, found {exit_index!r}",
            help="`edgewise stage MODEL` lists the exits",
        )
    return Fixed(inputs, exit_index=exit_index)


class Fixed(Policy):
    """Runs the longest compiled pieces to one exit."""

    name = "fixed"

    def __init__(self, inputs: PolicyInputs, *, exit_index: int) -> None:
        self._next = tuple(inputs.longest_step(p, exit_index + 1) for p in range(exit_index + 1))

    def decide(self, position: int, now_s: float, start_s: float, deadline_s: float) -> int:  # noqa: ARG002
        """Go on to the chosen exit."""
        return self._next[position] if position < len(self._next) else ANSWER

    def explain(self, exit_index: int) -> str:
        """Always the same."""
        return f"exit {exit_index} was asked for"
