"""Baseline: from the last layer backwards, a layer goes to the CPU while that is hardly slower.

Looks at one model at a time: no queues, no other tenants.

Source:
    Ng et al., SwapLess (arXiv:2602.17808), section V-A3, "Threshold-based Partitioning".
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgewise.errors import ConfigError
from edgewise.placement.problem import Problem
from edgewise.placement.scores import Scores
from edgewise.placement.search import Found, chosen


def find(problem: Problem, *, within_ratio: float = 0.1) -> Found:
    """Cut each model where the accelerator stops being clearly faster.

    Args:
        problem: Tenants and device.
        within_ratio: How much slower a layer may be on the CPU.

    Raises:
        ConfigError: The ratio is negative.
    """
    if within_ratio < 0:
        raise ConfigError(f"expected within_ratio of zero or more, found {within_ratio!r}")
    scores = Scores(problem.with_residency("switch"))
    places = threshold_places(problem, within_ratio=within_ratio)[None]
    return chosen(
        scores, places[0], scores.proportional(places)[0], method="threshold", evaluated=1
    )


def threshold_places(problem: Problem, *, within_ratio: float = 0.1) -> npt.NDArray[np.int64]:
    """Where the rule cuts each model, [n].

    A layer costs what the prefix grows by, streaming included; the CPU has one thread.

    Args:
        problem: Tenants and device.
        within_ratio: As for `find`.
    """
    found = problem.last.copy()
    if problem.accelerator is None:
        return found
    for i, tenant in enumerate(problem.tenants):
        streamed = np.maximum(problem.prefix_bytes[i] - problem.sram_bytes[i], 0.0)
        stream_s = streamed[: tenant.profile.last + 1] / problem.accelerator.in_bytes_per_s
        accelerated_s = np.diff(tenant.profile.accelerator_s + stream_s)
        cpu_s = -np.diff(tenant.profile.cpu_s[:, 0])
        while (
            found[i] > 0 and cpu_s[found[i] - 1] <= (1 + within_ratio) * accelerated_s[found[i] - 1]
        ):
            found[i] -= 1
    return found
