"""Reads the kernel's small text files and says why a value could not be had."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Quality = Literal["ok", "stale", "masked", "unsupported", "denied"]

# Kernels print an unset limit as the largest unsigned or signed 64-bit number (clk_max_rate, memory
# limits), so anything from here on is a placeholder. 2**62 bytes or hertz exist nowhere.
_PLACEHOLDER = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One attempt to read a value.

    Attributes:
        value: What was read; ``None`` unless ``quality`` is ``"ok"``.
        quality: ``"ok"``, ``"denied"`` (exists, not for this user) or ``"unsupported"``.
        reason: Why there is no value; empty where there is one.
    """

    value: str | None
    quality: Quality
    reason: str = ""


def read_text(path: Path) -> Reading:
    """Read one small file, without its surrounding blanks and NUL bytes.

    Args:
        path: The file. It may be absent, unreadable or fail while being read.

    Returns:
        The text, or the reason why there is none. Never raises for what the machine lacks.
    """
    try:
        text = path.read_bytes().decode("utf-8", errors="replace").strip(" \t\r\n\0")
    except PermissionError:
        return Reading(value=None, quality="denied", reason=f"no permission to read {path}")
    except OSError as error:
        # EBUSY, ENODEV, EIO: cores offline, rails gated, devices gone between listing and reading.
        said = errno.errorcode.get(error.errno or 0, type(error).__name__)
        return Reading(value=None, quality="unsupported", reason=f"{path} cannot be read: {said}")
    if not text:
        return Reading(value=None, quality="unsupported", reason=f"{path} is empty")
    return Reading(value=text, quality="ok")


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberReading:
    """A count or level that was read, or the reason why there is none.

    Attributes:
        value: At least 0; ``None`` unless ``quality`` is ``"ok"``.
        quality: As in :class:`Reading`.
        reason: Why there is no value; empty where there is one.
    """

    value: int | None
    quality: Quality
    reason: str = ""


def read_number(path: Path) -> NumberReading:
    """Read a file that holds one whole number, in the kernel's own unit.

    Returns:
        The number, or the reason why there is none: absent, denied, not a number
        (``"<unknown>"``), negative, or the largest 64-bit number, which kernels print for "unset".
    """
    return parse_number(read_text(path), path)


def parse_number(reading: Reading, path: Path | str) -> NumberReading:
    """Take the text of a file as a whole number, as :func:`read_number` does.

    Args:
        reading: What was read.
        path: Where, for the reason.
    """
    if reading.value is None:
        return NumberReading(value=None, quality=reading.quality, reason=reading.reason)
    try:
        number = int(reading.value)
    except ValueError:
        number = -1
    if not 0 <= number < _PLACEHOLDER:
        return NumberReading(
            value=None, quality="unsupported", reason=f"{path} says {reading.value[:40]!r}"
        )
    return NumberReading(value=number, quality="ok")


def parse_cpu_list(text: str) -> list[int] | None:
    """Read a kernel range list.

    Returns:
        CPU numbers in order, or ``None`` where the text is not such a list.

    Example:
        >>> parse_cpu_list("0-2,5")
        [0, 1, 2, 5]
    """
    cpus: set[int] = set()
    try:
        for part in text.strip().split(","):
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    except ValueError:
        return None
    return sorted(cpus) or None


def matching(root: Path, pattern: str) -> Iterator[Path]:
    """Paths under ``root`` that match, in natural order; none where a folder is unreadable."""

    def natural(path: Path) -> list[tuple[int, str]]:
        text, parts, digits = str(path), list[tuple[int, str]](), ""
        for character in text + "\0":
            if character.isdigit():
                digits += character
                continue
            if digits:
                parts.append((int(digits), ""))
                digits = ""
            parts.append((-1, character))
        return parts

    # Path.glob raises where the root itself cannot be looked into.
    with contextlib.suppress(PermissionError):
        yield from sorted(root.glob(pattern), key=natural)


def exists(path: Path) -> bool:
    """Whether a path is there, as far as this user can see.

    ``Path.exists`` raises under an unreadable directory in Python 3.11; this never does.
    """
    return os.path.exists(path)  # noqa: PTH110 - see above
