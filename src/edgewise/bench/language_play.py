"""Play prompts to ways of decoding, and score each beside full depth's texts."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from edgewise.bench.language_quality import Tokens, compare_texts, token_losses
from edgewise.errors import ShapeError
from edgewise.report.records import wilson_interval

if TYPE_CHECKING:
    from edgewise.backends.decoder.base import DecoderProgram
    from edgewise.model.decoding import KvPolicy
    from edgewise.runtime.generation.pace import Window
    from edgewise.runtime.generation.records import Summary, Token
    from edgewise.runtime.generation.session import LanguageSession
    from edgewise.runtime.generation.stepping import MakeStepper


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way of decoding as it is compared.

    Attributes:
        name: In tables.
        stepper: ``None`` for the session's own router.
        kv: What a token that leaves early leaves in deeper layers.
        window: Over how many tokens slack is carried.
    """

    name: str
    stepper: MakeStepper | None = None
    kv: KvPolicy = "propagate"
    window: Window = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """What a way made of one prompt.

    Attributes:
        prompt: Token ids.
        tokens: As they came.
        summary: What the session said at the end.
    """

    prompt: tuple[int, ...]
    tokens: tuple[Token, ...]
    summary: Summary

    @property
    def ids(self) -> tuple[int, ...]:
        """Token ids of the answer."""
        return self.summary.token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class TextJudgement:
    """A text read by the model at full depth.

    Attributes:
        agreement: Share of its tokens that full depth would have said too after the same text:
            unlike relative accuracy, one early difference does not spoil what follows.
        loss: Mean -log p of its tokens, nats.
    """

    agreement: float
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageRow:
    """One way under one budget.

    Attributes:
        name: Of the way.
        budget_s: Per token after the first, seconds; ``None`` for none.
        texts: How many.
        tokens: Of them all.
        dsr: Share of tokens after the first that came in time; ``None`` without a budget.
        relative_accuracy: Mean over texts, position by position against full depth.
        agreement: Mean over texts of `TextJudgement.agreement`.
        identical: Share of texts that are full depth's throughout.
        first_divergence: Median over texts that differ; ``None`` where none does.
        perplexity: Of its texts under full depth.
        mean_depth_ratio: Of all tokens, as a share of the layers.
        tpot_p50_s: Median time per token after the first, seconds.
        tpot_p99_s: And the 99th percentile.
        depths: Layers to tokens.
        dsr_low: Lower end of the 95 % interval of ``dsr``, as if tokens were independent.
        dsr_high: Upper end.
    """

    name: str
    budget_s: float | None
    texts: int
    tokens: int
    dsr: float | None
    relative_accuracy: float
    agreement: float
    identical: float
    first_divergence: float | None
    perplexity: float
    mean_depth_ratio: float
    tpot_p50_s: float
    tpot_p99_s: float
    depths: dict[int, int]
    dsr_low: float | None = None
    dsr_high: float | None = None


def play(
    session: LanguageSession,
    prompt: Sequence[int],
    way: Way,
    *,
    budget_s: float | None,
    max_tokens: int,
) -> Text:
    """Let one way continue one prompt, greedily."""
    generation = session.generate(
        list(prompt),
        tpot_budget_s=budget_s,
        max_tokens=max_tokens,
        kv=way.kv,
        window=way.window,
        stepper=way.stepper,
    )
    with generation:
        tokens = tuple(generation)
        return Text(prompt=tuple(prompt), tokens=tokens, summary=generation.summary)


def play_in_turns(  # noqa: PLR0913 - a comparison's whole circumstances
    session: LanguageSession,
    prompts: Sequence[Sequence[int]],
    ways: Sequence[Way],
    *,
    budgets_s: Sequence[float | None],
    max_tokens: int,
    say: Callable[[str], None] = lambda _: None,
) -> dict[tuple[str, float | None], list[Text]]:
    """Every way continues every prompt under every budget, in turns.

    What disturbs the machine disturbs all alike; texts stand in the prompts' order.
    """
    found: dict[tuple[str, float | None], list[Text]] = {}
    for i, prompt in enumerate(prompts):
        say(f"text {i + 1} of {len(prompts)}")
        for budget_s in budgets_s:
            for way in ways:
                text = play(session, prompt, way, budget_s=budget_s, max_tokens=max_tokens)
                found.setdefault((way.name, budget_s), []).append(text)
    return found


def with_budget(text: Text, budget_s: float) -> Text:
    """A text that was made without a budget, its tokens measured by one.

    What knows no deadline makes the same text whatever the budget, and need not run for each.
    """
    tokens = tuple(
        dataclasses.replace(t, budget_s=budget_s, met=t.observed_s <= budget_s) if t.index else t
        for t in text.tokens
    )
    return Text(
        prompt=text.prompt,
        tokens=tokens,
        summary=dataclasses.replace(text.summary, tpot_budget_s=budget_s),
    )


def judge(decoder: DecoderProgram, text: Text) -> TextJudgement:
    """Let the model read a text in one pass at full depth.

    Args:
        decoder: In full precision, whichever made the text.
        text: Its first token is judged after the prompt.

    Raises:
        ShapeError: No token.
    """
    if not text.ids:
        raise ShapeError("expected a text with tokens, found none")
    read = (*text.prompt, *text.ids)[:-1]
    last = len(decoder.exit_layers)
    cache = decoder.new_cache(len(read))
    hidden = decoder.run_layers(decoder.embed(read), cache, start=0, stop=last, first=0)
    logits = decoder.logits(hidden[len(text.prompt) - 1 :], position=last)
    ids = np.array(text.ids)
    return TextJudgement(
        agreement=float((logits.argmax(axis=1) == ids).mean()),
        loss=float(token_losses(logits, ids).mean()),
    )


def score(  # noqa: PLR0913 - what is scored, against what
    texts: Sequence[Text],
    reference: Sequence[Tokens],
    *,
    name: str,
    decoder: DecoderProgram,
    depth: int,
    judged: Sequence[TextJudgement] | None = None,
) -> LanguageRow:
    """Summarise one way's texts under one budget.

    Args:
        texts: In the prompts' order.
        reference: Full depth's token ids for the same prompts.
        name: Of the way.
        decoder: Judges, unless ``judged`` is given; see `judge`.
        depth: L.
        judged: One for each text.

    Raises:
        ShapeError: Another number of texts than of the reference's, or none.
    """
    quality = compare_texts([t.ids for t in texts], reference)
    judged = [judge(decoder, t) for t in texts] if judged is None else judged
    later = [t for text in texts for t in text.tokens if t.index]
    met = [t.met for t in later if t.met is not None]
    layers = Counter(t.exit_layer for text in texts for t in text.tokens)
    taken = [t.observed_s for t in later] or [math.nan]
    count = sum(layers.values())
    dsr = sum(met) / len(met) if met else None
    low, high = (None, None) if dsr is None else wilson_interval(dsr, len(met))
    return LanguageRow(
        name=name,
        budget_s=texts[0].summary.tpot_budget_s,
        texts=len(texts),
        tokens=count,
        dsr=dsr,
        relative_accuracy=quality.relative_accuracy,
        agreement=math.fsum(j.agreement for j in judged) / len(judged),
        identical=quality.identical,
        first_divergence=quality.first_divergence,
        perplexity=math.exp(math.fsum(j.loss for j in judged) / len(judged)),
        mean_depth_ratio=sum(k * n for k, n in layers.items()) / (count * depth),
        tpot_p50_s=float(np.quantile(taken, 0.5)),
        tpot_p99_s=float(np.quantile(taken, 0.99)),
        depths=dict(sorted(layers.items())),
        dsr_low=low,
        dsr_high=high,
    )


def as_json(row: LanguageRow) -> dict[str, object]:
    """As plain types."""
    return dataclasses.asdict(row)
