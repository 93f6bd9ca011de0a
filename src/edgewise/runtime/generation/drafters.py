"""Who may draft, what each costs here, what has been learnt of it, and who drafts next."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgewise.errors import ConfigError
from edgewise.runtime.generation.drafting import (
    Acceptance,
    DraftCosts,
    best_drafts,
    expected_speed_up,
)

if TYPE_CHECKING:
    from edgewise.backends.decoder.base import DecoderProgram, HeadKind
    from edgewise.predict import CostTable
    from edgewise.runtime.generation.costs import RowCosts
    from edgewise.runtime.generation.speculation import Cycle

_MOST_DRAFTS = 7
_LONGEST_SUFFIX = 3
_REMEMBERED_CYCLES = 5
# Share of the time at full depth that goes into asking exits which do not draft.
_ASKING_SHARE = 0.02
# After so many tokens without drafts, what drafting was seen to cost is forgotten.
_IDLE_TOKENS = 64
_SILENT_TOKENS = 64
_PACE_CHANGE = 0.05

# An exit's position and its head; or how many of the text's last tokens matched.
Key = tuple[int, "HeadKind"] | int


class Learnt:
    """What cycles of one kind have shown; shared by the texts of a session.

    Args:
        prior: Of the drafts' acceptance; ``None`` where unknown.
    """

    def __init__(self, prior: float | None) -> None:
        self.acceptance = Acceptance(prior)
        self._paces: dict[int, deque[float]] = {}

    def observe_pace(self, drafts: int, ratio: float) -> None:
        """A cycle took that many times what was predicted."""
        self._paces.setdefault(drafts, deque(maxlen=_REMEMBERED_CYCLES)).append(ratio)

    def pace(self, drafts: int, otherwise: float = 1.0) -> float:
        """Median of the last observed over predicted times; ``otherwise`` where none was seen."""
        seen = self._paces.get(drafts)
        return statistics.median(list(seen)) if seen else otherwise

    def forget_paces(self) -> None:
        """Believe the predictions again."""
        self._paces = {}


class DraftMemory:
    """What is known of every drafter; keep one for all texts of a decoder."""

    def __init__(self) -> None:
        self._known: dict[Key | None, Learnt] = {}

    def of(self, key: Key | None, prior: float | None = None) -> Learnt:
        """What is known of a drafter; ``None`` is full depth, one token at a time."""
        return self._known.setdefault(key, Learnt(prior))

    def chance(self, key: Key) -> float | None:
        """The chance that a drafter's draft holds; ``None`` unknown."""
        return self._known[key].acceptance.chance if key in self._known else None


class Drafter:
    """One way to draft, and how many drafts pay.

    Args:
        key: Whose.
        costs: Of its cycles, as predicted.
        learnt: Of it.
        plain: Of full depth, one token at a time.
        drafts: Always so many; ``None`` for as many as pay.

    Attributes:
        key: Whose.
        predicted: Of its cycles.
    """

    def __init__(
        self,
        key: Key,
        *,
        costs: DraftCosts,
        learnt: Learnt,
        plain: Learnt,
        drafts: int | None = None,
    ) -> None:
        self.key, self.predicted = key, costs
        self._learnt, self._plain, self._always = learnt, plain, drafts
        self._best: tuple[int, float] | None = None
        self._base, self._costs = 1.0, costs

    @property
    def exit(self) -> tuple[int, HeadKind] | None:
        """Its position and head; ``None`` for the text itself."""
        return None if isinstance(self.key, int) else self.key

    def best(self, left_s: float = math.inf) -> tuple[int, float]:
        """How many drafts are fastest within the time left, and the speed-up expected of them."""
        base = self._plain.pace(0)
        if self._best is None or abs(base / self._base - 1.0) > _PACE_CHANGE:
            self._base, self._costs = base, self._corrected(base)
            self._best = self._choose(math.inf)
        if self._costs.cycle_s(self._best[0]) <= left_s:
            return self._best
        return self._choose(left_s)

    def hopeful(self) -> float:
        """The speed-up if its drafts hold as often as they may well do."""
        chance = self._learnt.acceptance.hopeful
        return expected_speed_up(chance, best_drafts(chance, self.predicted), self.predicted)

    def expected_s(self, drafts: int) -> float:
        """What a cycle is expected to take beside a token at full depth as predicted."""
        return self._costs.cycle_s(drafts)

    def accepted(self, *, accepted: float, drafted: int) -> None:
        """So many of its drafts held; of one that was only asked, the chance that it would."""
        self._learnt.acceptance.observe(accepted=accepted, drafted=drafted)
        self._best = None

    def took(self, drafts: int, seconds: float) -> None:
        """A cycle of it took so long."""
        self._learnt.observe_pace(drafts, seconds / self.predicted.cycle_s(drafts))
        self._best = None

    def forget_paces(self) -> None:
        """Believe the predictions again."""
        self._learnt.forget_paces()
        self._best = None

    def _corrected(self, base: float) -> DraftCosts:
        """As predicted, times what cycles have taken over it, relative to full depth's."""
        told = self.predicted
        verify = [told.verify_s[0]]
        for d in range(1, told.longest + 1):
            more = self._learnt.pace(d, otherwise=base) / base - 1.0
            verify.append(max(0.0, told.verify_s[d] + told.cycle_s(d) * more))
        return dataclasses.replace(told, verify_s=tuple(verify))

    def _choose(self, left_s: float) -> tuple[int, float]:
        if self._always is not None:
            fits = self._costs.cycle_s(self._always) <= left_s
            return (self._always, math.inf) if fits else (0, 1.0)
        chance = self._learnt.acceptance.chance
        if chance is None:
            return 0, 1.0
        drafts = best_drafts(chance, self._costs, left_s=left_s)
        return drafts, expected_speed_up(chance, drafts, self._costs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the next cycle does.

    Attributes:
        drafter: Who drafts; ``None`` for no one.
        drafts: How many.
        asked: Exit that is asked for the token in passing, where no one drafts.
        match: How many tokens the text's own proposal rests on; 0 for none.
        proposed: What followed them.
    """

    drafter: Drafter | None = None
    drafts: int = 0
    asked: Drafter | None = None
    match: int = 0
    proposed: Sequence[int] = ()


class Drafters:
    """Chooses who drafts, by the most tokens a second that are expected, and learns from it.

    Args:
        exits: That may draft.
        repeats: The text as a drafter, by how many tokens match; empty for never.
        plain: Of full depth, one token at a time.
        whole: Costs of drafts that need nothing but to be verified.
        ask: Whether exits are asked in passing.
    """

    def __init__(
        self,
        exits: Sequence[Drafter],
        repeats: dict[int, Drafter],
        *,
        plain: Learnt,
        whole: DraftCosts,
        ask: bool,
    ) -> None:
        self._exits, self._repeats, self._plain, self._whole = exits, repeats, plain, whole
        self._ask = ask and bool(exits)
        self._credit_s = 0.0
        self._turn = self._idle = self._silent = 0

    def plan(self, text: Repeats, left_s: float) -> Plan:
        """Choose for the next cycle.

        Args:
            text: So far.
            left_s: By when the cycle must be done, at the costs' length.
        """
        match, proposed = text.propose(self._whole.longest) if self._repeats else (0, [])
        drafts, gain, drafter = 0, 1.0, None
        for each in [*self._exits, self._repeats[match]] if match else self._exits:
            count, speed_up = each.best(left_s)
            if count and speed_up > gain:
                drafts, gain, drafter = count, speed_up, each
        asked = self._to_ask(gain, drafter, left_s) if self._ask else None
        if asked is not None:
            drafter, drafts = None, 0
        return Plan(drafter=drafter, drafts=drafts, asked=asked, match=match, proposed=proposed)

    def expected_s(self, plan: Plan, drafted: int) -> float:
        """What a cycle was to take."""
        if plan.drafter is not None:
            return plan.drafter.expected_s(drafted)
        asked_s = 0.0 if plan.asked is None else plan.asked.predicted.draft_head_s
        return self._whole.cycle_s(0) + asked_s

    def learn(self, plan: Plan, cycle: Cycle, *, held: float | None, took_s: float) -> None:
        """See what a cycle has shown.

        Args:
            plan: Of it.
            cycle: What it gave.
            held: Of the exit that was asked, the chance that its draft would have held.
            took_s: At the costs' length.
        """
        repeat = self._repeats.get(plan.match)
        if repeat is not None and repeat is not plan.drafter:
            repeat.accepted(accepted=float(plan.proposed[0] == cycle.tokens[0]), drafted=1)
        if plan.drafter is not None:
            self._idle = 0
            plan.drafter.took(cycle.drafted, took_s)
            plan.drafter.accepted(accepted=cycle.accepted, drafted=cycle.drafted)
            return
        if plan.asked is not None and held is not None:
            plan.asked.accepted(accepted=held, drafted=1)
            took_s -= plan.asked.predicted.draft_head_s
        self._plain.observe_pace(0, max(0.0, took_s) / self._whole.cycle_s(0))
        self._idle += 1
        if self._idle == _IDLE_TOKENS:
            self._idle = 0
            for each in (*self._exits, *self._repeats.values()):
                each.forget_paces()

    def _to_ask(self, gain: float, chosen: Drafter | None, left_s: float) -> Drafter | None:
        """The exit whose turn it is, if it may be better than what was chosen."""
        whole_s = self._whole.cycle_s(0)
        self._credit_s += _ASKING_SHARE * whole_s
        self._silent += 1
        each = self._exits[self._turn % len(self._exits)]
        # One without hope is asked too when no one has been for long: the text may have changed.
        if each is chosen or (each.hopeful() <= gain and self._silent < _SILENT_TOKENS):
            self._turn += 1
            return None
        head_s = each.predicted.draft_head_s
        price_s = head_s + (gain - 1.0) * whole_s  # what is not drafted is lost
        if price_s > self._credit_s or whole_s + head_s > left_s:
            return None
        self._credit_s -= price_s
        self._turn += 1
        self._silent = 0
        return each


class Repeats:
    """What followed the last time: drafts from the text itself, which cost no layer.

    Args:
        tokens: Of the text so far, its newest last.

    Example:
        >>> text = Repeats([5, 6, 7, 8, 5, 6])
        >>> text.propose(5)  # 5, 6 was followed by 7, 8, 5, 6, and so on
        (2, [7, 8, 5, 6, 7])
        >>> text.add([9]); text.propose(3)
        (0, [])
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        self.add(tokens)

    def add(self, tokens: Iterable[int]) -> None:
        """The text goes on."""
        for token in tokens:
            # What ended at the token before is followed by this one, from now on.
            place = len(self.tokens)
            for n in range(1, min(_LONGEST_SUFFIX, place) + 1):
                self._after[tuple(self.tokens[place - n :])] = place
            self.tokens.append(token)

    def propose(self, most: int) -> tuple[int, list[int]]:
        """What followed the longest suffix of up to three tokens that was there before.

        Args:
            most: Tokens at most.

        Returns:
            How many tokens matched, and what followed them; 0 and nothing where none did.
        """
        held = self.tokens
        for n in range(min(_LONGEST_SUFFIX, len(held)), 0, -1):
            place = self._after.get(tuple(held[-n:]))
            if place is not None:
                # What would follow the text's end is what has just been proposed.
                period = len(held) - place
                return n, [held[place + i % period] for i in range(most)]
        return 0, []


def exit_drafters(  # noqa: PLR0913 - what they are made from
    decoder: DecoderProgram,
    table: CostTable,
    rows: RowCosts,
    memory: DraftMemory,
    *,
    measured: HeadKind,
    heads: Sequence[HeadKind],
    layers: Sequence[int],
    drafts: int | None = None,
) -> list[Drafter]:
    """Exits and heads that may pay; all that are named where the number of drafts is fixed.

    Args:
        decoder: The model.
        table: Of a token, heads alone.
        rows: Of several tokens in one pass.
        memory: What is known of them.
        measured: Whose heads the table's are.
        heads: That may draft.
        layers: Of the exits.
        drafts: Always so many; ``None`` for as many as pay.

    Raises:
        ConfigError: No such exit before the last.
    """
    known = decoder.exit_layers[:-1]
    if not set(layers) <= set(known):
        raise ConfigError(f"expected exits of {list(known)} to draft, found {list(layers)}")
    found = []
    for layer, kind in itertools.product(layers, heads):
        position = known.index(layer) + 1
        head_s = draft_head_s(decoder, table, position, kind, measured=measured)
        drafter = Drafter(
            (position, kind),
            costs=draft_costs(table, rows, position, head_s=head_s),
            learnt=memory.of((position, kind), draft_agreement(decoder, layer, kind)),
            plain=memory.of(None),
            drafts=drafts,
        )
        if drafts is not None or drafter.hopeful() > 1:
            found.append(drafter)
    return found


def draft_heads(decoder: DecoderProgram, head: HeadKind) -> tuple[HeadKind, ...]:
    """Heads that may draft: the short list where there is one, and a whole one."""
    if decoder.exits is None or decoder.exits.shortlist is None:
        return (head,)
    return ("shortlist", "affine" if head == "shortlist" else head)


def repeat_drafters(table: CostTable, rows: RowCosts, memory: DraftMemory) -> dict[int, Drafter]:
    """The text itself as a drafter, for each number of tokens that match."""
    costs, plain = draft_costs(table, rows, 0, head_s=0.0), memory.of(None)
    return {
        n: Drafter(n, costs=costs, learnt=memory.of(n), plain=plain)
        for n in range(1, _LONGEST_SUFFIX + 1)
    }


def draft_costs(
    table: CostTable, rows: RowCosts, position: int, *, head_s: float | None = None
) -> DraftCosts:
    """What a cycle costs that drafts at a position, from one token's table and rows' ratios.

    Args:
        table: Heads alone.
        rows: Measured in one pass.
        position: 1 to the number of exits; 0 for drafts that cost nothing but to be verified.
        head_s: Of one draft; the table's by default.
    """
    last = len(table.stage_s)
    rest_s = math.fsum(table.stage_s[position:])
    head = rows.head(1)
    head_ratios = [rows.head(m) / head if head > 0 else 1.0 for m in range(1, _MOST_DRAFTS + 2)]
    return DraftCosts(
        early_s=math.fsum(table.stage_s[:position]),
        draft_head_s=float(table.head_s[position - 1]) if head_s is None else head_s,
        verify_s=tuple(
            rest_s * rows.ratio(m) + float(table.head_s[last - 1]) * max(1.0, head_ratios[m - 1])
            for m in range(1, _MOST_DRAFTS + 2)
        ),
    )


def draft_head_s(
    decoder: DecoderProgram, table: CostTable, position: int, kind: HeadKind, *, measured: HeadKind
) -> float:
    """One answer of a head at an exit, seconds: measured, or else by the weights it reads.

    Args:
        decoder: The model.
        table: Heads alone, of the head that was measured.
        position: 1 to the number of exits.
        kind: Of the head.
        measured: Whose heads the table's are.
    """
    if kind == measured:
        return float(table.head_s[position - 1])
    a, exits = decoder.model.architecture, decoder.exits
    columns, width = a.vocab_size, 0
    if kind == "shortlist" and exits is not None and exits.shortlist is not None:
        columns = len(exits.shortlist)
    if kind != "raw" and exits is not None and decoder.layers_at(position) in exits.affine:
        width = a.hidden_size
    return float(table.head_s[-1]) * (columns + width) / a.vocab_size


def draft_agreement(decoder: DecoderProgram, layer: int, kind: HeadKind) -> float | None:
    """How often an exit's answer was full depth's on held-out text; ``None`` unknown."""
    exits = decoder.exits
    fitted = None if exits is None else exits.affine.get(layer)
    if exits is None or fitted is None or kind == "raw":
        return None
    if kind == "affine":
        return fitted.agreement
    for score in exits.notes.get("scores") or ():
        for each in score.get("exits", ()):
            if each.get("layer") == layer and each.get("shortlist_agreement") is not None:
                return float(each["shortlist_agreement"])
    return None
