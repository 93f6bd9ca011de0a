"""Claims of the papers, one file each: what they say, what we get, and whether it holds.

A file here named ``uniexit_table6.py`` is the claim ``uniexit-table6``. It has ``TITLE`` and
``run(setup) -> Reproduction``, and is imported when it is asked for.
"""

from edgewise.reproduce.registry import (
    Figure,
    Reproduction,
    Setup,
    Verdict,
    claim_ids,
    claim_title,
    run_claim,
)

__all__ = [
    "Figure",
    "Reproduction",
    "Setup",
    "Verdict",
    "claim_ids",
    "claim_title",
    "run_claim",
]
