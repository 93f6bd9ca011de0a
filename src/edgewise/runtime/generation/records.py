"""What a stream says of each token, and of itself at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from edgewise.model.decoding import KvPolicy
from edgewise.runtime.generation.pace import Window

# Why a text ended; None while it goes on. "closed": nobody wanted more.
Finish = Literal["stop_token", "stop_text", "length", "context", "closed", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One token of one stream.

    Attributes:
        stream: Which of the prompts, from 0.
        index: Place in the answer, from 0.
        id: Token id.
        text: What it adds to the text, in whole characters; may be empty while a character or a
            stop string is not decided.
        exit_layer: How many layers had run where it was answered.
        depth_ratio: The same as a share of all layers.
        budget_s: Time it had, from the token before it (the first: from its request), seconds;
            ``None`` without a budget.
        predicted_s: What its units were expected to take, seconds.
        observed_s: Time since the token before it, or its request, seconds.
        met: Whether it came in time; ``None`` without a budget.
        feasible: Whether any exit was predicted to fit when it began; ``None`` unknown.
        reason: Why it ended at that exit.
        cause: What it was late for; ``None`` when it was not.
        finish: Why the text ends with it; ``None`` while it goes on.
    """

    stream: int
    index: int
    id: int
    text: str
    exit_layer: int
    depth_ratio: float
    budget_s: float | None
    predicted_s: float
    observed_s: float
    met: bool | None
    feasible: bool | None
    reason: str
    cause: str | None = None
    finish: Finish | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """A token that came late.

    Attributes:
        index: Place in the answer.
        late_s: By how much, seconds.
        cause: What it was late for.
    """

    index: int
    late_s: float
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What became of one stream.

    Attributes:
        stream: Which of the prompts, from 0.
        text: All of it.
        token_ids: Its tokens.
        prompt_tokens: How many the prompt had.
        finish: Why it ended; ``None`` while it goes on.
        ttft_s: Time to the first token, seconds; ``None`` before it.
        ttft_budget_s: What it had; ``None`` without a budget.
        ttft_met: Whether it came in time; ``None`` without a budget or token.
        ttft_floor_s: What prompt and soonest exit were predicted to take, seconds.
        tpot_s: Mean time per token after the first, seconds; ``None`` for fewer than two.
        tpot_budget_s: What each had; ``None`` without a budget.
        window: Over how many tokens slack is carried.
        dsr: Share of tokens after the first that came in time; ``None`` without a budget or token.
        floor_s: Median of the soonest exit after the prompt, with what this text's tokens took
            beside their units, seconds: no budget below it can be kept.
        depth_histogram: Layers to tokens answered there.
        mean_depth: Layers, over all tokens.
        late: Tokens after the first that came late.
        kv: KV policy.
        provenance: Of the costs that decided.
    """

    stream: int
    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    finish: Finish | None
    ttft_s: float | None
    ttft_budget_s: float | None
    ttft_met: bool | None
    ttft_floor_s: float
    tpot_s: float | None
    tpot_budget_s: float | None
    window: Window
    dsr: float | None
    floor_s: float
    depth_histogram: Mapping[int, int] = field(default_factory=dict)
    mean_depth: float | None = None
    late: tuple[Late, ...] = ()
    kv: KvPolicy
    provenance: str = "measured"

    @property
    def tokens(self) -> int:
        """How many."""
        return len(self.token_ids)
