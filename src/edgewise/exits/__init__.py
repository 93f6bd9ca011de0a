"""Decider 1: how deep may this request run before its budget ends?

Pure: decisions are functions of numbers, the present instant among them.
"""

from edgewise.exits.policy import (
    ANSWER,
    LATE,
    LOOK,
    REJECT,
    Policy,
    PolicyInputs,
    Step,
    check_policy_name,
    make_policy,
    policy_names,
)
from edgewise.exits.router import Publisher, RouterTable

__all__ = [
    "ANSWER",
    "LATE",
    "LOOK",
    "REJECT",
    "Policy",
    "PolicyInputs",
    "Publisher",
    "RouterTable",
    "Step",
    "check_policy_name",
    "make_policy",
    "policy_names",
]
