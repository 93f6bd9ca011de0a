"""How long a campaign samples: the rule that says when it is enough."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgewise.errors import ConfigError
from edgewise.profiles import Profile, Steadiness, UnitKey, steady

Samples = Sequence[float] | npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """When to stop sampling.

    Attributes:
        warmup_rounds: Rounds run and thrown away first.
        min_rounds: Rounds that are taken whatever the time.
        max_rounds: Rounds after which it ends whether steady or not.
        time_cap_s: Time for each pair of backend and batch size, seconds, warm-up included;
            ``math.inf`` for none.
        half_width_ratio: A unit is steady when its median is known to this share of itself and
            has not drifted by more.
        floor_ratio: The same as a share of the whole model, for units so short that an error
            in them decides nothing.

    Raises:
        ConfigError: A number of rounds is below one, or the time is not above zero.
    """

    warmup_rounds: int
    min_rounds: int
    max_rounds: int
    time_cap_s: float
    half_width_ratio: float
    floor_ratio: float = 0.002

    def __post_init__(self) -> None:
        if not 1 <= self.min_rounds <= self.max_rounds:
            raise ConfigError(
                f"expected at least one round of measurement, found {self.max_rounds}",
                help="20 rounds say something about a median, 100 about a 95th percentile",
            )
        if not self.time_cap_s > 0:
            raise ConfigError(
                f"expected a time for measuring above zero, found {self.time_cap_s!r} s"
            )

    def limited(self, *, rounds: int | None = None, time_cap_s: float | None = None) -> Effort:
        """Return a copy with another number of rounds, another time, or both.

        A number of rounds without a time is a request for these rounds: no time ends them early.
        """
        if rounds is None:
            cap_s = self.time_cap_s if time_cap_s is None else time_cap_s
            return dataclasses.replace(self, time_cap_s=cap_s)
        return dataclasses.replace(
            self,
            max_rounds=rounds,
            min_rounds=min(self.min_rounds, rounds),
            time_cap_s=math.inf if time_cap_s is None else time_cap_s,
        )

    def in_words(self) -> str:
        """The rule as a profile's method states it."""
        cap = f" or {self.time_cap_s:g} s each" if math.isfinite(self.time_cap_s) else ""
        return (
            f"when every unit's median is known to ±{self.half_width_ratio:.0%}"
            f" or to ±{self.floor_ratio:.1%} of the longest unit's, without drift, else after"
            f" {self.max_rounds} rounds{cap}"
        )


QUICK = Effort(warmup_rounds=2, min_rounds=10, max_rounds=60, time_cap_s=3.5, half_width_ratio=0.05)
THOROUGH = Effort(
    warmup_rounds=5, min_rounds=20, max_rounds=300, time_cap_s=30.0, half_width_ratio=0.02
)


def unit_steadiness(
    samples_s: Samples, effort: Effort = THOROUGH, *, longest_s: float = 0.0
) -> Steadiness:
    """Say whether one unit has been sampled long enough.

    Args:
        samples_s: [N] seconds, in the order they were taken, NaN where there is none.
        effort: Gives the allowed ratio and its floor.
        longest_s: Median of the longest unit on that backend, seconds.

    Example:
        >>> unit_steadiness([1e-6, 3e-6] * 20, longest_s=1e-3).steady
        True
    """
    values = np.asarray(samples_s, dtype=np.float64)
    present = values[~np.isnan(values)]
    ratio = effort.half_width_ratio
    if present.size and (centre_s := float(np.median(present))) > 0:
        ratio = max(ratio, effort.floor_ratio * longest_s / centre_s)
    return steady(present, half_width_ratio=ratio)


def steadiness(
    samples: Mapping[UnitKey, Samples] | Profile, effort: Effort = THOROUGH
) -> dict[UnitKey, Steadiness]:
    """Say of every unit whether it has been sampled long enough.

    Args:
        samples: Samples of each unit, seconds, or a profile.
        effort: Gives the allowed ratio and its floor.
    """
    if isinstance(samples, Profile):
        samples = {key: cost.present_s for key, cost in samples.units.items()}
    longest_s: dict[tuple[str, int], float] = {}
    for key, each in samples.items():
        turn = key.backend, key.batch
        centre_s = float(np.median(each)) if len(each) else 0.0
        longest_s[turn] = max(longest_s.get(turn, 0.0), centre_s)
    return {
        key: unit_steadiness(each, effort, longest_s=longest_s[key.backend, key.batch])
        for key, each in samples.items()
    }
