"""How a text gets its next tokens: one by the router, or several drafted and verified."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from edgewise.exits import Step
from edgewise.runtime.executor import execute
from edgewise.runtime.generation.drafting import (
    Acceptance,
    DraftCosts,
    best_drafts,
    expected_speed_up,
)
from edgewise.runtime.generation.program import TokenProgram, agreement_at
from edgewise.runtime.generation.speculation import Drawing, exit_temperature, speculate
from edgewise.units import format_duration

if TYPE_CHECKING:
    from edgewise.backends.decoder.base import HeadKind
    from edgewise.clock import Clock
    from edgewise.exits import Policy
    from edgewise.predict import CostTable
    from edgewise.runtime.generation.costs import LanguageCosts, RowCosts
    from edgewise.runtime.generation.state import TextState
    from edgewise.runtime.request import Setting

_MOST_DRAFTS = 7
_UNKNOWN_AGREEMENT = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """One new token, and how it came.

    Attributes:
        token: Its id.
        exit_layer: How many layers had run where it was answered.
        feasible: Whether any exit was predicted to fit when it began; ``None`` unknown.
        predicted_s: What its units were expected to take, seconds.
        wait_s: From the token before to the first decision, seconds.
        reason: Why it ended there.
        steps: Units that ran; none for a token that came along with another.
    """

    token: int
    exit_layer: int
    feasible: bool | None
    predicted_s: float
    wait_s: float
    reason: str
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepperInputs:
    """What a stepper of one text is made from.

    Attributes:
        text: The text; the stepper alone runs its tokens after the prompt.
        setting: Program outline, policy, costs and clock under the text's KV policy.
        costs: Of a token, by length.
        rows: Of several tokens in one pass.
        drawing: How tokens are drawn.
        head: What answers at exits.
        stop_ids: Tokens that end the text.
    """

    text: TextState
    setting: Setting
    costs: LanguageCosts
    rows: RowCosts
    drawing: Drawing
    head: HeadKind
    stop_ids: Collection[int]


class Stepper(Protocol):
    """Runs the newest token of one text and says what follows it."""

    def step(self, token: int, *, since_s: float, due_s: float) -> Sequence[Decoded]:
        """Get at least one token more.

        Args:
            token: The text's last, which has run through no layer yet.
            since_s: When the token before it came, on the session's clock.
            due_s: When the answer is due; ``math.inf`` without a budget.

        Raises:
            BackendError: The runtime failed; the text is as it was.
        """
        ...


MakeStepper = Callable[[StepperInputs], Stepper]


class RouterStepper:
    """One token is one request: the policy decides at each candidate exit."""

    def __init__(self, inputs: StepperInputs) -> None:
        self._text, self._costs, self._rows = inputs.text, inputs.costs, inputs.rows
        self._drawing, decoder = inputs.drawing, inputs.text.decoder
        program = TokenProgram(inputs.text, model=inputs.setting.program.model, head=inputs.head)
        self._setting = dataclasses.replace(inputs.setting, program=program)
        self._temperatures = [
            exit_temperature(decoder, k + 1, inputs.head) for k in range(len(decoder.exit_layers))
        ]

    def step(self, token: int, *, since_s: float, due_s: float) -> Sequence[Decoded]:
        """Run the token through the executor; tokens that are owed make it dearer."""
        text = self._text
        answer = execute(
            self._setting,
            text.decoder.embed([token]),
            budget_s=due_s - since_s,
            arrival_s=since_s,
            factor=self._costs.factor(text.length) * self._rows.ratio(1 + text.owed),
        )
        assert answer.logits is not None  # noqa: S101 - policies of a session never reject
        assert answer.exit_index is not None  # noqa: S101 - as above
        assert answer.predicted_s is not None  # noqa: S101 - as above
        logits = answer.logits
        if self._drawing.distribution is not None:
            logits = logits / logits.dtype.type(self._temperatures[answer.exit_index])
        return [
            Decoded(
                token=self._drawing.choose(logits),
                exit_layer=text.decoder.exit_layers[answer.exit_index],
                feasible=answer.feasible,
                predicted_s=answer.predicted_s,
                wait_s=answer.wait_s,
                reason=answer.reason.partition("; late by")[0],
                steps=answer.steps,
            )
        ]


class VerifyStepper:
    """Drafts at an exit as far as the time left allows and verifies at full depth: exact.

    The drafting exit is the one that the exits' held-out agreement makes fastest; how much is
    drafted follows the acceptance seen, and may be nothing. Full depth is the floor.
    """

    def __init__(self, inputs: StepperInputs) -> None:
        self._inputs = inputs
        self._text, self._policy = inputs.text, inputs.setting.policy
        self._clock: Clock = inputs.setting.clock
        decoder = inputs.text.decoder
        self._last = len(decoder.exit_layers)
        table = inputs.costs.table("verify")
        self.position, self._cycle, prior = 0, draft_costs(table, inputs.rows, self._last), 0.0
        best = 1.0
        for position in range(1, self._last):
            costs = draft_costs(table, inputs.rows, position)
            known = agreement_at(decoder, decoder.exit_layers[position - 1])
            chance = _UNKNOWN_AGREEMENT if known is None else known
            speed_up = expected_speed_up(chance, best_drafts(chance, costs), costs)
            if speed_up > best or not self.position:
                best, prior = max(best, speed_up), chance
                self.position, self._cycle = position, costs
        self.acceptance = Acceptance(prior)

    def step(self, token: int, *, since_s: float, due_s: float) -> Sequence[Decoded]:
        """Draft, verify and crop."""
        start_s = self._clock.now_s()
        text, inputs, policy = self._text, self._inputs, self._policy
        factor = inputs.costs.factor(text.length)
        left_s = (due_s - start_s) / factor
        whole_s = self._cycle.cycle_s(0)
        margin = _margin(policy, inputs.costs.table("verify"))
        feasible = whole_s * margin <= left_s
        drafts = 0
        if self.position:
            drafts = best_drafts(self.acceptance.chance, self._cycle, left_s=left_s / margin)
        cycle = speculate(
            text.decoder,
            text.cache,
            token,
            position=self.position or 1,
            drafts=drafts,
            kind=inputs.head,
            drawing=inputs.drawing,
            stop_ids=inputs.stop_ids,
        )
        observed_s = self._clock.now_s() - start_s
        self.acceptance.observe(accepted=cycle.accepted, drafted=cycle.drafted)
        predicted_s = self._cycle.cycle_s(cycle.drafted) * factor
        step = Step(unit=f"cycle:{cycle.drafted}", predicted_s=predicted_s, observed_s=observed_s)
        policy.observe([step], met=start_s + observed_s <= due_s, feasible=feasible)
        reason = f"full depth; {cycle.accepted} of {cycle.drafted} drafts held"
        return [
            Decoded(
                token=each,
                exit_layer=text.decoder.depth,
                feasible=feasible,
                predicted_s=0.0 if i else policy.expected_s(predicted_s),
                wait_s=0.0 if i else start_s - since_s,
                reason=reason,
                steps=() if i else (step,),
            )
            for i, each in enumerate(cycle.tokens)
        ]


def draft_costs(table: CostTable, rows: RowCosts, position: int) -> DraftCosts:
    """What a cycle costs that drafts at a position, from one token's table and rows' ratios.

    Args:
        table: Heads alone.
        rows: Measured in one pass.
        position: 1 to the number of exits.
    """
    last = len(table.stage_s)
    rest_s = math.fsum(table.stage_s[position:])
    head = rows.head(1)
    head_ratios = [rows.head(m) / head if head > 0 else 1.0 for m in range(1, _MOST_DRAFTS + 2)]
    return DraftCosts(
        early_s=math.fsum(table.stage_s[:position]),
        draft_head_s=float(table.head_s[position - 1]),
        verify_s=tuple(
            rest_s * rows.ratio(m) + float(table.head_s[last - 1]) * max(1.0, head_ratios[m - 1])
            for m in range(1, _MOST_DRAFTS + 2)
        ),
    )


def _margin(policy: Policy, table: CostTable) -> float:
    """How many times its median full depth is allowed for, as the router has learnt."""
    ways = getattr(policy, "table", None)
    if ways is None:
        return 1.0
    last = len(table.stage_s)
    need_s = next((need for need, target in ways.ways[0] if target == last), None)
    return 1.0 if need_s is None else max(1.0, need_s / table.remaining_s(0, last - 1))


def soonest_s(policy: Policy, median_s: float) -> float:
    """What a policy allows for the soonest exit: a router its upper quantile.

    Args:
        policy: Of the text.
        median_s: Of the soonest exit.
    """
    table = getattr(policy, "table", None)
    expected_s = policy.expected_s(median_s)
    return expected_s if table is None else max(expected_s, float(table.ways[0][-1][0]))


def late_cause(decoded: Decoded, *, waited_for: str) -> str:
    """What a late token was late for.

    Args:
        decoded: The token.
        waited_for: What it waited for, if it waited.
    """
    if decoded.feasible is False:
        return "below the floor: no exit was predicted to fit the time left"
    worst = max(decoded.steps, key=lambda s: s.observed_s - s.predicted_s, default=None)
    excess_s = 0.0 if worst is None else worst.observed_s - worst.predicted_s
    if worst is None or decoded.wait_s > excess_s:
        return f"waited {format_duration(decoded.wait_s)} for {waited_for}"
    took, told = format_duration(worst.observed_s), format_duration(worst.predicted_s)
    return f"{worst.unit} took {took}, {told} was predicted"
