"""Measuring campaigns: what the units of a model cost on this machine, sample by sample.

This is the only place that times models; `edgewise.profiles` keeps what it finds.
"""

from __future__ import annotations

from edgewise.profiling.campaign import CONTROLLER, Progress, measure
from edgewise.profiling.effort import QUICK, THOROUGH, Effort, steadiness, unit_steadiness
from edgewise.profiling.find import device_record, find_profile, thread_policy
from edgewise.profiling.state import campaign_notes

__all__ = [
    "CONTROLLER",
    "QUICK",
    "THOROUGH",
    "Effort",
    "Progress",
    "campaign_notes",
    "device_record",
    "find_profile",
    "measure",
    "steadiness",
    "thread_policy",
    "unit_steadiness",
]
