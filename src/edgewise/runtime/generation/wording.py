"""Tokens to text as they come: whole characters only, and nothing behind a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgewise.errors import ConfigError

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class Wording:
    """Text of one stream of tokens.

    Args:
        decode: Token ids to text; bytes that are no character yet give U+FFFD.
        stops: Strings at whose first occurrence the text ends; they are left out.

    Attributes:
        stopped: Whether a stop string has come.

    Raises:
        ConfigError: A stop string is empty, or they are one string.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        if isinstance(stops, str) or not all(stops):
            raise ConfigError(
                f"expected stop strings that are not empty, found {stops!r}",
                help="give a list, such as stop=['\\n\\n']",
            )
        self._decode = decode
        self._stops = tuple(stops)
        self._ids: list[int] = []
        self._start = self._read = self._sent = 0
        self._held = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """Take a token; return the text that is certain now."""
        self._ids.append(token)
        return self._until_stop(self._new_text(final=False))

    def finish(self) -> str:
        """Return the text that was held back; no token comes any more."""
        if self.stopped:
            return ""
        text = self._until_stop(self._new_text(final=True)) + self._held
        self._held = ""
        return text

    def _new_text(self, *, final: bool) -> str:
        # A few tokens before the new ones are decoded with them: some tokenizers write the first
        # token of a text differently.
        text = self._decode(self._ids[self._start :])
        certain = text if final else text.rstrip(_UNFINISHED)
        new = certain[self._sent :]
        if len(certain) == len(text) and text:
            self._start, self._read = self._read, len(self._ids)
            self._sent = len(self._decode(self._ids[self._start :]))
        else:
            self._sent = max(self._sent, len(certain))
        return new

    def _until_stop(self, new: str) -> str:
        text = self._held + new
        found = [at for at in map(text.find, self._stops) if at >= 0]
        if found:
            self._held, self.stopped = "", True
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of a text with which a stop string begins.

    Example:
        >>> _overlap("over<", "<end>"), _overlap("over", "<end>")
        (1, 0)
    """
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in sizes if text.endswith(stop[:n])), 0)
