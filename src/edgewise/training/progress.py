"""What a long job says while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far one phase of a job is.

    Attributes:
        phase: ``"backbone"``, ``"features"``, ``"fit"`` or ``"validate"``.
        done: Units finished, those of an earlier run included.
        total: Units of the whole phase; fewer may do where a fit stops early.
        detail: What is being worked on, a few words.
    """

    phase: str
    done: int
    total: int
    detail: str = ""


OnProgress = Callable[[Progress], None]


def ignore_progress(progress: Progress) -> None:
    """Say nothing."""
