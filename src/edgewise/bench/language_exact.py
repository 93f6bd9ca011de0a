"""Exact mode beside full depth: whether its texts are the same, and what every way to draft gains.

Texts are played in turns and compared token for token. Since exact texts are full depth's, how
often an exit's drafts hold, and how many tokens cycles of any number of drafts would have given, is
then read off full depth's texts in one pass each, for all exits and heads. What cycles cost is
timed in turns with single tokens at full depth, whatever they yield.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgewise.bench.language_play import Text, Way, play_in_turns
from edgewise.bench.language_quality import first_divergence
from edgewise.errors import ConfigError, DataError
from edgewise.report.evaluation import Estimate
from edgewise.runtime.generation.costs import measure_rows
from edgewise.runtime.generation.drafters import (
    Repeats,
    draft_costs,
    draft_head_s,
    draft_heads,
)
from edgewise.runtime.generation.drafting import (
    DraftCosts,
    break_even_acceptance,
    speed_up_of_counts,
)
from edgewise.runtime.generation.speculation import speculate, verify
from edgewise.runtime.generation.stepping import VerifyStepper

if TYPE_CHECKING:
    from edgewise.backends.decoder.base import DecoderProgram, HeadKind
    from edgewise.model.decoding import KvCache
    from edgewise.runtime.generation.costs import RowCosts
    from edgewise.runtime.generation.session import LanguageSession
    from edgewise.runtime.generation.stepping import Decoded, MakeStepper, Stepper, StepperInputs
    from edgewise.training.language_text import TokenText

Bool = npt.NDArray[np.bool_]
Float64 = npt.NDArray[np.float64]
Say = Callable[[str], None]

_RESAMPLES = 2000
_ROWS = (1, 2, 3, 4)
_EARLY = 0.25
# Exits whose heads are whole are asked on so many texts; the short list on all.
_WHOLE_HEAD_TEXTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactSettings:
    """How much is measured.

    Attributes:
        max_tokens: Of each text.
        drafts: Numbers of drafts that every drafter is timed with.
        turns: Times that each cycle is timed.
        seed: Of resampling.

    Raises:
        ConfigError: Not at least one of each, or of drafts.
    """

    max_tokens: int = 64
    drafts: tuple[int, ...] = (1, 2, 3)
    turns: int = 12
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.drafts or min(self.max_tokens, self.turns, *self.drafts) < 1:
            raise ConfigError(f"expected at least one token, turn and draft, found {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRow:
    """One way to draft, with one number of drafts.

    Attributes:
        layer: After how many layers; ``None`` for the text itself.
        head: That drafts; ``None`` for the text itself.
        drafts: In each cycle.
        offered: Share of tokens for which there was a draft.
        acceptance: Share of those whose draft held.
        tokens_per_cycle: Where there was a draft, on full depth's texts.
        break_even: Acceptance that would be needed at the measured cost; above 1 for never.
        cycle_ratio: Measured time of a cycle over that of a token at full depth, median.
        expected: Speed-up that costs known beforehand would have promised, where it drafts.
        speed_up: Measured, where it drafts: tokens of a cycle over its ratio.
    """

    layer: int | None
    head: HeadKind | None
    drafts: int
    offered: float
    acceptance: float
    tokens_per_cycle: float
    break_even: float
    cycle_ratio: float
    expected: float
    speed_up: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where an exact text left full depth's.

    Attributes:
        text: Which.
        index: Of the token.
        gap: By how much full depth's logit is ahead in a pass over the whole text; near 0, the
            two tokens are tied but for rounding. NaN where one text ends and the other goes on.
    """

    text: int
    index: int
    gap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactResult:
    """Exact mode beside full depth.

    Attributes:
        texts: How many.
        tokens: Of full depth.
        tokens_equal: Share of positions with the same token.
        differences: Where texts part; none in full precision.
        tokens_per_cycle: That exact mode gave.
        speed_up: Of exact mode as it adapts, after the first token of each text, over all.
        speed_up_early: The same over the first quarter of each text, which repeats itself least.
        layer_ratios: Rows in one pass to the layers' time over that of one row.
        head_ratios: The same of the last head.
        rows: Every way to draft; their intervals are of 95 %.
    """

    texts: int
    tokens: int
    tokens_equal: float
    differences: tuple[Difference, ...]
    tokens_per_cycle: float
    speed_up: Estimate
    speed_up_early: Estimate
    layer_ratios: Mapping[int, float]
    head_ratios: Mapping[int, float]
    rows: tuple[DraftRow, ...]

    def best(self) -> DraftRow:
        """The fastest way to draft, as measured."""
        return max(self.rows, key=lambda row: row.speed_up.value)


def held_out_prompts(
    texts: Sequence[TokenText],
    *,
    count: int = 50,
    shortest: int = 24,
    longest: int = 48,
    seed: int = 0,
) -> list[list[int]]:
    """Pieces of the last tenth of each text in turn, which exits are not fitted on.

    Args:
        texts: As tokens.
        count: Of prompts.
        shortest: Tokens of a prompt.
        longest: The same.
        seed: Of places and lengths.

    Raises:
        DataError: There is no text, or one whose last tenth is shorter than a prompt.
    """
    tails = [t.tokens[len(t.tokens) - len(t.tokens) // 10 :] for t in texts]
    if not tails or min(len(tail) for tail in tails) < longest:
        raise DataError(
            f"expected texts whose last tenth has at least {longest} tokens, found"
            f" {[len(tail) for tail in tails]}"
        )
    rng = np.random.default_rng(seed)
    found = []
    for _, tail in zip(range(count), itertools.cycle(tails), strict=False):
        length = int(rng.integers(shortest, longest + 1))
        start = int(rng.integers(len(tail) - length + 1))
        found.append([int(t) for t in tail[start : start + length]])
    return found


def run_exact(
    session: LanguageSession,
    prompts: Sequence[Sequence[int]],
    *,
    settings: ExactSettings | None = None,
    stepper: MakeStepper | None = None,
    say: Say = lambda _: None,
) -> ExactResult:
    """Play exact mode beside full depth, and measure every way to draft.

    Args:
        session: A decoder with exits before the last, and its costs.
        prompts: Token ids.
        settings: How much is measured.
        stepper: Another exact way than the session's own.
        say: Told what is being done.

    Raises:
        ConfigError: No prompt, or no exit before the last.
    """
    settings = settings or ExactSettings()
    decoder = session.decoder
    if not prompts or len(decoder.exit_layers) < 2:
        raise ConfigError(
            f"expected prompts and exits that may draft, found {len(prompts)} prompts and exits"
            f" {list(decoder.exit_layers)}"
        )
    cycles = 0

    def counted(inputs: StepperInputs) -> Stepper:
        return _Counted((stepper or VerifyStepper)(inputs), count)

    def count() -> None:
        nonlocal cycles
        cycles += 1

    ways = [
        Way(name="full", stepper=session.full_depth),
        Way(name="exact", stepper=counted, kv="verify"),
    ]
    played = play_in_turns(
        session, prompts, ways, budgets_s=[None], max_tokens=settings.max_tokens, say=say
    )
    full, exact = played["full", None], played["exact", None]
    rng = np.random.default_rng(settings.seed)
    say("what exits would have drafted")
    holds = _holds(decoder, full, draft_heads(decoder, session.head), max(settings.drafts))
    say("rows in one pass")
    rows = measure_rows(decoder, session.clock, rows=_ROWS, repeats=settings.turns)
    say("cycles of every draft")
    timed = _time_cycles(session, full, list(holds), settings)
    return ExactResult(
        texts=len(full),
        tokens=sum(len(t.ids) for t in full),
        tokens_equal=_share_equal(full, exact),
        differences=tuple(_differences(decoder, full, exact)),
        tokens_per_cycle=sum(len(t.ids) for t in exact) / cycles,
        speed_up=_played_ratio(full, exact, rng=rng),
        speed_up_early=_played_ratio(full, exact, rng=rng, share=_EARLY),
        layer_ratios={m: rows.ratio(m) for m in _ROWS},
        head_ratios={m: rows.head(m) / rows.head(1) for m in _ROWS},
        rows=tuple(
            _row(
                key,
                drafts,
                held=held,
                ratios=timed[key, drafts],
                costs=_known_costs(session, rows, key),
                rng=rng,
            )
            for key, held in holds.items()
            for drafts in settings.drafts
        ),
    )


def as_json(result: ExactResult) -> dict[str, Any]:
    """As plain types."""
    return dataclasses.asdict(result)


class _Counted:
    """Tells of every step of another."""

    def __init__(self, stepper: Stepper, tell: Callable[[], None]) -> None:
        self._stepper, self._tell = stepper, tell

    def step(self, token: int, *, since_s: float, due_s: float) -> Sequence[Decoded]:
        self._tell()
        return self._stepper.step(token, since_s=since_s, due_s=due_s)


# An exit's layer and head; ``None`` for the text itself.
_Key = tuple[int, "HeadKind"] | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Held:
    """Which drafts would have held.

    Attributes:
        offered: For each text [N], whether there is a draft of token n.
        run: For each text [N, most], whether the drafts of tokens n, n + 1, ... made together hold.
    """

    offered: list[Bool]
    run: list[Bool]

    def accepted(self, drafts: int) -> list[int]:
        """Of each cycle, how many drafts would have held, cycle after cycle where there are any."""
        counts = []
        for offered, run in zip(self.offered, self.run, strict=True):
            place = 0
            while place < len(offered):
                held = 0
                if offered[place]:
                    held = int(np.logical_and.accumulate(run[place, :drafts]).sum())
                    counts.append(held)
                place += held + 1
        return counts


def _holds(
    decoder: DecoderProgram, texts: Sequence[Text], heads: Sequence[HeadKind], most: int
) -> dict[_Key, _Held]:
    found: dict[_Key, _Held] = {None: _repeats_hold(texts, most)}
    for kind in heads:
        some = texts if kind == "shortlist" else texts[:_WHOLE_HEAD_TEXTS]
        agree: dict[int, list[Bool]] = {}
        for text in some:
            for layer, agrees in _agreement(decoder, text, kind).items():
                agree.setdefault(layer, []).append(agrees)
        for layer, each in agree.items():
            offered = [np.ones(len(a), dtype=bool) for a in each]
            # A draft after drafts that held is what the exit says after full depth's own text.
            run = [np.stack([_shifted(a, d) for d in range(most)], axis=1) for a in each]
            found[layer, kind] = _Held(offered=offered, run=run)
    return found


def _shifted(values: Bool, by: int) -> Bool:
    return np.concatenate([values[by:], np.zeros(min(by, len(values)), dtype=bool)])


def _agreement(decoder: DecoderProgram, text: Text, kind: HeadKind) -> dict[int, Bool]:
    """At each exit before the last, which of a text's tokens it would have drafted."""
    read = (*text.prompt, *text.ids)[:-1]
    cache, states, ids = decoder.new_cache(len(read)), decoder.embed(read), np.array(text.ids)
    found = {}
    for position in range(1, len(decoder.exit_layers)):
        states = decoder.run_layers(states, cache, start=position - 1, stop=position, first=0)
        logits = decoder.logits(states[len(text.prompt) - 1 :], position=position, kind=kind)
        found[decoder.layers_at(position)] = logits.argmax(axis=1) == ids
    return found


def _repeats_hold(texts: Sequence[Text], most: int) -> _Held:
    offered, runs = [], []
    for text in texts:
        repeats, run = Repeats(text.prompt), np.zeros((len(text.ids), most), dtype=bool)
        some = np.zeros(len(text.ids), dtype=bool)
        for i, token in enumerate(text.ids):
            match, proposed = repeats.propose(most)
            some[i] = match > 0
            for d, (a, b) in enumerate(zip(proposed, text.ids[i:], strict=False)):
                run[i, d] = a == b
            repeats.add([token])
        offered.append(some)
        runs.append(run)
    return _Held(offered=offered, run=runs)


def _time_cycles(
    session: LanguageSession,
    texts: Sequence[Text],
    keys: Sequence[_Key],
    settings: ExactSettings,
) -> dict[tuple[_Key, int], Float64]:
    """Cycles' times over those of a token at full depth in the same turn, [turns]."""
    decoder, clock = session.decoder, session.clock
    found: dict[tuple[_Key, int], list[float]] = {}
    for turn in range(settings.turns + 1):
        text = texts[turn % len(texts)]
        cache, token = _half_read(decoder, text, room=1 + max(settings.drafts))

        def seconds(key: _Key, drafts: int, cache: KvCache = cache, token: int = token) -> float:
            length, start_s = cache.length, clock.now_s()
            if key is None:
                verify(decoder, cache, token, [token] * drafts)
            else:
                position = decoder.exit_layers.index(key[0]) + 1
                speculate(decoder, cache, token, position=position, drafts=drafts, kind=key[1])
            took_s = clock.now_s() - start_s
            cache.crop(length)
            return took_s

        for key, drafts in itertools.product(keys, settings.drafts):
            # Full depth on both sides, so that a drift of the machine's speed cancels.
            around = [seconds(None, 0)]
            took_s = seconds(key, drafts)
            around.append(seconds(None, 0))
            if turn:  # the first turn warms up
                found.setdefault((key, drafts), []).append(took_s / statistics.fmean(around))
    return {which: np.array(ratios) for which, ratios in found.items()}


def _half_read(decoder: DecoderProgram, text: Text, *, room: int) -> tuple[KvCache, int]:
    """A cache that holds a prompt and half of the answer, and the token that comes next."""
    read = [*text.prompt, *text.ids[: len(text.ids) // 2]]
    cache = decoder.new_cache(len(read) + room)
    if len(read) > 1:
        last = len(decoder.exit_layers)
        decoder.run_layers(decoder.embed(read[:-1]), cache, start=0, stop=last, first=0)
    cache.length = len(read) - 1
    return cache, read[-1]


def _row(  # noqa: PLR0913 - what a row is made from
    key: _Key,
    drafts: int,
    *,
    held: _Held,
    ratios: Float64,
    costs: DraftCosts,
    rng: np.random.Generator,
) -> DraftRow:
    counts = held.accepted(drafts)
    offered = np.concatenate(held.offered)
    firsts = np.concatenate([run[:, 0] for run in held.run])[offered]
    tokens = statistics.fmean(counts) + 1 if counts else 1.0
    cycle = float(np.median(ratios))
    drawn = np.median(ratios[rng.integers(0, len(ratios), (_RESAMPLES, len(ratios)))], axis=1)
    yields = np.array(counts or [0])
    chosen = rng.integers(0, len(yields), (_RESAMPLES, len(yields)))
    low, high = np.quantile((yields[chosen].mean(axis=1) + 1) / drawn, [0.025, 0.975])
    needed = DraftCosts(early_s=0.0, draft_head_s=0.0, verify_s=(1.0, *[cycle] * drafts))
    return DraftRow(
        layer=None if key is None else key[0],
        head=None if key is None else key[1],
        drafts=drafts,
        offered=float(offered.mean()),
        acceptance=float(firsts.mean()) if len(firsts) else 0.0,
        tokens_per_cycle=tokens,
        break_even=break_even_acceptance(needed, drafts),
        cycle_ratio=cycle,
        expected=speed_up_of_counts(counts or [0], drafts, costs),
        speed_up=Estimate(value=tokens / cycle, low=float(low), high=float(high)),
    )


def _known_costs(session: LanguageSession, rows: RowCosts, key: _Key) -> DraftCosts:
    table = session.costs.table("verify")
    if key is None:
        return draft_costs(table, rows, 0, head_s=0.0)
    layer, kind = key
    position = session.decoder.exit_layers.index(layer) + 1
    head_s = draft_head_s(session.decoder, table, position, kind, measured=session.head)
    return draft_costs(table, rows, position, head_s=head_s)


def _played_ratio(
    full: Sequence[Text], exact: Sequence[Text], *, rng: np.random.Generator, share: float = 1.0
) -> Estimate:
    """Time per token at full depth over that of exact mode, with texts resampled in pairs."""
    taken = np.array([[_spent(t, share) for t in way] for way in (full, exact)])  # [2, N, 2]
    chosen = rng.integers(0, len(full), (_RESAMPLES, len(full)))
    sums = taken[:, chosen].sum(axis=2)  # [2, R, 2]
    drawn = _per_token(sums[0]) / _per_token(sums[1])
    whole = taken.sum(axis=1)
    low, high = np.nanquantile(drawn, [0.025, 0.975])
    value = float(_per_token(whole[0]) / _per_token(whole[1]))
    return Estimate(value=value, low=float(low), high=float(high))


def _spent(text: Text, share: float) -> tuple[float, int]:
    """Seconds and tokens after the first, up to a share of a text."""
    some = text.tokens[1 : max(2, math.ceil(len(text.tokens) * share))]
    return math.fsum(t.observed_s for t in some), len(some)


def _per_token(sums: Float64) -> Float64:
    with np.errstate(invalid="ignore"):
        return np.asarray(sums[..., 0] / sums[..., 1])


def _share_equal(full: Sequence[Text], exact: Sequence[Text]) -> float:
    same = total = 0
    for a, b in zip(full, exact, strict=True):
        total += max(len(a.ids), len(b.ids))
        same += sum(x == y for x, y in zip(a.ids, b.ids, strict=False))
    return same / total


def _differences(
    decoder: DecoderProgram, full: Sequence[Text], exact: Sequence[Text]
) -> list[Difference]:
    found = []
    for i, (a, b) in enumerate(zip(full, exact, strict=True)):
        index = first_divergence(b.ids, a.ids)
        if index is None:
            continue
        gap = math.nan  # one ended where the other went on
        if index < min(len(a.ids), len(b.ids)):
            read = (*a.prompt, *a.ids[:index])
            cache, last = decoder.new_cache(len(read)), len(decoder.exit_layers)
            states = decoder.embed(read)
            states = decoder.run_layers(states, cache, start=0, stop=last, first=0)
            logits = decoder.logits(states[-1:], position=last)[0]
            gap = float(logits[a.ids[index]] - logits[b.ids[index]])
        found.append(Difference(text=i, index=index, gap=gap))
    return found
