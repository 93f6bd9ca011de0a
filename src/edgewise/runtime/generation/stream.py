"""One text on its way: its prompt, its tokens, its deadlines and what it says at the end."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgewise.runtime.generation.costs import state_ratio
from edgewise.runtime.generation.pace import Pace, Window
from edgewise.runtime.generation.records import Finish, Late, Summary, Token
from edgewise.runtime.generation.stepping import Decoded, Stepper, late_cause, soonest_s
from edgewise.runtime.generation.wording import Wording
from edgewise.units import format_duration

if TYPE_CHECKING:
    from edgewise.clock import Clock
    from edgewise.exits import Policy
    from edgewise.model.decoding import KvPolicy
    from edgewise.runtime.generation.costs import LanguageCosts, RowCosts
    from edgewise.runtime.generation.state import TextState

_RESERVED_FROM = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamInputs:
    """What a stream is made from.

    Attributes:
        index: Which of the prompts.
        prompt: Token ids, at least one.
        max_tokens: Tokens at most, at least one.
        tpot_budget_s: ``math.inf`` for none.
        ttft_budget_s: The same.
        window: Over how many tokens slack is carried.
        kv: KV policy.
        depth: L.
        wording: Makes text of tokens.
        stop_ids: Tokens that end the text.
        policy: Whose corrections predictions are raised by.
        costs: Of a token.
        rows: Of several tokens in one pass.
        floor_s: Median of a token at its soonest exit, at the costs' length, in the device's state
            when the text was asked for.
        clock: Tells time.
    """

    index: int
    prompt: Sequence[int]
    max_tokens: int
    tpot_budget_s: float
    ttft_budget_s: float
    window: Window
    kv: KvPolicy
    depth: int
    wording: Wording
    stop_ids: frozenset[int]
    policy: Policy
    costs: LanguageCosts
    rows: RowCosts
    floor_s: float
    clock: Clock


class Stream:
    """Advances by a piece of its prompt or by a step; knows what it needs and when it is due.

    Args:
        inputs: What it keeps to the end.
        text: Empty, with room for prompt and answer; given back as soon as it ends.
        stepper: Runs the tokens behind the prompt.

    Attributes:
        index: Which of the prompts.
        finish: Why it ended; ``None`` while it goes on.
        spent_s: Time it has been given.
    """

    def __init__(self, inputs: StreamInputs, *, text: TextState, stepper: Stepper) -> None:
        self._in = inputs
        self.index = inputs.index
        self.finish: Finish | None = None
        self.spent_s = 0.0
        self._text: TextState | None = text
        self._stepper: Stepper | None = stepper
        self._pace = Pace(inputs.tpot_budget_s, window=inputs.window)
        self._arrival_s = math.nan
        self._ttft_s: float | None = None
        self._ids: list[int] = []
        self._words: list[str] = []
        self._layers: Counter[int] = Counter()
        self._late: list[Late] = []
        self._overheads_s: list[float] = []

    def begin(self, at_s: float) -> None:
        """The request has arrived."""
        self._arrival_s = at_s

    @property
    def since_s(self) -> float:
        """When the token before the next one came, or the request."""
        return self._arrival_s if self._ttft_s is None else self._pace.last_s

    @property
    def due_s(self) -> float:
        """When the next token is due; infinite without a budget."""
        if self._ttft_s is None:
            return self._arrival_s + self._in.ttft_budget_s
        return self._pace.due_s

    @property
    def in_prompt(self) -> bool:
        """Whether a piece of the prompt comes next."""
        return self._length < len(self._in.prompt) - 1

    @property
    def _length(self) -> int:
        return 0 if self._text is None else self._text.length

    def need_s(self) -> float:
        """What its shortest next piece of work is predicted to take, seconds."""
        return self.chunk_s(1) if self.in_prompt else self._soonest_s(self._length)

    def whole_s(self) -> float:
        """What must be done before its next token: the rest of the prompt, and a token."""
        prompt = len(self._in.prompt)
        return self.chunk_s(prompt) + self._soonest_s(max(self._length, prompt - 1))

    def _soonest_s(self, length: int) -> float:
        return soonest_s(self._in.policy, self._in.floor_s) * self._in.costs.factor(length)

    def chunk_s(self, rows: int) -> float:
        """What a piece of the prompt is predicted to take, seconds."""
        rows = min(rows, len(self._in.prompt) - 1 - self._length)
        if rows < 1:
            return 0.0
        return self._in.policy.expected_s(self._rows_s(rows, after=self._length))

    def _rows_s(self, rows: int, *, after: int) -> float:
        """Median of a piece of the prompt in the device's present state."""
        inputs = self._in
        slower = state_ratio(inputs.costs.mask, inputs.policy.unit_costs())
        return inputs.rows.layers(rows) * inputs.costs.factor(after + rows // 2) * slower

    def read_prompt(self, *, most: int, until_s: float) -> None:
        """Run a piece of the prompt, the longest that is predicted to be done by an instant."""
        assert self._text is not None  # noqa: S101 - it goes on
        clock, prompt, start = self._in.clock, self._in.prompt, self._length
        began_s = clock.now_s()
        rows = most
        while rows > 1 and began_s + self.chunk_s(rows) > until_s:
            rows //= 2
        self._text.prefill(prompt[start : min(start + rows, len(prompt) - 1)])
        self.spent_s += clock.now_s() - began_s

    def step(self, *, until_s: float, alone: bool) -> list[Token]:
        """Get the next token, or several.

        Args:
            until_s: When others want their turn; the stream's own deadline holds as well.
            alone: Whether no other stream goes on.
        """
        assert self._text is not None  # noqa: S101 - it goes on
        assert self._stepper is not None  # noqa: S101 - as above
        clock, since_s, due_s = self._in.clock, self.since_s, self.due_s
        newest = self._ids[-1] if self._ids else self._in.prompt[-1]
        began_s = clock.now_s()
        # What a token takes beside its units (learning, choosing, wording) is known ahead no better
        # than from the last ones; the longest of them may have been an accident.
        reserve_s = sorted(self._overheads_s)[-2:][0] if self._overheads_s else 0.0
        decoded = self._stepper.step(newest, since_s=since_s, due_s=min(due_s, until_s) - reserve_s)
        first = self._ttft_s is None
        tokens: list[Token] = []
        for each in decoded[: self._in.max_tokens - len(self._ids)]:
            tokens.append(self._token(each, since_s=since_s, due_s=due_s, first=first, alone=alone))
            if self.finish:
                break
            since_s, due_s, first = self.since_s, self.due_s, False
        ended_s = clock.now_s()
        units_s = math.fsum(step.observed_s for each in decoded for step in each.steps)
        self._overheads_s = [*self._overheads_s[1 - _RESERVED_FROM :], ended_s - began_s - units_s]
        self.spent_s += ended_s - began_s
        return tokens

    def _token(
        self, decoded: Decoded, *, since_s: float, due_s: float, first: bool, alone: bool
    ) -> Token:
        inputs = self._in
        self._ids.append(decoded.token)
        words = "" if decoded.token in inputs.stop_ids else inputs.wording.add(decoded.token)
        self.finish = self._why_end(decoded.token)
        if self.finish:
            words += inputs.wording.finish()
        at_s = inputs.clock.now_s()
        if first:
            met = at_s <= due_s
            self._ttft_s = at_s - self._arrival_s
            self._pace.begin(at_s)
        else:
            met = self._pace.add(at_s)
        cause = None
        if not met:
            cause = self._cause(decoded, first=first, alone=alone)
        if not met and not first:
            late_s = at_s - due_s
            self._late.append(Late(index=len(self._ids) - 1, late_s=late_s, cause=str(cause)))
        self._words.append(words)
        self._layers[decoded.exit_layer] += 1
        limited = math.isfinite(due_s)
        token = Token(
            stream=self.index,
            index=len(self._ids) - 1,
            id=decoded.token,
            text=words,
            exit_layer=decoded.exit_layer,
            depth_ratio=decoded.exit_layer / inputs.depth,
            budget_s=due_s - since_s if limited else None,
            predicted_s=decoded.predicted_s,
            observed_s=at_s - since_s,
            met=met if limited else None,
            feasible=decoded.feasible,
            reason=decoded.reason,
            cause=cause,
            finish=self.finish,
        )
        if self.finish:
            self.free()
        return token

    def _why_end(self, token: int) -> Finish | None:
        assert self._text is not None  # noqa: S101 - it goes on
        if token in self._in.stop_ids:
            return "stop_token"
        if self._in.wording.stopped:
            return "stop_text"
        if len(self._ids) == self._in.max_tokens:
            return "length"
        # Not what is left in the cache: one step may have given several tokens.
        held = len(self._in.prompt) - 1 + len(self._ids)
        return "context" if held >= self._text.cache.capacity else None

    def _cause(self, decoded: Decoded, *, first: bool, alone: bool) -> str:
        waited_for = "other texts" if not alone else "its caller"
        if first:
            waited_for = "the prompt" if alone else "the prompt and other texts"
            budget_s, floor_s = self._in.ttft_budget_s, self._ttft_floor_s()
            if budget_s < floor_s:
                return (
                    f"below the floor: prompt and soonest exit take {format_duration(floor_s)},"
                    f" {format_duration(budget_s)} was given"
                )
            # Whatever left no exit enough time, it was not the budget.
            decoded = dataclasses.replace(decoded, feasible=None)
        return late_cause(decoded, waited_for=waited_for)

    def _ttft_floor_s(self) -> float:
        prompt = len(self._in.prompt)
        read_s = self._rows_s(prompt - 1, after=0) if prompt > 1 else 0.0
        return read_s + self._in.floor_s * self._in.costs.factor(prompt)

    def pause(self, duration_s: float) -> None:
        """Leave out a time during which nobody asked for a token."""
        self._arrival_s += duration_s
        self._pace.pause(duration_s)

    def end(self, finish: Finish) -> None:
        """Stop here, if it goes on."""
        self.finish = self.finish or finish
        self.free()

    def free(self) -> None:
        """Give the cache back."""
        self._text = self._stepper = None

    def summary(self) -> Summary:
        """What became of it so far."""
        inputs, after = self._in, len(self._ids) - 1
        limited = math.isfinite(inputs.tpot_budget_s)
        ttft_limited = math.isfinite(inputs.ttft_budget_s)
        ttft_s, total = self._ttft_s, sum(k * n for k, n in self._layers.items())
        prompt = len(inputs.prompt)
        beside_s = statistics.median(self._overheads_s) if self._overheads_s else 0.0
        floor_s = inputs.floor_s * inputs.costs.factor(prompt) + beside_s
        return Summary(
            stream=self.index,
            text="".join(self._words),
            token_ids=tuple(self._ids),
            prompt_tokens=prompt,
            finish=self.finish,
            ttft_s=ttft_s,
            ttft_budget_s=inputs.ttft_budget_s if ttft_limited else None,
            ttft_met=None if ttft_s is None or not ttft_limited else ttft_s <= inputs.ttft_budget_s,
            ttft_floor_s=self._ttft_floor_s(),
            tpot_s=None
            if ttft_s is None or after < 1
            else (self._pace.last_s - self._arrival_s - ttft_s) / after,
            tpot_budget_s=inputs.tpot_budget_s if limited else None,
            window=inputs.window,
            dsr=1.0 - len(self._late) / after if limited and after > 0 else None,
            floor_s=floor_s,
            depth_histogram=dict(sorted(self._layers.items())),
            mean_depth=total / len(self._ids) if self._ids else None,
            late=tuple(self._late),
            kv=inputs.kv,
            provenance=inputs.costs.propagate.provenance,
        )
