"""How a text gets its next tokens: one by the router, or several drafted and verified."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from edgewise.errors import ConfigError
from edgewise.exits import Step
from edgewise.runtime.executor import execute
from edgewise.runtime.generation.costs import state_ratio
from edgewise.runtime.generation.drafters import (
    Drafters,
    DraftMemory,
    Plan,
    Repeats,
    draft_costs,
    draft_heads,
    exit_drafters,
    repeat_drafters,
)
from edgewise.runtime.generation.program import TokenProgram
from edgewise.runtime.generation.speculation import (
    Cycle,
    Drawing,
    exit_temperature,
    probe,
    speculate,
    verify,
)
from edgewise.units import format_duration

if TYPE_CHECKING:
    from edgewise.backends.decoder.base import HeadKind
    from edgewise.clock import Clock
    from edgewise.exits import Policy
    from edgewise.predict import CostTable
    from edgewise.runtime.generation.costs import LanguageCosts, RowCosts
    from edgewise.runtime.generation.state import TextState
    from edgewise.runtime.request import Setting

_SPARE_RATIO = 1.1


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
        prompt: Token ids; what follows may repeat them.
        memory: What is known of drafts from other texts; ``None`` for nothing.
    """

    text: TextState
    setting: Setting
    costs: LanguageCosts
    rows: RowCosts
    drawing: Drawing
    head: HeadKind
    stop_ids: Collection[int]
    prompt: Sequence[int] = ()
    memory: DraftMemory | None = None


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
    """Drafts as far as it pays and the time left allows, and verifies at full depth: exact.

    Exits draft, and so does the text where it repeats itself. Each cycle takes the drafter, and as
    many drafts, of which most tokens a second are expected from what cycles have cost and how often
    drafts have held; where none pays, tokens run at full depth one at a time. How often drafts of
    others would hold is then seen in passing: an exit is asked now and then for the token that full
    depth is about to give, for a small share of the time; what the text would have drafted is
    compared always.

    Args:
        inputs: Of the text.
        layers: Exits that may draft, by how many layers have run; all before the last by default.
        heads: That may draft: the short list where there is one, and the session's own, by default.
        repeats: Whether the text itself may draft.
        drafts: Always so many, of one exit and head; by default as many as pay.

    Raises:
        ConfigError: No such exit, no short list; a number of drafts of more than one exit and head,
            or another than costs are known of.
    """

    def __init__(
        self,
        inputs: StepperInputs,
        *,
        layers: Sequence[int] | None = None,
        heads: Sequence[HeadKind] | None = None,
        repeats: bool = True,
        drafts: int | None = None,
    ) -> None:
        self._inputs, self._text, self._policy = inputs, inputs.text, inputs.setting.policy
        self._clock: Clock = inputs.setting.clock
        decoder, table = inputs.text.decoder, inputs.costs.table("verify")
        memory = inputs.memory or DraftMemory()
        self._whole = draft_costs(table, inputs.rows, 0, head_s=0.0)
        exits = exit_drafters(
            decoder,
            table,
            inputs.rows,
            memory,
            measured=inputs.head,
            heads=draft_heads(decoder, inputs.head) if heads is None else heads,
            layers=decoder.exit_layers[:-1] if layers is None else layers,
            drafts=drafts,
        )
        if drafts is not None and not (len(exits) == 1 and 0 <= drafts <= self._whole.longest):
            raise ConfigError(
                f"expected 0 to {self._whole.longest} drafts of one exit and head, found {drafts}"
                f" of {len(exits)}"
            )
        adapts = drafts is None
        self._repeats = Repeats(inputs.prompt)
        self._drafters = Drafters(
            exits,
            repeat_drafters(table, inputs.rows, memory) if repeats and adapts else {},
            plain=memory.of(None),
            whole=self._whole,
            ask=adapts,
        )

    def follow(self, tokens: Sequence[int]) -> None:
        """Tokens that another has added to the text."""
        self._repeats.add(tokens)

    def step(self, token: int, *, since_s: float, due_s: float) -> Sequence[Decoded]:
        """Draft, verify and crop."""
        return self._step(token, since_s=since_s, due_s=due_s) or ()

    def step_if_drafted(
        self, token: int, *, since_s: float, due_s: float
    ) -> Sequence[Decoded] | None:
        """The same, if the cycle fits the time left and is more than a token at full depth.

        Returns:
            ``None`` otherwise; nothing has then run.
        """
        return self._step(token, since_s=since_s, due_s=due_s, only_drafted=True)

    def _step(
        self, token: int, *, since_s: float, due_s: float, only_drafted: bool = False
    ) -> Sequence[Decoded] | None:
        start_s = self._clock.now_s()
        inputs, policy, drafters = self._inputs, self._policy, self._drafters
        if self._repeats.tokens[-1:] != [token]:
            self._repeats.add([token])
        table, units = inputs.costs.table("verify"), policy.unit_costs()
        factor = inputs.costs.factor(self._text.length)
        left_s = (due_s - start_s) / (factor * _margin(policy, table))
        factor *= state_ratio(table, units)  # which the margin holds already
        feasible = self._whole.cycle_s(0) <= left_s
        plan = drafters.plan(self._repeats, left_s)
        if only_drafted and not (feasible and (plan.drafts or plan.asked)):
            return None
        cycle, held = self._run(plan, token)
        observed_s = self._clock.now_s() - start_s
        predicted_s = drafters.expected_s(plan, cycle.drafted) * factor
        drafters.learn(plan, cycle, held=held, took_s=observed_s / factor)
        self._repeats.add(cycle.tokens)
        step = Step(
            unit=f"cycle:{cycle.drafted}",
            predicted_s=predicted_s,
            observed_s=observed_s,
            whole_s=units.whole_s,
            regime=units.regime,
        )
        policy.observe([step], met=start_s + observed_s <= due_s, feasible=feasible)
        reason = f"full depth; {cycle.accepted} of {cycle.drafted} drafts held"
        return [
            Decoded(
                token=each,
                exit_layer=self._text.decoder.depth,
                feasible=feasible,
                predicted_s=0.0 if i else policy.expected_s(predicted_s),
                wait_s=0.0 if i else start_s - since_s,
                reason=reason,
                steps=() if i else (step,),
            )
            for i, each in enumerate(cycle.tokens)
        ]

    def _run(self, plan: Plan, token: int) -> tuple[Cycle, float | None]:
        """Run a cycle; of the exit that was asked, also the chance that its draft held."""
        decoder, cache = self._text.decoder, self._text.cache
        drawing, stop_ids = self._inputs.drawing, self._inputs.stop_ids
        way = plan.asked or plan.drafter
        if way is None or way.exit is None:
            drafts = plan.proposed[: plan.drafts]
            return verify(decoder, cache, token, drafts, drawing=drawing, stop_ids=stop_ids), None
        position, kind = way.exit
        if plan.asked is not None:
            return probe(decoder, cache, token, position=position, kind=kind, drawing=drawing)
        cycle = speculate(
            decoder,
            cache,
            token,
            position=position,
            drafts=plan.drafts,
            kind=kind,
            drawing=drawing,
            stop_ids=stop_ids,
        )
        return cycle, None


def _margin(policy: Policy, table: CostTable) -> float:
    """How many times its static median full depth is allowed for.

    As the router has learnt; of a policy that learns no quantile what it expects in the present
    state, and a tenth.
    """
    last = len(table.stage_s)
    whole_s = table.remaining_s(0, last - 1)
    ways = getattr(policy, "table", None)
    if ways is None:
        ratio = state_ratio(table, policy.unit_costs())
        return _SPARE_RATIO * policy.expected_s(whole_s * ratio) / whole_s
    need_s = next((need for need, target in ways.ways[0] if target == last), None)
    return 1.0 if need_s is None else max(1.0, need_s / whole_s)


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
