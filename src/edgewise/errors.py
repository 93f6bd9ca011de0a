"""Everything Edgewise raises on purpose, as one tree.

A message says what was expected, what was found and where; ``help`` says what to do next and is
printed on a line of its own.

    EdgeError
    ├── ConfigError              a file, flag or argument the user wrote is wrong
    ├── DataError                an input or data set cannot be read or used
    │   └── ShapeError           an array does not have the documented shape or dtype
    ├── CheckpointError          a saved model is missing, truncated, tampered with or too new
    ├── ProfileError             measured costs are missing, stale, damaged or from another device
    ├── ModelError               a model cannot be staged: no legal cut, not exportable
    ├── BackendError             a runtime refused or failed; its own message is the cause
    │   ├── BackendUnavailable   not installed, or no such device here
    │   └── OpUnsupported        the runtime is here but cannot run this operator
    └── Infeasible               no decision meets the constraints; carries the closest one
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class EdgeError(Exception):
    """Base of every error Edgewise raises on purpose.

    Args:
        message: What was expected, what was found, where.
        help: The next step, as a command or a sentence; ``None`` where there is none.
    """

    def __init__(self, message: str, *, help: str | None = None) -> None:  # noqa: A002 - the word users see
        super().__init__(message)
        self.message = message
        self.help = help

    def __str__(self) -> str:
        return self.message if self.help is None else f"{self.message}\nhelp: {self.help}"


class ConfigError(EdgeError, ValueError):
    """A file, flag or argument the user wrote is wrong."""


class DataError(EdgeError, ValueError):
    """An input or a data set cannot be read or used."""


class ShapeError(DataError):
    """An array does not have the documented shape or dtype."""


class CheckpointError(EdgeError):
    """A saved model is missing, truncated, tampered with or written by a newer version."""


class ProfileError(EdgeError):
    """Measured costs are missing, stale, damaged or from another device."""


class ModelError(EdgeError):
    """A model cannot be staged: it has no legal cut, or cannot be exported."""


class BackendError(EdgeError):
    """A runtime refused or failed; its own message is the cause."""


class BackendUnavailable(BackendError):
    """The runtime is not installed, or has no such device here."""


class OpUnsupported(BackendError):
    """The runtime is here but cannot run this operator."""


class Infeasible(EdgeError):
    """No decision meets the constraints.

    Attributes:
        closest: The decision that comes nearest, or ``None``.
    """

    def __init__(self, message: str, *, closest: object = None, help: str | None = None) -> None:  # noqa: A002
        super().__init__(message, help=help)
        self.closest = closest


def nearest_names(name: str, known: Iterable[str]) -> str:
    """Say which known names look like a mistyped one.

    Args:
        name: What the user wrote.
        known: The names that exist.

    Returns:
        ``"did you mean 'a' or 'b'?"`` when something is close, else the list of all names.

    Example:
        >>> nearest_names("brachynet", ["branchynet", "oracle"])
        "did you mean 'branchynet'?"
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    if close:
        return "did you mean " + " or ".join(repr(c) for c in close) + "?"
    return "known names: " + ", ".join(names)
