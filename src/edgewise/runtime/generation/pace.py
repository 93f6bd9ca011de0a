"""When the next token of a text is due."""

from __future__ import annotations

import math
from collections import deque
from typing import Literal

from edgewise.errors import ConfigError

Window = int | Literal["strict"]


class Pace:
    """Any N tokens in a row, since the last late one, take at most N budgets.

    With ``strict``, or N = 1, every token has its own budget. With N above 1 time that tokens did
    not need is there for those within N behind them, and is lost after that; a late token leaves
    its successors no debt. Time during which nobody asked for a token does not count.

    Args:
        budget_s: Time per output token, seconds; ``math.inf`` for none.
        window: N, or ``"strict"``.

    Raises:
        ConfigError: A window below 1.

    Example:
        >>> pace = Pace(0.05, window=4)
        >>> pace.begin(1.0)
        >>> pace.add(1.02)  # 30 ms early
        True
        >>> round(pace.due_s, 3)
        1.1
    """

    def __init__(self, budget_s: float = math.inf, *, window: Window = 1) -> None:
        size = 1 if window == "strict" else window
        if type(size) is not int or size < 1:
            raise ConfigError(
                f"expected a window of at least one token, or 'strict', found {window!r}"
            )
        self.budget_s = budget_s
        self._done_s: deque[float] = deque(maxlen=size)

    @property
    def last_s(self) -> float:
        """When the last token came."""
        return self._done_s[-1]

    @property
    def due_s(self) -> float:
        """When the next one is due."""
        return self._done_s[0] + len(self._done_s) * self.budget_s

    def begin(self, at_s: float) -> None:
        """The first token has come."""
        self._done_s.clear()
        self._done_s.append(at_s)

    def add(self, at_s: float) -> bool:
        """Another token has come; say whether in time."""
        met = at_s <= self.due_s
        if not met:
            self._done_s.clear()
        self._done_s.append(at_s)
        return met

    def pause(self, duration_s: float) -> None:
        """Leave out a time during which nobody asked for a token."""
        for i, done_s in enumerate(self._done_s):
            self._done_s[i] = done_s + duration_s
