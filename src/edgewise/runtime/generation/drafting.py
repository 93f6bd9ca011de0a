"""How many tokens to draft before they are verified: closed forms over measured costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from edgewise.errors import ConfigError

_HALVINGS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCosts:
    """Seconds of what speculation consists of, at one exit.

    Attributes:
        early_s: One token through the layers up to the exit.
        draft_head_s: One answer at the exit.
        verify_s: The layers behind the exit and the last head, for 1, 2, ... tokens in one call;
            verifying d drafts takes d + 1 tokens.
    """

    early_s: float
    draft_head_s: float
    verify_s: tuple[float, ...]

    def __post_init__(self) -> None:
        every = (self.early_s, self.draft_head_s, *self.verify_s)
        if not self.verify_s or not all(math.isfinite(s) and s >= 0 for s in every):
            raise ConfigError(
                "expected finite seconds of at least 0 and a verification of at least one token,"
                f" found {every}"
            )
        if not self.cycle_s(0) > 0:
            raise ConfigError("expected a token at full depth to take time, found 0 s")

    @property
    def longest(self) -> int:
        """The most drafts whose verification has a known cost."""
        return len(self.verify_s) - 1

    def cycle_s(self, drafts: int) -> float:
        """Draft and verify; no drafts is one token at full depth.

        The last draft too runs the early layers: its own successor is verified with it.
        """
        return (drafts + 1) * self.early_s + drafts * self.draft_head_s + self.verify_s[drafts]


def expected_tokens(acceptance: float, drafts: int) -> float:
    """Mean number of tokens that a cycle yields.

    Drafts are taken to be accepted independently and with one chance.

    Args:
        acceptance: α, chance that a draft agrees when all before it did, 0 to 1.
        drafts: d.

    Returns:
        (1 - α^(d+1)) / (1 - α), between 1 and d + 1.

    Source:
        Leviathan, Kalman and Matias, Fast Inference from Transformers via Speculative Decoding
        (2023), eq. 1.

    Example:
        >>> expected_tokens(0.5, 2)  # 1 + 1/2 + 1/4
        1.75
    """
    return math.fsum(acceptance**k for k in range(drafts + 1))


def expected_speed_up(acceptance: float, drafts: int, costs: DraftCosts) -> float:
    """Tokens per second over those of one token at a time at full depth."""
    tokens = expected_tokens(acceptance, drafts)
    return tokens * costs.cycle_s(0) / costs.cycle_s(drafts)


def break_even_acceptance(costs: DraftCosts, drafts: int = 1) -> float:
    """The acceptance above which so many drafts a cycle pay: for one, α F > what the draft adds.

    A draft costs at least the early layers and its head once more, so that with rows that cost
    nothing to verify α must exceed (early + head) / full depth. Where each further row costs no
    less than the second, more drafts need still more, as the d-th gives α^d ≤ α tokens.

    Returns:
        At least 0; above 1 where no acceptance will do.

    Example:
        >>> costs = DraftCosts(early_s=4, draft_head_s=2, verify_s=(6, 6, 6))
        >>> round(break_even_acceptance(costs), 9), round(break_even_acceptance(costs, 2), 9)
        (0.6, 0.704159458)
    """
    more = costs.cycle_s(drafts) / costs.cycle_s(0) - 1.0
    if drafts == 1 or more <= 0:
        return max(0.0, more)
    if more > drafts:
        return math.inf
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        pays = expected_tokens(middle, drafts) - 1.0 > more
        low, high = (low, middle) if pays else (middle, high)
    return high


def best_drafts(
    acceptance: float, costs: DraftCosts, *, left_s: float = math.inf, most: int | None = None
) -> int:
    """The number of drafts that yields most tokens per second within the time left.

    Args:
        acceptance: α, 0 to 1.
        costs: Of a cycle.
        left_s: By when the cycle must be done, seconds: nothing is said before it is verified.
        most: At most so many.

    Returns:
        0 where drafting does not pay or fit; whether a token at full depth fits is not asked here.
    """
    longest = costs.longest if most is None else max(0, min(most, costs.longest))
    fitting = [d for d in range(1, longest + 1) if costs.cycle_s(d) <= left_s]
    return max([0, *fitting], key=lambda d: (expected_speed_up(acceptance, d, costs), -d))


class Acceptance:
    """The chance that a draft is accepted, learnt as one goes.

    Counts are forgotten slowly and a prior stays.

    Args:
        prior: Chance expected at first, 0 to 1: an exit's agreement on held-out text. ``None``
            where nothing is known: then there is no estimate before as many drafts as ``weight``.
        weight: Drafts that the prior counts for.
        memory: Share of the counts kept from one cycle to the next, 0 to 1.

    Raises:
        ConfigError: A chance or share outside 0 to 1, or no weight.
    """

    def __init__(self, prior: float | None, *, weight: float = 8.0, memory: float = 0.98) -> None:
        known = 0.0 if prior is None else prior
        if not 0 <= known <= 1 or not 0 <= memory <= 1 or not 0 < weight < math.inf:
            raise ConfigError(
                f"expected a prior and a memory from 0 to 1 and a weight above 0, found {prior},"
                f" {memory} and {weight}"
            )
        self._prior, self._weight, self._memory = prior, weight, memory
        self._accepted = self._tried = 0.0

    @property
    def chance(self) -> float | None:
        """The present estimate; ``None`` while nothing is known."""
        if self._prior is None:
            return self._accepted / self._tried if self._tried >= self._weight else None
        accepted = self._prior * self._weight + self._accepted
        return accepted / (self._weight + self._tried)

    @property
    def hopeful(self) -> float:
        """As good as it may well be: a standard error above; 1 while nothing is known."""
        chance = self.chance
        if chance is None:
            return 1.0
        count = self._tried + (0.0 if self._prior is None else self._weight)
        # As if half a draft had held besides, so that a few failures are not taken for certainty.
        chance = (chance * count + 0.5) / (count + 1.0)
        return min(1.0, chance + math.sqrt(chance * (1.0 - chance) / count))

    def observe(self, *, accepted: float, drafted: int) -> None:
        """Learn from a cycle; drafts behind the first refused one say nothing.

        Args:
            accepted: How many were; of a single draft also the chance that it was.
            drafted: How many there were; 0 for a token without drafts.
        """
        self._accepted = self._accepted * self._memory + accepted
        self._tried = self._tried * self._memory + min(math.floor(accepted) + 1, drafted)


def speed_up_of_counts(accepted: Sequence[int], drafts: int, costs: DraftCosts) -> float:
    """Speed-up over full depth that cycles of a given length did have at these costs.

    Args:
        accepted: Drafts accepted in each cycle.
        drafts: In each.
        costs: Of a cycle.
    """
    tokens = math.fsum(a + 1 for a in accepted)
    return tokens * costs.cycle_s(0) / (len(accepted) * costs.cycle_s(drafts))
