"""Fixed shares of the accelerator's memory, decided together with the cuts.

Nothing is ever displaced; what has no memory streams with every call. Cuts and cores as `best`
would find them with memory filled hot first; the shares of the best plan are then improved by
moving bytes between tenants.

Source:
    SPET (DAC 2023) decides memory per model on one device by integer programming.
"""

from __future__ import annotations

from dataclasses import replace

from edgewise.placement.methods import best
from edgewise.placement.problem import Problem
from edgewise.placement.search import Found


def find(problem: Problem) -> Found:
    """Search among plans with fixed shares.

    Args:
        problem: Tenants and device.

    Raises:
        ConfigError: The device gives models no fixed shares of its memory.
    """
    found = best.find(problem.with_residency("pinned"), residency="pinned")
    return replace(found, method="pinned")
