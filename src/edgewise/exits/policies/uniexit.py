"""UniExit's router: go on while the next exit is predicted to fit, with one of its margins."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from edgewise.errors import ConfigError, ProfileError, nearest_names
from edgewise.exits.policy import ANSWER, LATE, Policy, PolicyInputs, Step
from edgewise.predict.conformal import AdaptiveMargins, Coverage
from edgewise.predict.fallback import WorstCases
from edgewise.predict.scale import ScaleFactor
from edgewise.predict.state_costs import STATIC, StateCosts, UnitCosts

Float64 = npt.NDArray[np.float64]
Margin = Literal["none", "p95", "p99", "fallback", "conformal"]
WorstCase = Literal["ratio", "seconds"]

# A stage that was faster than predicted is believed slowly: too high a factor costs some depth, too
# low a one the deadline.
_FALLING_WEIGHT = 0.25

_log = logging.getLogger(__name__)


def make(  # noqa: PLR0913 - each is one knob
    inputs: PolicyInputs,
    *,
    margin: Margin = "fallback",
    base_ratio: float | Sequence[float] | None = None,
    worst_case: WorstCase = "ratio",
    level: float = 0.95,
    scale_factor: bool = False,
) -> UniExit:
    """Make the policy.

    Args:
        inputs: Costs; accuracy is not looked at.
        margin: What is added to predictions. ``"none"``: nothing. ``"p95"``, ``"p99"``: that
            percentile of offline errors. ``"fallback"``: the same p95, and in volatile states the
            periodic worst case beyond the prediction; the paper's. ``"conformal"``: adaptive
            conformal bounds of each unit and regime, learnt from answered requests, p95 before.
        base_ratio: Offline percentile of observed / predicted, for all units or for each (stages
            first, then heads). By default from the residuals of the profile; where it has none,
            as in a simulation without noise, predictions are taken as they are.
        worst_case: How the fallback reads "the gap between worst-case latency and the current
            prediction": as a ratio to what was predicted then, or as seconds, which add much at
            high clocks and next to nothing at the lowest.
        level: Share that each conformal bound should cover.
        scale_factor: Multiply predictions by observed / predicted of the stage just run.

    Raises:
        ConfigError: An argument is out of its range.
    """
    for value, known, what in (
        (margin, get_args(Margin), "margin"),
        (worst_case, get_args(WorstCase), "worst case"),
    ):
        if value not in known:
            raise ConfigError(
                f"unknown {what} {value!r} of policy 'uniexit'",
                help=nearest_names(str(value), known),
            )
    return UniExit(
        inputs,
        margin=margin,
        base_ratio=_base_ratio(inputs, margin, base_ratio),
        worst_case=worst_case,
        level=level,
        scale_factor=scale_factor,
    )


@dataclass(frozen=True, slots=True)
class Needs:
    """What a decision reads. Time needed is ``scaled_s`` times the scale factor, plus ``extra_s``.

    Attributes:
        scaled_s: [S + 1], for each position, of the next stage and the head at its end; infinite at
            the end, where there is none.
        extra_s: [S + 1], the part that the scale factor leaves alone.
        head_scaled_s: [S], of the head at each exit.
        head_extra_s: [S].
        stage_s: [S], predictions without margin, for the scale factor.
        unit_costs: The same by name, heads too.
    """

    scaled_s: tuple[float, ...]
    extra_s: tuple[float, ...]
    head_scaled_s: tuple[float, ...]
    head_extra_s: tuple[float, ...]
    stage_s: tuple[float, ...]
    unit_costs: UnitCosts = STATIC


class UniExit(Policy):
    """Looks at the next exit only, and goes on while it fits.

    Continue iff elapsed + stages to the next exit + its head + margin ≤ budget, else answer here.
    The first stage runs without being asked, for before it there is no exit; the paper leaves open
    what happens where it cannot fit. Here the answer then comes from the first exit and is told to
    be infeasible.

    Attributes:
        needs: What decisions read; replaced whole, never changed.
        scale: Multiplies predictions; stays at 1 unless ``scaled``.
        scaled: Whether stages that ran correct it.

    Source:
        UniExit, eq. 11 and sections 5.2 to 5.4; our own code and windows.
    """

    name = "uniexit"

    def __init__(  # noqa: PLR0913 - each is one knob
        self,
        inputs: PolicyInputs,
        *,
        margin: Margin,
        base_ratio: Float64,
        worst_case: WorstCase,
        level: float,
        scale_factor: bool,
    ) -> None:
        costs = inputs.costs
        num = costs.num_exits
        self._num = num
        # As the executor names them: every stage runs alone.
        self._units = [f"segment:{k}-{k + 1}" for k in range(num)]
        self._units += [f"head:{k}" for k in range(num)]
        self._margin = margin
        self._base_ratio = base_ratio
        self._in_seconds = worst_case == "seconds"
        self._worst = WorstCases()
        self._bounds = (
            AdaptiveMargins(self._units, level=level, base_ratio=base_ratio.tolist())
            if margin == "conformal"
            else None
        )
        self.scale = ScaleFactor(falling_weight=_FALLING_WEIGHT)
        self.scaled = scale_factor
        self._lock = threading.Lock()
        self._costs = StateCosts(at_s=-math.inf, stage_s=costs.stage_s, head_s=costs.head_s)
        self._priced = STATIC
        self._now_s = 0.0
        self.needs = self._published()

    @property
    def coverage(self) -> Coverage | None:
        """Nominal and observed coverage of conformal bounds; ``None`` with another margin."""
        return None if self._bounds is None else self._bounds.coverage()

    def begin(self) -> Policy:
        """Itself, or what remembers the factor at one request's start."""
        return _OneRequest(self) if self.scaled else self

    def decide(self, position: int, now_s: float, start_s: float, deadline_s: float) -> int:  # noqa: ARG002
        """Compare two numbers."""
        self._now_s = now_s
        needs = self.needs
        left_s = deadline_s - now_s
        scale = self.scale.value
        next_s = needs.scaled_s[position] * scale + needs.extra_s[position]
        # Without a deadline the time left is infinite too, and nothing comes after the last exit.
        if not position or (position < self._num and next_s <= left_s):
            return position + 1
        k = position - 1
        in_time = needs.head_scaled_s[k] * scale + needs.head_extra_s[k] <= left_s
        return ANSWER if in_time else LATE

    def observe(
        self,
        steps: Sequence[Step],
        *,
        met: bool,  # noqa: ARG002
        feasible: bool | None = None,  # noqa: ARG002
    ) -> None:
        """Learn worst cases or conformal bounds, where the margin is made of them."""
        self.learn(steps, scale=1.0)

    def learn(self, steps: Sequence[Step], *, scale: float) -> None:
        """Learn from a request whose predictions were taken times a factor.

        When another thread is publishing, this request is left out, and nobody waits.
        """
        bounds, worst = self._bounds, self._worst if self._margin == "fallback" else None
        if (bounds is None and worst is None) or not self._lock.acquire(blocking=False):
            return
        try:
            if bounds is not None:
                bounds.begin_request()
            for step in steps:
                predicted_s = step.predicted_s * scale
                if worst is not None:
                    worst.add(step.unit, predicted_s, step.observed_s, at_s=self._now_s)
                elif bounds is not None and predicted_s > 0:
                    bounds.add(step.unit, step.regime, step.observed_s / predicted_s)
            if bounds is not None or self._costs.volatile:
                self.needs = self._published()
        finally:
            self._lock.release()

    def reprice(self, costs: StateCosts) -> None:
        """Take over predictions for a new state.

        Raises:
            ProfileError: They are of another number of exits.
        """
        num = self._num
        if len(costs.stage_s) != num or len(costs.head_s) != num:
            raise ProfileError(
                f"expected costs of {num} stages and heads, found {len(costs.stage_s)} and"
                f" {len(costs.head_s)}: they are predicted for another model",
                help="edgewise fit MODEL",
            )
        with self._lock:
            self._costs = costs
            predicted_s = (*costs.stage_s.tolist(), *costs.head_s.tolist())
            self._priced = UnitCosts(
                seconds=dict(zip(self._units, predicted_s, strict=True)),
                whole_s=float(costs.stage_s.sum() + costs.head_s[-1]),
                regime=costs.regime,
            )
            self.needs = self._published()

    def unit_costs(self) -> UnitCosts:
        """As the published needs have them."""
        return self.needs.unit_costs

    def feasible(self, left_s: float) -> bool:
        """Whether the first exit fits with its margin."""
        needs = self.needs
        return needs.scaled_s[0] * self.scale.value + needs.extra_s[0] <= left_s

    def expected_s(self, predicted_s: float) -> float:
        """Predictions times the scale factor."""
        return predicted_s * self.scale.value

    def explain(self, exit_index: int) -> str:
        """The next exit, or that there is none."""
        if exit_index == self._num - 1:
            return "the last exit fitted the budget"
        return f"exit {exit_index + 1} did not fit the time left"

    def _published(self) -> Needs:
        costs, num = self._costs, self._num
        predicted_s = np.concatenate((costs.stage_s, costs.head_s))
        scaled_s = predicted_s * self._ratios()
        extra_s = self._extra_s(predicted_s)
        steps_s = scaled_s[:num] + scaled_s[num:]
        return Needs(
            scaled_s=(*steps_s.tolist(), math.inf),
            extra_s=(*(extra_s[:num] + extra_s[num:]).tolist(), 0.0),
            head_scaled_s=tuple(scaled_s[num:].tolist()),
            head_extra_s=tuple(extra_s[num:].tolist()),
            stage_s=tuple(costs.stage_s.tolist()),
            unit_costs=self._priced,
        )

    def _ratios(self) -> Float64:
        """[2·S], what predictions are multiplied by."""
        if self._bounds is not None:
            regime = self._costs.regime
            return np.array([self._bounds.ratio(unit, regime) for unit in self._units])
        if self._margin != "fallback" or not self._costs.volatile or self._in_seconds:
            return self._base_ratio
        return self._base_ratio + [self._worst.gap_ratio(unit) for unit in self._units]

    def _extra_s(self, predicted_s: Float64) -> Float64:
        """[2·S], seconds beyond, which the scale factor leaves alone."""
        if self._margin != "fallback" or not self._costs.volatile or not self._in_seconds:
            return np.zeros_like(predicted_s)
        pairs = zip(self._units, predicted_s.tolist(), strict=True)
        return np.array([self._worst.gap_s(unit, s) for unit, s in pairs])


class _OneRequest(Policy):
    """Decides as its router does; remembers the factor at the start, and times stages."""

    name = UniExit.name

    def __init__(self, router: UniExit) -> None:
        self._router = router
        self._mark_s = 0.0
        self._scale = router.scale.value

    def decide(self, position: int, now_s: float, start_s: float, deadline_s: float) -> int:
        """Correct the factor by the stage that has just run, then ask the router."""
        router = self._router
        if position:
            router.scale.add(router.needs.stage_s[position - 1], now_s - self._mark_s)
        self._mark_s = now_s
        return router.decide(position, now_s, start_s, deadline_s)

    def observe(
        self,
        steps: Sequence[Step],
        *,
        met: bool,  # noqa: ARG002
        feasible: bool | None = None,  # noqa: ARG002
    ) -> None:
        """Learn what the factor at the request's start left over."""
        self._router.learn(steps, scale=self._scale)

    def unit_costs(self) -> UnitCosts:
        """As the router."""
        return self._router.unit_costs()

    def feasible(self, left_s: float) -> bool:
        """As the router."""
        return self._router.feasible(left_s)

    def expected_s(self, predicted_s: float) -> float:
        """Predictions times the factor at the request's start."""
        return predicted_s * self._scale

    def explain(self, exit_index: int) -> str:
        """As the router."""
        return self._router.explain(exit_index)


def _base_ratio(
    inputs: PolicyInputs, margin: Margin, given: float | Sequence[float] | None
) -> Float64:
    """[2·E], observed over predicted of each unit at the offline percentile."""
    num = 2 * inputs.num_exits
    if margin == "none":
        return np.ones(num)
    if given is None:
        return _profiled_ratio(inputs, 0.99 if margin == "p99" else 0.95)
    ratio = np.asarray(given, dtype=np.float64)
    if ratio.shape not in {(), (num,)} or not (np.isfinite(ratio) & (ratio > 0)).all():
        raise ConfigError(
            f"expected one base ratio above zero, or one for each of {num} units, found {given!r}"
        )
    return np.array(np.broadcast_to(ratio, num))


def _profiled_ratio(inputs: PolicyInputs, level: float) -> Float64:
    costs, num = inputs.costs, inputs.num_exits
    if not costs.samples.size:
        _log.info("the profile has no residuals: predictions are taken without a base margin")
        return np.ones(2 * num)
    ratios = costs.samples / np.maximum(costs.medians, 1e-12)  # [R, U]
    if ratios.shape[1] != 2 * num:
        return np.full(2 * num, float(np.quantile(ratios, level)))
    each = np.quantile(ratios, level, axis=0)  # [U], stage 0, head 0, stage 1, …
    return np.concatenate((each[0::2], each[1::2]))
