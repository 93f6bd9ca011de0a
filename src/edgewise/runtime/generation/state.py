"""One text's cache, and what becomes of the layers that its tokens did not run through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edgewise.errors import ConfigError, nearest_names
from edgewise.model.decoding import KV_POLICIES, KvPolicy

if TYPE_CHECKING:
    from edgewise.backends.decoder.base import DecoderProgram

Float32 = npt.NDArray[np.float32]
MOST_OWED = 8


@dataclass(slots=True)
class _Owed:
    """A token that left early and whose deeper layers are still to run."""

    cell: int
    position: int
    hidden: Float32  # [1, H] at that position


class TextState:
    """Keys and values of one text; every layer reports one length, whatever exits were taken.

    - ``propagate``: the state at the exit also gives the keys and values of the deeper layers.
    - ``mask``: the deeper layers hold nothing for that token and never attend to it.
    - ``defer``: they hold nothing until a later token runs through them, which takes the tokens
      that are owed along; of more than ``most_owed`` the oldest are propagated.
    - ``verify``: as ``mask``; whoever verifies fills the cells.

    Args:
        decoder: The model.
        capacity: The most tokens it will hold.
        kv: What a token that leaves early leaves behind.
        most_owed: Tokens owed at most; only for ``defer``.

    Attributes:
        cache: Of this text alone.
    """

    def __init__(
        self,
        decoder: DecoderProgram,
        capacity: int,
        *,
        kv: KvPolicy = "propagate",
        most_owed: int = MOST_OWED,
    ) -> None:
        self.decoder, self.kv = decoder, check_kv(kv)
        self.cache = decoder.new_cache(capacity)
        self._most_owed = most_owed
        self._owed: list[_Owed] = []

    @property
    def length(self) -> int:
        """Tokens it holds."""
        return self.cache.length

    @property
    def owed(self) -> int:
        """Tokens whose deeper layers are still to run."""
        return len(self._owed)

    def prefill(self, tokens: Sequence[int]) -> None:
        """Run tokens through all layers in one pass."""
        decoder, first = self.decoder, self.cache.length
        hidden = decoder.embed(tokens)
        decoder.run_layers(hidden, self.cache, start=0, stop=len(decoder.exit_layers), first=first)
        self.cache.length = first + len(tokens)

    def run(self, hidden: Float32, *, start: int, stop: int) -> Float32:
        """Run the newest token [1, H], and those that are owed, from one position to another."""
        cache, place = self.cache, self.cache.length
        rows = [owed for owed in self._owed if owed.position < stop]
        rows.append(_Owed(place, start, hidden))
        for group in _together(rows):
            states = self.decoder.run_layers(
                np.concatenate([row.hidden for row in group]),
                cache,
                start=group[0].position,
                stop=stop,
                first=group[0].cell,
            )
            for i, row in enumerate(group):
                row.hidden, row.position = states[i : i + 1], stop
        if stop == len(self.decoder.exit_layers):
            self._owed.clear()
        return rows[-1].hidden

    def leave(self, hidden: Float32, *, position: int) -> bool:
        """Settle the deeper layers of the newest token, which leaves at a position.

        Returns:
            Whether anything had to be computed.
        """
        cache, place = self.cache, self.cache.length
        if position == len(self.decoder.exit_layers):
            return False
        if self.kv == "propagate":
            self.decoder.fill(hidden, cache, start=position, first=place)
            return True
        cache.present[self.decoder.layers_at(position) :, place] = False
        if self.kv != "defer":
            return False
        self._owed.append(_Owed(place, position, hidden))
        if len(self._owed) <= self._most_owed:
            return False
        oldest = self._owed.pop(0)
        self.decoder.fill(oldest.hidden, cache, start=oldest.position, first=oldest.cell)
        return True

    def advance(self) -> None:
        """The newest token is done."""
        self.cache.length += 1

    def drop_unfinished(self) -> None:
        """Forget what was computed of a token that did not get done."""
        self.cache.present[:, self.cache.length :] = False


def check_kv(kv: str) -> KvPolicy:
    """Return a policy that exists.

    Raises:
        ConfigError: There is none of that name.
    """
    for known in KV_POLICIES:
        if kv == known:
            return known
    raise ConfigError(f"unknown KV policy {kv!r}", help=nearest_names(str(kv), KV_POLICIES))


def _together(rows: Sequence[_Owed]) -> list[list[_Owed]]:
    """Neighbours in the text that have come equally far: one call each, in the text's order."""
    groups: list[list[_Owed]] = []
    for row in rows:
        last = groups[-1][-1] if groups else None
        if last and (last.cell + 1, last.position) == (row.cell, row.position):
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups
