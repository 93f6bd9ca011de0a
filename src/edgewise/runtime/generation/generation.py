"""Several texts on one processor: whose turn it is, and a stream of tokens for whoever reads it."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from edgewise.runtime.generation.records import Summary, Token

if TYPE_CHECKING:
    from edgewise.clock import Clock
    from edgewise.runtime.generation.stream import Stream

_CHUNK_ALONE = 256  # rows beyond which one pass is no faster per row
_CHUNK_SHARED = 64
# How far ahead a text with near deadlines may get, in pieces of work of the one that waits.
_MOST_LEAD = 16


class Generation:
    """Tokens as they come, of one text or of several in turn; for ``for`` and ``async for``.

    Nothing runs while nobody asks for a token, and that time counts for no deadline. Ending early,
    by ``close``, ``break`` in a ``with`` block, cancellation, or because nobody refers to it any
    more, gives the caches back; an error does as well. It holds no thread.

    Turns are fair: the text that has been given least time is next, for at most an equal share of
    its budget, unless another would then be late; that one goes first, though not so often that
    the first never gets on. With budgets that the processor can keep together, B_i >= c_i * n for
    each of n texts, each is kept.

    Source:
        Waldspurger and Weihl, Stride Scheduling (1995), for whose turn it is; Liu and Layland,
        Scheduling Algorithms for Multiprogramming in a Hard-Real-Time Environment (1973), for
        shares that sum to one.
    """

    def __init__(
        self, streams: Sequence[Stream], clock: Clock, *, arrival_s: float | None = None
    ) -> None:
        self._streams = list(streams)
        self._clock = clock
        self._arrival_s = arrival_s
        self._ready: deque[Token] = deque()
        self._asked_until_s: float | None = None
        self._lock = threading.Lock()
        self._closed = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Token:
        token = self._next()
        if token is None:
            raise StopIteration
        return token

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token:
        """The next token, computed in another thread; cancelled, it ends after that token."""
        try:
            token = await asyncio.to_thread(self._next)
        except asyncio.CancelledError:
            self.close()
            raise
        if token is None:
            raise StopAsyncIteration
        return token

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End now; a token that another thread is computing is the last and is thrown away."""
        self._closed = True
        if self._lock.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._lock.release()

    @property
    def summary(self) -> Summary:
        """What became of the first text so far; the only one's of ``generate``."""
        return self._streams[0].summary()

    @property
    def summaries(self) -> tuple[Summary, ...]:
        """What became of each text so far."""
        return tuple(stream.summary() for stream in self._streams)

    def _next(self) -> Token | None:
        with self._lock:
            try:
                self._resume()
                while not self._ready and not self._closed:
                    live = [s for s in self._streams if s.finish is None]
                    if not live:
                        break
                    self._advance(live)
            except BaseException as error:
                self._closed = True
                interrupted = isinstance(error, KeyboardInterrupt)
                self._end(failed=not interrupted)
                raise
            if self._closed:
                self._end()
                return None
            self._asked_until_s = self._clock.now_s()
            return self._ready.popleft() if self._ready else None

    def _resume(self) -> None:
        now_s = self._clock.now_s()
        if self._asked_until_s is None:
            for stream in self._streams:
                stream.begin(now_s if self._arrival_s is None else self._arrival_s)
        else:
            for stream in self._streams:
                stream.pause(now_s - self._asked_until_s)

    def _advance(self, live: Sequence[Stream]) -> None:
        stream, until_s = choose_turn(live, self._clock.now_s())
        alone = len(live) == 1
        if stream.in_prompt:
            most = _CHUNK_ALONE if alone else _CHUNK_SHARED
            stream.read_prompt(most=most, until_s=until_s)
        else:
            self._ready += stream.step(until_s=until_s, alone=alone)

    def _end(self, *, failed: bool = False) -> None:
        self._ready.clear()
        for stream in self._streams:
            stream.end("error" if failed else "closed")


def choose_turn(live: Sequence[Stream], now_s: float) -> tuple[Stream, float]:
    """Whose turn it is, and until when.

    Args:
        live: Texts that go on, at least one.
        now_s: The present instant.
    """
    if len(live) == 1:
        return live[0], math.inf
    chosen = min(live, key=lambda s: (s.spent_s, s.index))
    need_s, spare_s, first = chosen.need_s(), *_spare_s(live, chosen, now_s)
    # Not beyond a lead: an overload must not keep anybody from ever getting on.
    if spare_s < need_s and first.spent_s <= chosen.spent_s + _MOST_LEAD * need_s:
        chosen = first
        need_s, spare_s = chosen.need_s(), _spare_s(live, chosen, now_s)[0]
    if not chosen.in_prompt:
        spare_s = min(spare_s, (chosen.due_s - chosen.since_s) / len(live))
    return chosen, now_s + max(need_s, spare_s)


def _spare_s(live: Sequence[Stream], chosen: Stream, now_s: float) -> tuple[float, Stream]:
    """How long a text may run until the others must, earliest deadline first, and who is first.

    A text that is late whoever goes first is left out: it waits like one without a deadline.
    """
    spare_s, before_s, first = math.inf, 0.0, chosen
    for other in sorted(live, key=lambda s: s.due_s):
        left_s = other.due_s - now_s - before_s - other.whole_s()
        if other is chosen or left_s < 0:
            continue
        if first is chosen:
            first = other
        before_s += other.whole_s()
        spare_s = min(spare_s, left_s)
    return spare_s, first
