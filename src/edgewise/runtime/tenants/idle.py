"""Suffixes that no plan uses just now: plans that come back need not load them again."""

from __future__ import annotations

import logging
import threading
from collections import deque

from edgewise.runtime.tenants.pool import Suffix

_log = logging.getLogger(__name__)

Key = tuple[str, int, int]


class IdleSuffixes:
    """Keeps the last few by tenant, place and threads; closes the oldest beyond that.

    Args:
        most: How many; 0 for none.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._kept: deque[tuple[Key, Suffix]] = deque()

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, key: Key) -> Suffix | None:
        """Return one that was loaded and warmed before, the latest, or ``None``."""
        with self._lock:
            for index in range(len(self._kept) - 1, -1, -1):
                if self._kept[index][0] == key:
                    found = self._kept[index][1]
                    del self._kept[index]
                    return found
        return None

    def give(self, key: Key, suffix: Suffix) -> None:
        """Keep one that its worker no longer needs."""
        with self._lock:
            self._kept.append((key, suffix))
            surplus = [self._kept.popleft()[1] for _ in range(max(0, len(self._kept) - self._most))]
        for each in surplus:
            close_quietly(each)

    def close(self) -> None:
        """Close all; whatever is given from now on is closed at once."""
        with self._lock:
            self._most = 0
            kept = [suffix for _, suffix in self._kept]
            self._kept.clear()
        for each in kept:
            close_quietly(each)


def close_quietly(suffix: Suffix) -> None:
    """Close a suffix; a runtime that fails at that has nobody left to tell."""
    try:
        suffix.close()
    except Exception:  # noqa: BLE001 - only logged
        _log.exception("a suffix could not be closed")
