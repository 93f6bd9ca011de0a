"""A language model, its costs and a policy, ready to continue texts within budgets."""

from __future__ import annotations

import dataclasses
import math
import operator
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import numpy as np

from edgewise.clock import MonotonicClock
from edgewise.errors import ConfigError, Infeasible, nearest_names
from edgewise.exits import Policy, PolicyInputs, make_policy
from edgewise.runtime.generation.costs import (
    LanguageCosts,
    RowCosts,
    in_state,
    measure_rows,
)
from edgewise.runtime.generation.drafters import DraftMemory
from edgewise.runtime.generation.drawing import make_drawing
from edgewise.runtime.generation.generation import Generation
from edgewise.runtime.generation.pace import Window
from edgewise.runtime.generation.program import TokenProgram, staged_decoder
from edgewise.runtime.generation.speculation import exit_temperature
from edgewise.runtime.generation.state import TextState, check_kv
from edgewise.runtime.generation.stepping import (
    MakeStepper,
    RouterStepper,
    StepperInputs,
    VerifyStepper,
)
from edgewise.runtime.generation.stream import Stream, StreamInputs
from edgewise.runtime.generation.wording import Wording
from edgewise.runtime.request import Setting
from edgewise.units import check_budget_s, format_duration

if TYPE_CHECKING:
    from edgewise.backends.decoder.base import DecoderProgram, HeadKind
    from edgewise.clock import Clock
    from edgewise.device.state import StateSource
    from edgewise.model.decoding import KvPolicy
    from edgewise.predict import CostTable
    from edgewise.predict.state_costs import StateCosts

Messages = Sequence[Mapping[str, str]]
Prompt = str | Sequence[int] | Messages
OnInfeasible = Literal["run_anyway", "raise"]


class LanguageSession:
    """Continues texts within budgets; any number of threads may ask at once.

    Args:
        decoder: A loaded model; several sessions may share it.
        costs: Of its tokens, on its backend.
        policy: A name, or a policy made by `make_policy`; one that is made serves every KV policy.
        head: What answers at exits.
        rows: What several tokens cost in one pass; `warm_up` measures it where it is not given,
            and until then each is taken to cost as much as the first.
        clock: Tells time; the machine's monotonic clock by default.
        source: Who knows the device's state; `close` stops it, where it can be stopped.
        policy_options: The policy's own arguments.

    Raises:
        ConfigError: The costs are of another number of exits.
    """

    def __init__(  # noqa: PLR0913 - each is one choice
        self,
        decoder: DecoderProgram,
        costs: LanguageCosts,
        *,
        policy: str | Policy = "edgewise",
        head: HeadKind = "affine",
        rows: RowCosts | None = None,
        clock: Clock | None = None,
        source: StateSource | None = None,
        **policy_options: Any,
    ) -> None:
        if costs.propagate.num_exits != len(decoder.exit_layers):
            raise ConfigError(
                f"expected costs of {len(decoder.exit_layers)} exits, found"
                f" {costs.propagate.num_exits}"
            )
        if "on_infeasible" in policy_options:
            raise ConfigError(
                "what becomes of an infeasible budget is said by each request",
                help="pass on_infeasible to generate",
            )
        self.decoder, self.costs, self.head = decoder, costs, head
        self.model = staged_decoder(decoder, head=head)
        self.clock: Clock = clock or MonotonicClock()
        self.source = source
        table = costs.mask
        self.rows = rows or RowCosts.proportional(math.fsum(table.stage_s), float(table.head_s[-1]))
        self._measure = rows is None
        self._policy, self._options = policy, policy_options
        self._drafts = DraftMemory()
        self._state_costs: StateCosts | None = None
        self._lock = threading.Lock()
        self._settings = {"propagate": self._made_setting(costs.propagate)}

    def _setting(self, kv: KvPolicy | Literal["full_depth"]) -> Setting:
        """What requests under a KV policy have in common; made when the first one comes.

        Each has a policy to reprice, which would cost more than a token if all were.
        """
        with self._lock:
            if kv not in self._settings:
                if kv == "full_depth":
                    made = self._made_setting(self.costs.mask, policy="full_depth")
                else:
                    made = self._made_setting(self.costs.table(kv))
                    if self._state_costs is not None and made.policy is not self._policy:
                        made.policy.reprice(self.costs.under(kv, self._state_costs))
                self._settings[kv] = made
            return self._settings[kv]

    def _made_setting(self, table: CostTable, *, policy: str | None = None) -> Setting:
        known = [e.accuracy for e in self.model.exits]
        inputs = PolicyInputs(
            costs=table,
            accuracy=None if None in known else tuple(a for a in known if a is not None),
            temperatures=tuple(
                exit_temperature(self.decoder, k + 1, self.head) for k in range(len(known))
            ),
            segments=frozenset((k, k + 1) for k in range(len(known))),
        )
        made: Policy
        if policy is not None:
            made = make_policy(policy, inputs)
        elif isinstance(self._policy, str):
            made = make_policy(self._policy, inputs, **self._options)
        else:
            made = self._policy
        # A program of no text in particular; each stream puts its own in.
        program = TokenProgram(TextState(self.decoder, 1), model=self.model, head=self.head)
        return Setting.of(
            program,
            policy=made,
            costs=table,
            clock=self.clock,
            source=self.source,
            probability=False,
        )

    def policy(self, kv: KvPolicy = "propagate") -> Policy:
        """What decides under a KV policy."""
        return self._setting(kv).policy

    def reprice(self, costs: StateCosts) -> None:
        """Take over what a token's units cost in a new state of the device; off the request path.

        Growth with the text's length is kept.

        Args:
            costs: As predicted for the KV policy ``propagate`` after a text of the costs' length.
        """
        with self._lock:
            self._state_costs = costs
            used = list(self._settings.items())
        if isinstance(self._policy, Policy):
            self._policy.reprice(costs)  # one for all: heads with what ``propagate`` does
            return
        for kv, setting in used:
            if kv != "full_depth":
                setting.policy.reprice(self.costs.under(check_kv(kv), costs))

    def warm_up(self) -> float:
        """Run what requests will run, and measure what several tokens cost in one pass.

        Returns:
            Seconds it took.
        """
        start_s = self.clock.now_s()
        rows = measure_rows(self.decoder, self.clock)
        if self._measure:
            self.rows = rows
        for position in range(1, len(self.decoder.exit_layers)):
            text = TextState(self.decoder, 1)
            state = text.run(self.decoder.embed([0]), start=0, stop=position)
            self.decoder.logits(state, position=position, kind=self.head)
            text.leave(state, position=position)
        return self.clock.now_s() - start_s

    def close(self) -> None:
        """Stop what watches the device for this session; without one, nothing is open."""
        stop = getattr(self.source, "stop", None)
        if stop is not None:
            stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def floor_s(self, *, after: int = 1, kv: KvPolicy = "propagate") -> float:
        """Median of a token at its soonest exit after some tokens: no budget below can be kept.

        With a predictor, the median in the device's present state.
        """
        if kv == "verify":
            return self.full_depth_s(after=after)
        table = in_state(self.costs.table(kv), self.policy(kv).unit_costs())
        soonest = min(table.remaining_s(0, k) for k in range(table.num_exits))
        return soonest * self.costs.factor(after)

    def full_depth_s(self, *, after: int = 1) -> float:
        """Median of a token at full depth after some tokens, as `floor_s`."""
        table = in_state(self.costs.mask, self.policy().unit_costs())
        return table.remaining_s(0, table.num_exits - 1) * self.costs.factor(after)

    def generate(  # noqa: PLR0913 - one keyword per choice a user may make
        self,
        prompt: Prompt,
        *,
        tpot_budget_s: float | None = None,
        ttft_budget_s: float | None = None,
        max_tokens: int = 256,
        stop: Sequence[str] = (),
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        chat: bool = False,
        kv: KvPolicy = "propagate",
        window: Window = 1,
        exact: bool = False,
        on_infeasible: OnInfeasible = "run_anyway",
        arrival_s: float | None = None,
        stepper: MakeStepper | None = None,
    ) -> Generation:
        """Continue one text.

        Args:
            prompt: Text, token ids, or a conversation of messages with ``role`` and ``content``.
            tpot_budget_s: Time per output token, seconds; ``None`` for none. A token's time begins
                when the one before it came, or when it was asked for if that is later.
            ttft_budget_s: Time to the first token, from the first time one is asked for; what is
                left after the prompt decides its depth.
            max_tokens: Tokens at most.
            stop: Strings that end the text.
            temperature: 0 takes the most likely token.
            top_p: Draw only from the most likely tokens that together reach this chance.
            seed: Of chance.
            chat: Put the prompt into the model's chat template as a user's message.
            kv: What a token that leaves early leaves in deeper layers: ``"propagate"``,
                ``"mask"``, ``"defer"``; with ``"verify"`` none does, exits only draft.
            window: Tokens over which time is carried on that others did not need; 1 or
                ``"strict"`` for none.
            exact: The same as ``kv="verify"``: what full depth would say, in less time where
                drafts pay.
            on_infeasible: What becomes of budgets that not even the soonest exit is predicted to
                keep: ``"raise"``, or run and say so with each token.
            arrival_s: When the request arrived, on the session's clock; when the first token is
                asked for by default.
            stepper: Another way to get the next tokens.

        Returns:
            Tokens as they come; its ``summary`` tells at any time what became of the text.

        Raises:
            ConfigError: An empty prompt, one longer than the model reads, or an argument out of
                range.
            DataError: A prompt that is no text.
            ModelError: The model has no tokenizer or no chat template.
            Infeasible: A budget below the floor, which ``closest`` is, seconds; on request only.
        """
        return self.generate_batch(
            [prompt],
            tpot_budget_s=tpot_budget_s,
            ttft_budget_s=ttft_budget_s,
            max_tokens=max_tokens,
            stop=stop,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            chat=chat,
            kv=kv,
            window=window,
            exact=exact,
            on_infeasible=on_infeasible,
            arrival_s=arrival_s,
            stepper=stepper,
        )

    def generate_batch(  # noqa: PLR0913 - as generate
        self,
        prompts: Sequence[Prompt],
        *,
        tpot_budget_s: float | Sequence[float | None] | None = None,
        ttft_budget_s: float | Sequence[float | None] | None = None,
        max_tokens: int | Sequence[int] = 256,
        stop: Sequence[str] = (),
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        chat: bool = False,
        kv: KvPolicy = "propagate",
        window: Window = 1,
        exact: bool = False,
        on_infeasible: OnInfeasible = "run_anyway",
        arrival_s: float | None = None,
        stepper: MakeStepper | None = None,
    ) -> Generation:
        """Continue several texts in turn, each with its own budget; waiting for others counts.

        Args:
            prompts: At least one; as long as each is.
            tpot_budget_s: One for all, or one for each.
            ttft_budget_s: The same.
            max_tokens: The same.
            stop: As for `generate`, like all that follow.
            temperature: See there.
            top_p: See there.
            seed: Each text draws from a generator of its own.
            chat: See there.
            kv: See there.
            window: See there.
            exact: See there.
            on_infeasible: See there.
            arrival_s: See there.
            stepper: See there.

        Returns:
            Tokens of all texts as they come; ``token.stream`` says whose, ``summaries`` what
            became of each.

        Raises:
            As `generate`, and ConfigError for no prompt or another number of budgets.
        """
        kv = "verify" if exact else check_kv(kv)
        _check_options(stop, seed, on_infeasible)
        ids = [self._prompt(prompt, chat=chat) for prompt in prompts]
        if not ids:
            raise ConfigError("expected at least one prompt, found none")
        tpots = [_budget(b) for b in _each(tpot_budget_s, len(ids), "time-per-token budgets")]
        ttfts = [_budget(b) for b in _each(ttft_budget_s, len(ids), "first-token budgets")]
        most = _each(max_tokens, len(ids), "numbers of tokens")
        streams = []
        for i, prompt in enumerate(ids):
            rng = np.random.default_rng((seed, i))
            drawing = make_drawing(temperature=temperature, top_p=top_p, rng=rng)
            text = self._text(prompt, most[i], kv)
            setting = self._setting(kv)
            tokenizer = self.decoder.model.tokenizer
            stop_ids = frozenset() if tokenizer is None else tokenizer.stop_ids
            inputs = StepperInputs(
                text=text,
                setting=setting,
                costs=self.costs,
                rows=self.rows,
                drawing=drawing,
                head=self.head,
                stop_ids=stop_ids,
                prompt=prompt,
                memory=self._drafts,
            )
            streams.append(
                Stream(
                    StreamInputs(
                        index=i,
                        prompt=prompt,
                        max_tokens=most[i],
                        tpot_budget_s=tpots[i],
                        ttft_budget_s=ttfts[i],
                        window=window,
                        kv=kv,
                        depth=self.decoder.depth,
                        wording=Wording(self._decode, stop),
                        stop_ids=stop_ids,
                        policy=setting.policy,
                        costs=self.costs,
                        rows=self.rows,
                        floor_s=self.floor_s(kv=kv) / self.costs.factor(1),
                        clock=self.clock,
                    ),
                    text=text,
                    stepper=(stepper or self._stepper)(inputs),
                )
            )
            if on_infeasible == "raise":
                self._check_feasible(streams[-1], tpots[i], ttfts[i], kv)
        return Generation(streams, self.clock, arrival_s=arrival_s)

    def _stepper(self, inputs: StepperInputs) -> RouterStepper | VerifyStepper:
        if inputs.text.kv != "verify":
            return RouterStepper(inputs)
        if len(self.decoder.exit_layers) > 1:
            return VerifyStepper(inputs)
        return self.full_depth(inputs)

    def full_depth(self, inputs: StepperInputs) -> RouterStepper:
        """A stepper that runs every token through all layers, whatever the budget: a baseline."""
        setting = self._setting("full_depth")
        return RouterStepper(dataclasses.replace(inputs, setting=setting))

    def _text(self, prompt: Sequence[int], max_tokens: int, kv: KvPolicy) -> TextState:
        if type(max_tokens) is not int or max_tokens < 1:
            raise ConfigError(f"expected at least one token to generate, found {max_tokens!r}")
        room = self.decoder.model.context_length
        if len(prompt) > room:
            raise ConfigError(
                f"the prompt has {len(prompt)} tokens, and model {self.model.name!r} reads at most"
                f" {room}",
                help="shorten the prompt",
            )
        return TextState(self.decoder, min(len(prompt) - 1 + max_tokens, room), kv=kv)

    def _prompt(self, prompt: Prompt, *, chat: bool) -> list[int]:
        tokenizer = self.decoder.model.tokenizer
        empty = ConfigError("the prompt is empty", help="give at least one word, or a token id")
        if not isinstance(prompt, Collection):
            raise ConfigError(
                f"expected a prompt, found {prompt!r}",
                help="give text, token ids, or messages with a role and content",
            )
        if not len(prompt):
            raise empty
        if isinstance(prompt, str) or isinstance(prompt[0], Mapping):
            if tokenizer is None:
                raise ConfigError(
                    f"model {self.model.name!r} has no tokenizer",
                    help="give the prompt as token ids",
                )
            if isinstance(prompt, str) and not chat:
                ids = tokenizer.encode(prompt)
            else:
                said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
                ids = tokenizer.chat(said)  # type: ignore[arg-type]  # no ids: the first is none
        else:
            ids = _whole(prompt)
        size = self.decoder.model.architecture.vocab_size
        wrong = next((i for i in ids if not 0 <= i < size), None)
        if wrong is not None:
            raise ConfigError(f"expected token ids of 0 to {size - 1}, found {wrong}")
        if not ids:
            raise empty
        return ids

    def _decode(self, ids: Sequence[int]) -> str:
        tokenizer = self.decoder.model.tokenizer
        return "" if tokenizer is None else tokenizer.decode(ids)

    def _check_feasible(self, stream: Stream, tpot_s: float, ttft_s: float, kv: KvPolicy) -> None:
        told = stream.summary()
        policy, factor = self.policy(kv), self.costs.factor(told.prompt_tokens)
        fits = policy.feasible(tpot_s / factor)
        if kv == "verify" or fits is None:
            fits = tpot_s >= told.floor_s
        floors = [
            (tpot_s, told.floor_s, fits, "time-per-token"),
            (ttft_s, told.ttft_floor_s, ttft_s >= told.ttft_floor_s, "first-token"),
        ]
        for budget_s, floor_s, keeps, name in floors:
            if not keeps:
                raise Infeasible(
                    f"expected a {name} budget that the soonest exit can keep, found"
                    f" {format_duration(budget_s)}; its median is {format_duration(floor_s)}, and"
                    " a margin comes on top",
                    closest=floor_s,
                    help="give more time, or allow earlier exits",
                )


def _whole(ids: Sequence[Any]) -> list[int]:
    try:
        return [operator.index(i) for i in ids]
    except TypeError:
        raise ConfigError(f"expected token ids, found {ids!r:.80}") from None


def _check_options(stop: Any, seed: Any, on_infeasible: str) -> None:
    if isinstance(stop, str) or not all(isinstance(text, str) for text in stop):
        raise ConfigError(f"expected a list of stop strings, found {stop!r}")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ConfigError(f"expected a seed from 0 on, found {seed!r}")
    if on_infeasible not in get_args(OnInfeasible):
        raise ConfigError(
            f"unknown outcome {on_infeasible!r} for a budget that no exit can meet",
            help=nearest_names(str(on_infeasible), get_args(OnInfeasible)),
        )


def _each(value: Any, count: int, what: str) -> list[Any]:
    if value is None or isinstance(value, int | float | str):
        return [value] * count
    if len(value) != count:
        raise ConfigError(
            f"expected {count} {what}, found {len(value)}",
            help="pass one for all prompts, or one for each",
        )
    return list(value)


def _budget(budget_s: float | None) -> float:
    return math.inf if budget_s is None else check_budget_s(budget_s)
