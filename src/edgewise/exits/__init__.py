"""Decider 1: how deep may this request run before its budget ends?

Pure: decisions are functions of numbers, the present instant among them.
"""

from edgewise.exits.policy import ANSWER, REJECT, Policy, PolicyInputs, make_policy, policy_names
from edgewise.exits.router import Publisher, RouterTable

__all__ = [
    "ANSWER",
    "REJECT",
    "Policy",
    "PolicyInputs",
    "Publisher",
    "RouterTable",
    "make_policy",
    "policy_names",
]
