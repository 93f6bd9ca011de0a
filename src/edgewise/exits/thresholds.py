"""What policies share that judge answers: thresholds from validation data, and what looking costs.

A score says how sure an exit is, more is surer; a sample leaves at the first exit whose score
reaches that exit's threshold, and at the last exit in any case.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgewise.errors import ConfigError
from edgewise.exits.policy import ANSWER, LOOK, Float32, Policy, PolicyInputs
from edgewise.model import Validation
from edgewise.predict import CostTable
from edgewise.scores import normalised_entropy, top1_confidence

Float64 = npt.NDArray[np.float64]
Exits = npt.NDArray[np.intp]


class LookEverywhere(Policy):
    """Looks at each exit in turn and answers at the last; what it accepts is its subclass's say."""

    def __init__(self, inputs: PolicyInputs) -> None:
        self._temperatures = temperatures_of(inputs)
        self._last = inputs.num_exits

    def decide(self, position: int, now_s: float, start_s: float, deadline_s: float) -> int:  # noqa: ARG002
        """Look at every exit; answer at the last."""
        if position == 0:
            return 1
        return ANSWER if position == self._last else LOOK

    @abstractmethod
    def accept(self, exit_index: int, logits: Float32) -> bool:
        """Whether the answer will do."""

    def explain(self, exit_index: int) -> str:
        """Whether an answer was taken, or the network ended."""
        if exit_index == self._last - 1:
            return "no earlier exit was sure"
        return self.explain_accepted(exit_index)

    def explain_accepted(self, exit_index: int) -> str:  # noqa: ARG002
        """Why an answer before the last exit was taken."""
        return "this exit was sure"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What one setting of a policy does on validation data.

    Attributes:
        accuracy: Share answered rightly.
        mean_s: Mean of static medians, every head on the way counted, seconds.
    """

    accuracy: float
    mean_s: float

    @classmethod
    def of(cls, exits: Exits, validation: Validation, cost_s: Float64) -> Trial:
        """Judge where samples leave.

        Args:
            exits: [N].
            validation: N samples.
            cost_s: [E], what it takes to answer at each exit.
        """
        right = validation.correct[exits, np.arange(exits.size)]
        return cls(accuracy=float(right.mean()), mean_s=float(cost_s[exits].mean()))


def choose_trial(trials: Sequence[Trial], *, budget_s: float | None, least_accuracy: float) -> int:
    """Choose a setting.

    Args:
        trials: At least one.
        budget_s: With it: the most accurate setting whose mean cost it covers, or the cheapest
            where it covers none.
        least_accuracy: Without a budget: the cheapest setting that is as accurate, or the most
            accurate where none is.

    Returns:
        Its index; of equals the cheapest, then the first.
    """
    order = range(len(trials))
    if budget_s is not None:
        fitting = [i for i in order if trials[i].mean_s <= budget_s]
        if fitting:
            return min(fitting, key=lambda i: (-trials[i].accuracy, trials[i].mean_s))
        return min(order, key=lambda i: trials[i].mean_s)
    good = [i for i in order if trials[i].accuracy >= least_accuracy]
    if good:
        return min(good, key=lambda i: trials[i].mean_s)
    return min(order, key=lambda i: (-trials[i].accuracy, trials[i].mean_s))


def temperatures_of(inputs: PolicyInputs) -> tuple[float, ...]:
    """[E], ones where the model tells none."""
    return inputs.temperatures or (1.0,) * inputs.num_exits


def need_validation(inputs: PolicyInputs, policy: str) -> Validation:
    """Return validation logits that fit the costs.

    Raises:
        ConfigError: The model carries none, or of another number of exits.
    """
    found = inputs.validation
    if found is None or not found.labels.size:
        raise ConfigError(
            f"policy {policy!r} chooses its thresholds on validation logits, and the model carries"
            " none",
            help="make the model with `edgewise prepare`, which keeps them",
        )
    if len(found.logits) != inputs.num_exits:
        raise ConfigError(
            f"expected validation logits of {inputs.num_exits} exits, found {len(found.logits)}"
        )
    return found


def every_head_s(costs: CostTable) -> Float64:
    """[E]: median seconds to answer at each exit when every head on the way runs.

    Example:
        >>> every_head_s(CostTable.from_costs([2.0, 2.0], [1.0, 1.0])).tolist()
        [3.0, 6.0]
    """
    return np.cumsum(costs.stage_s) + np.cumsum(costs.head_s)


def confidences(validation: Validation, temperatures: Sequence[float]) -> Float64:
    """[E, N]: probability of the most likely class."""
    pairs = zip(validation.logits, temperatures, strict=True)
    return np.stack([top1_confidence(z, temperature=t) for z, t in pairs])


def certainties(validation: Validation, temperatures: Sequence[float]) -> Float64:
    """[E, N]: one minus the normalised entropy."""
    pairs = zip(validation.logits, temperatures, strict=True)
    return np.stack([1.0 - normalised_entropy(z, temperature=t) for z, t in pairs])


def first_exits(scores: Float64, thresholds: npt.ArrayLike) -> Exits:
    """[N]: the exit at which each sample leaves.

    Args:
        scores: [E, N].
        thresholds: One for all, or [E].

    Example:
        >>> first_exits(np.array([[0.9, 0.2], [0.3, 0.8], [0.1, 0.1]]), 0.5).tolist()
        [0, 1]
    """
    limits = np.broadcast_to(np.asarray(thresholds, dtype=float), (len(scores),))
    sure = scores >= limits[:, None]
    sure[-1] = True
    return np.asarray(sure.argmax(axis=0))


def thresholds_for_shares(scores: Float64, shares: Sequence[float] | Float64) -> Float64:
    """[E]: thresholds at which given shares of all samples leave at each exit.

    At each exit the surest of those that are left leave, as many as its share says, rounded down;
    the threshold is the score of the last that left, and infinite where none did. Samples with that
    same score leave too. The last threshold is minus infinity.

    Args:
        scores: [E, N].
        shares: [E], summing to 1.

    Source:
        Huang et al., Multi-Scale Dense Networks (ICLR 2018), section on budgeted batches.

    Example:
        >>> thresholds_for_shares(np.array([[0.1, 0.9, 0.5], [0.2, 0.9, 0.7]]), [0.4, 0.6]).tolist()
        [0.9, -inf]
    """
    num_exits, num_samples = scores.shape
    thresholds = np.full(num_exits, np.inf)
    thresholds[-1] = -np.inf
    left = np.arange(num_samples)
    for k in range(num_exits - 1):
        # The small addition keeps 0.3 × 10 from being 2.
        count = min(int(shares[k] * num_samples + 1e-9), left.size)
        if not count:
            continue
        here = scores[k, left]
        thresholds[k] = np.partition(here, here.size - count)[here.size - count]
        left = left[here < thresholds[k]]
    return thresholds


def geometric_shares(num_exits: int, q: float) -> Float64:
    """[E]: shares that change by a factor from each exit to the next.

    Args:
        num_exits: E.
        q: Above 1 most samples leave late, below 1 early, at 1 equally often everywhere.

    Raises:
        ConfigError: ``q`` is not above zero.

    Example:
        >>> geometric_shares(3, 2.0).round(3).tolist()
        [0.143, 0.286, 0.571]
    """
    if not 0.0 < q < np.inf:
        raise ConfigError(f"expected a factor above zero, found {q!r}")
    logs = np.arange(num_exits) * np.log(q)
    powers = np.exp(logs - logs.max())
    return np.asarray(powers / powers.sum())
