"""Carries decisions out: requests, batches and sessions."""

from edgewise.runtime.executor import Answer, Outcome, execute
from edgewise.runtime.session import Session

__all__ = ["Answer", "Outcome", "Session", "execute"]
