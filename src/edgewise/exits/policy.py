"""What every exit policy is asked, and how policies are found by name."""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from edgewise.errors import ConfigError, nearest_names
from edgewise.model import StagedModel, Validation
from edgewise.predict import CostTable
from edgewise.predict.state_costs import STATIC, Regime, StateCosts, UnitCosts

Float32 = npt.NDArray[np.float32]

# What `decide` returns beside a position to run to. Plain integers: a request allocates nothing.
ANSWER = -1  # run the head here and return what it says
LATE = -2  # the same, though even this head is predicted to miss the deadline
LOOK = -3  # run the head here and ask `accept` whether its answer will do
REJECT = -4  # do not start: the budget cannot be met


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInputs:
    """What a policy may know in advance.

    Attributes:
        costs: Measured medians of the model on the backend in use.
        accuracy: [E], share right at each exit on validation data; ``None`` when unknown.
        temperatures: [E], for reading logits as probabilities.
        validation: The logits behind ``accuracy``; ``None`` when unknown.
        segments: Compiled runs of stages.
    """

    costs: CostTable
    accuracy: tuple[float, ...] | None = None
    temperatures: tuple[float, ...] = ()
    validation: Validation | None = None
    segments: frozenset[tuple[int, int]] = field(default_factory=frozenset)

    @classmethod
    def of(
        cls, model: StagedModel, costs: CostTable, *, segments: frozenset[tuple[int, int]]
    ) -> PolicyInputs:
        """Gather what a model and its costs tell."""
        known = [e.accuracy for e in model.exits]
        return cls(
            costs=costs,
            accuracy=None if None in known else tuple(float(a) for a in known if a is not None),
            temperatures=tuple(e.head.temperature if e.head else 1.0 for e in model.exits),
            validation=model.validation,
            segments=segments,
        )

    @property
    def num_exits(self) -> int:
        """How many exits."""
        return self.costs.num_exits

    def ranked_exits(self) -> tuple[int, ...]:
        """All exits, most accurate first and of equals the earliest; deepest first when unknown."""
        worth = self._worth()
        return tuple(sorted(range(self.num_exits), key=lambda k: (-worth[k], k)))

    def better_exits(self, position: int) -> tuple[int, ...]:
        """Exits ahead of a position that are better than the one just reached, best first."""
        worth = self._worth()
        here = worth[position - 1] if position else -1
        return tuple(k for k in self.ranked_exits() if k >= position and worth[k] > here)

    def _worth(self) -> Sequence[float]:
        return range(self.num_exits) if self.accuracy is None else self.accuracy

    def longest_step(self, position: int, limit: int) -> int:
        """End of the longest compiled run from a position that does not pass a limit."""
        stops = [j for i, j in self.segments if i == position and j <= limit]
        return max(stops, default=position + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One unit that ran for a request.

    Attributes:
        unit: ``"segment:0-4"`` or ``"head:3"``.
        predicted_s: What was predicted when it began, seconds: the static median, or the median in
            that state of the device.
        observed_s: What it took, decision included, seconds.
        whole_s: What the whole network was predicted to take then, to compare predictions of
            different states by; the same for all steps where costs are static.
        regime: In which it was predicted.
    """

    unit: str
    predicted_s: float
    observed_s: float
    whole_s: float = 1.0
    regime: Regime = "steady"


class Policy(ABC):
    """Decides how deep a request runs. One object serves all threads.

    Attributes:
        name: As users write it.
        hindsight: The executor runs everything and asks `choose` afterwards: a bound, not a policy.
    """

    name: str
    hindsight = False

    @abstractmethod
    def decide(self, position: int, now_s: float, start_s: float, deadline_s: float) -> int:
        """Say what to do after ``position`` stages.

        Args:
            position: Stages finished; 0 at the start.
            now_s: The present instant.
            start_s: When it was asked at position 0; the request may have waited before.
            deadline_s: When the answer is due.

        Returns:
            A position above ``position``: run to there. `ANSWER`, `LATE`, `LOOK` or `REJECT`.
        """

    def begin(self) -> Policy:
        """What decides for one request: itself, unless it must remember what it saw on the way."""
        return self

    def accept(self, exit_index: int, logits: Float32) -> bool:  # noqa: ARG002
        """Whether the answer of a head that was looked at will do; asked after `LOOK` only."""
        return True

    def observe(  # noqa: B027 - most policies learn nothing
        self, steps: Sequence[Step], *, met: bool, feasible: bool | None = None
    ) -> None:
        """Learn from a request that has been answered.

        Args:
            steps: Units that ran.
            met: Whether the answer came by its deadline.
            feasible: What `feasible` said at its start.
        """

    def reprice(self, costs: StateCosts) -> None:  # noqa: B027 - most know one table only
        """Take over what units cost in a new state of the device; off the request path.

        Args:
            costs: Predicted medians, which replace the static ones until the next call.
        """

    def unit_costs(self) -> UnitCosts:
        """What units are predicted to take in the present state."""
        return STATIC

    def feasible(self, left_s: float) -> bool | None:  # noqa: ARG002
        """Whether any exit is predicted to fit a time left at the start; ``None``: no opinion."""
        return None

    def expected_s(self, predicted_s: float) -> float:
        """What work with these static medians should take now, seconds."""
        return predicted_s

    def explain(self, exit_index: int) -> str:  # noqa: ARG002
        """Why a request ended at an exit, in a few words."""
        return f"as {self.name} says"


def policy_names() -> tuple[str, ...]:
    """Every policy, by the name of its file."""
    package = importlib.import_module("edgewise.exits.policies")
    return tuple(sorted(m.name for m in pkgutil.iter_modules(package.__path__)))


def check_policy_name(name: str) -> None:
    """Refuse a name that no policy has.

    Raises:
        ConfigError: No such policy; the nearest names are told.
    """
    if name not in policy_names():
        raise ConfigError(f"unknown policy {name!r}", help=nearest_names(name, policy_names()))


def make_policy(name: str, inputs: PolicyInputs, **options: Any) -> Policy:
    """Make a policy by name.

    Args:
        name: One of `policy_names`.
        inputs: What it may know.
        options: Its own arguments.

    Raises:
        ConfigError: No such policy, or an argument it does not have or accept.
    """
    check_policy_name(name)
    module = importlib.import_module(f"edgewise.exits.policies.{name}")
    try:
        policy: Policy = module.make(inputs, **options)
    except TypeError as error:
        raise ConfigError(
            f"policy {name!r} does not take these options: {error}",
            help=f"see help(edgewise.exits.policies.{name}.make)",
        ) from error
    return policy
