"""A small kernel file that is read again and again through one open descriptor."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Self

from edgewise.device.files import NumberReading, Quality, Reading, parse_number

# A named pipe where a file was expected must not stop the reader.
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK


class KeptFile:
    """A file that stays open: reading it costs one system call.

    It follows what the file does meanwhile. An absent or forbidden path is probed again every
    ``retry_s``, and so is a file that was removed or replaced: its open descriptor would go on
    showing the old one. A read that fails is repeated on a fresh descriptor, which mends devices
    that were unbound and bound again, and from then on every read tries again. A permission that is
    withdrawn while the file is open changes nothing: the kernel asks for it at opening.

    Used by one thread at a time. Closes itself when it is forgotten.

    Args:
        path: The file; it may be absent, forbidden or fail at any time.
        retry_s: How often an absent, forbidden or failing path is opened again at most, seconds.
        max_bytes: How much of the file is read; sysfs never shows more than one page.
        open_: Opens a descriptor as ``os.open`` does. Tests pass one that refuses.
    """

    __slots__ = ("_checked_s", "_descriptor", "_failure", "_max_bytes", "_open", "_retry_s", "path")

    def __init__(
        self,
        path: Path,
        *,
        retry_s: float = 1.0,
        max_bytes: int = 4096,
        open_: Callable[[str, int], int] = os.open,
    ) -> None:
        self.path = str(path)
        self._retry_s = retry_s
        self._max_bytes = max_bytes
        self._open = open_
        self._descriptor: int | None = None
        self._failure: Reading | None = None
        self._checked_s = 0.0

    def text(self, now_s: float) -> Reading:
        """Read it, without its surrounding blanks and NUL bytes.

        Args:
            now_s: The present instant on a monotonic clock.

        Returns:
            The text, or the reason why there is none, as :func:`edgewise.device.files.read_text`
            says it. Never raises for what the machine lacks.
        """
        data = self._read(now_s)
        if isinstance(data, Reading):
            return data
        text = data.decode("utf-8", errors="replace").strip(" \t\r\n\0")
        if not text:
            return Reading(value=None, quality="unsupported", reason=f"{self.path} is empty")
        return Reading(value=text, quality="ok")

    def number(self, now_s: float) -> NumberReading:
        """Read one whole number, at least 0, in the kernel's own unit.

        Args:
            now_s: The present instant on a monotonic clock.

        Returns:
            The number, or the reason why there is none, as
            :func:`edgewise.device.files.read_number` says it.
        """
        return parse_number(self.text(now_s), self.path)

    def close(self) -> None:
        """Close the descriptor; the next read opens it again."""
        descriptor, self._descriptor, self._failure = self._descriptor, None, None
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Slots are unset where __init__ was interrupted.
        if getattr(self, "_descriptor", None) is not None:
            self.close()

    def _read(self, now_s: float) -> bytes | Reading:
        # A clock that was set back must not stop the probing.
        due = not 0 <= now_s - self._checked_s < self._retry_s
        if self._descriptor is None:
            if self._failure is not None and not due:
                return self._failure
            return self._reopen(now_s)
        if due:
            self._checked_s = now_s
            if self._replaced(self._descriptor):
                return self._reopen(now_s)
        try:
            data = os.pread(self._descriptor, self._max_bytes, 0)
        except OSError as error:
            if self._failure is not None and not due:
                return self._failed(error)
            return self._reopen(now_s)
        self._failure = None
        return data

    def _reopen(self, now_s: float) -> bytes | Reading:
        self.close()
        self._checked_s = now_s
        try:
            self._descriptor = self._open(self.path, _FLAGS)
            return os.pread(self._descriptor, self._max_bytes, 0)
        except OSError as error:
            return self._failed(error)

    def _replaced(self, descriptor: int) -> bool:
        try:
            there, here = os.stat(self.path), os.fstat(descriptor)  # noqa: PTH116 - kept as text
        except PermissionError:
            return False
        except OSError:
            return True
        return (there.st_ino, there.st_dev) != (here.st_ino, here.st_dev)

    def _failed(self, error: OSError) -> Reading:
        quality: Quality = "unsupported"
        if isinstance(error, PermissionError):
            quality, reason = "denied", f"no permission to read {self.path}"
        else:
            said = errno.errorcode.get(error.errno or 0, type(error).__name__)
            reason = f"{self.path} cannot be read: {said}"
        self._failure = Reading(value=None, quality=quality, reason=reason)
        return self._failure
