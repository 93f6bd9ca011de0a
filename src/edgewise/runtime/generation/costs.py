"""What tokens cost: per unit as profiled, longer as the text grows, by rows when run together."""

from __future__ import annotations

import bisect
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from edgewise.errors import ConfigError
from edgewise.model.decoding import KvPolicy
from edgewise.predict import CostTable
from edgewise.predict.state_costs import STATIC, StateCosts, UnitCosts
from edgewise.runtime.generation.program import ProbeProgram, staged_decoder

if TYPE_CHECKING:
    from edgewise.backends.decoder.base import DecoderProgram, HeadKind
    from edgewise.clock import Clock

_NEAR, _FAR = 64, 512  # tokens before the one that is measured
_ROWS = (1, 2, 4, 8, 32)
_MOST_HEAD_ROWS = 8
_REPEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageCosts:
    """Costs of a token's units after a text of a stated length, and how they grow with it.

    Growth is taken as linear and as one ratio for all units: attention reads every cell of the
    cache, nothing else depends on the length.

    Attributes:
        propagate: Heads include filling the deeper layers; also for ``defer``, whose oldest token
            may have to be filled.
        mask: Heads alone; also for ``verify``.
        length: Tokens before the one that was measured.
        growth_ratio: By what share of the full depth's cost each further token adds to it.
    """

    propagate: CostTable
    mask: CostTable
    length: int = 0
    growth_ratio: float = 0.0

    @classmethod
    def of(
        cls, near: CostTable, far: CostTable, mask: CostTable, *, near_length: int, far_length: int
    ) -> LanguageCosts:
        """Put together what was measured after a short and after a long text."""
        growth = (far.full_depth_s() / near.full_depth_s() - 1.0) / (far_length - near_length)
        # What noise makes of no growth, and more than all the cost there is.
        growth = min(max(growth, 0.0), 1.0 / near_length)
        return cls(propagate=near, mask=mask, length=near_length, growth_ratio=growth)

    @classmethod
    def same(cls, table: CostTable) -> LanguageCosts:
        """One table whatever the policy and the length."""
        return cls(propagate=table, mask=table)

    def table(self, kv: KvPolicy) -> CostTable:
        """Under a KV policy."""
        return self.propagate if kv in {"propagate", "defer"} else self.mask

    def factor(self, length: int) -> float:
        """Cost after that many tokens relative to the tables'.

        Example:
            >>> table = CostTable.from_costs([1.0], [1.0])
            >>> costs = LanguageCosts(propagate=table, mask=table, length=100, growth_ratio=0.001)
            >>> costs.factor(600)
            1.5
        """
        return 1.0 + self.growth_ratio * (length - self.length)

    def under(self, kv: KvPolicy, costs: StateCosts) -> StateCosts:
        """Costs in a state of the device under a KV policy.

        Args:
            kv: The policy.
            costs: As predicted for ``propagate``; what heads cost without filling is taken to be
                the same share of them in every state.
        """
        if self.table(kv) is self.propagate:
            return costs
        share = self.mask.head_s / np.maximum(self.propagate.head_s, 1e-12)
        share = np.minimum(share, 1.0)  # what noise makes of a head that fills nothing
        head_j = None if costs.head_j is None else costs.head_j * share
        return dataclasses.replace(costs, head_s=costs.head_s * share, head_j=head_j)


def in_state(table: CostTable, units: UnitCosts) -> CostTable:
    """A table's single stages and heads as they are predicted for the device's present state."""
    if units is STATIC:
        return table
    told = units.seconds
    stages = [told.get(f"segment:{k}-{k + 1}", float(s)) for k, s in enumerate(table.stage_s)]
    heads = [told.get(f"head:{k}", float(s)) for k, s in enumerate(table.head_s)]
    return dataclasses.replace(
        table, stage_s=np.array(stages), head_s=np.array(heads), segment_s={}
    )


def state_ratio(table: CostTable, units: UnitCosts) -> float:
    """What full depth takes in the device's present state, relative to a table."""
    last = table.num_exits - 1
    whole_s = table.remaining_s(0, last)
    return in_state(table, units).remaining_s(0, last) / whole_s if whole_s > 0 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCosts:
    """What several tokens cost in one pass, measured; linear between and beyond.

    Attributes:
        layers_s: Rows to seconds of all layers.
        head_s: Rows to seconds of the last head.
    """

    layers_s: Mapping[int, float]
    head_s: Mapping[int, float]

    def __post_init__(self) -> None:
        for known in (self.layers_s, self.head_s):
            if 1 not in known or list(known) != sorted(known):
                raise ConfigError(f"expected costs of 1 row and more, rising, found {list(known)}")

    @classmethod
    def proportional(cls, layers_s: float, head_s: float) -> RowCosts:
        """Each row costs as much as the first: the most it can."""
        return cls(layers_s={1: layers_s, 2: 2 * layers_s}, head_s={1: head_s, 2: 2 * head_s})

    def layers(self, rows: int) -> float:
        """Seconds of all layers for rows.

        Example:
            >>> RowCosts(layers_s={1: 1.0, 2: 1.2, 4: 1.6}, head_s={1: 0.1}).layers(8)
            2.4
        """
        return _interpolated(self.layers_s, rows)

    def head(self, rows: int) -> float:
        """Seconds of the last head for rows."""
        return _interpolated(self.head_s, rows)

    def ratio(self, rows: int) -> float:
        """All layers for rows relative to one."""
        one_s = self.layers_s[1]
        return max(1.0, self.layers(rows) / one_s) if one_s > 0 else 1.0


def _interpolated(known: Mapping[int, float], rows: int) -> float:
    if rows in known:
        return known[rows]
    sizes = list(known)
    if len(sizes) == 1:
        return known[1] * rows
    k = min(max(bisect.bisect(sizes, rows), 1), len(sizes) - 1)
    a, b = sizes[k - 1], sizes[k]
    slope = max(0.0, (known[b] - known[a]) / (b - a))
    return round(known[a] + slope * (rows - a), 12)


def measure_rows(
    decoder: DecoderProgram, clock: Clock, *, rows: Sequence[int] = _ROWS, repeats: int = _REPEATS
) -> RowCosts:
    """Measure what rows cost together; a short calibration which also warms the model up."""
    last = len(decoder.exit_layers)
    most = min(max(rows), decoder.model.context_length)
    cache = decoder.new_cache(most)
    layers: dict[int, list[float]] = {}
    heads: dict[int, list[float]] = {}
    for turn in range(repeats + 1):
        for count in sorted({min(r, most) for r in rows}):
            hidden = decoder.embed([0] * count)
            start_s = clock.now_s()
            hidden = decoder.run_layers(hidden, cache, start=0, stop=last, first=0)
            middle_s = clock.now_s()
            if turn:  # the first turn warms up
                layers.setdefault(count, []).append(middle_s - start_s)
            if count <= _MOST_HEAD_ROWS:
                decoder.logits(hidden, position=last)
                if turn:
                    heads.setdefault(count, []).append(clock.now_s() - middle_s)
    return RowCosts(
        layers_s={r: statistics.median(s) for r, s in layers.items()},
        head_s={r: statistics.median(s) for r, s in heads.items()},
    )


def probe_lengths(context_length: int) -> tuple[int, int]:
    """After how many tokens costs are measured: a short and a long text.

    Example:
        >>> probe_lengths(2048), probe_lengths(96)
        ((64, 512), (24, 72))
    """
    return min(_NEAR, context_length // 4), min(_FAR, context_length * 3 // 4)


def probe_programs(
    decoder: DecoderProgram, *, head: HeadKind = "affine"
) -> dict[str, ProbeProgram]:
    """What a campaign measures in turn: a token after a short text, a long one, and unfilled.

    Returns:
        By name, the order that :meth:`LanguageCosts.of` takes tables in.
    """
    model = staged_decoder(decoder, head=head)
    near, far = probe_lengths(decoder.model.context_length)
    kinds: tuple[tuple[int, KvPolicy], ...] = (
        (near, "propagate"),
        (far, "propagate"),
        (near, "mask"),
    )
    return {
        f"{decoder.backend} after {length} tokens, {kv}": ProbeProgram(
            decoder, length, model=model, head=head, kv=kv
        )
        for length, kv in kinds
    }
