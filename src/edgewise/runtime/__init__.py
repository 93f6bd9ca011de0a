"""Carries decisions out: requests, batches and sessions."""

from edgewise.runtime.answer import Answer, Outcome
from edgewise.runtime.session import Session

__all__ = ["Answer", "Outcome", "Session"]
