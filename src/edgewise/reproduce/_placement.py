"""What SwapLess's figures share: its mixes of networks, and rates that load the device equally."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from edgewise.device.accelerator import Accelerator, load_accelerator
from edgewise.placement.problem import Assumptions, Objective, Problem, Residency, Tenant
from edgewise.profiles.partition import PartitionProfile
from edgewise.profiles.shipped_partitions import load_partition_profile

Float64 = npt.NDArray[np.float64]

ACCELERATOR = "coral-usb"
CORES = 4  # of the paper's Raspberry Pi 5
NETS = (
    "squeezenet",
    "mobilenet_v2",
    "mnasnet",
    "efficientnet_b0",
    "gpunet_standin",
    "densenet201",
    "xception",
    "resnet50_v2",
    "inception_v4",
)
# The paper draws more mixes than its text names; the first four are named.
MIXES = (
    ("mobilenet_v2", "squeezenet"),
    ("efficientnet_b0", "gpunet_standin"),
    ("mobilenet_v2", "squeezenet", "resnet50_v2"),
    ("mnasnet", "inception_v4"),
    ("gpunet_standin", "densenet201"),
    ("efficientnet_b0", "xception"),
    ("mobilenet_v2", "efficientnet_b0", "densenet201"),
    ("mobilenet_v2", "mnasnet", "xception", "inception_v4"),
)
SHORT = {
    "squeezenet": "Sqz",
    "mobilenet_v2": "Mob",
    "mnasnet": "Mnas",
    "efficientnet_b0": "Eff",
    "gpunet_standin": "GPU*",
    "densenet201": "Dense",
    "xception": "Xcep",
    "resnet50_v2": "Res",
    "inception_v4": "Inc4",
}
"""For axes of figures."""

MADE = (
    "profiles: CPU measured on a two-core machine, accelerator simulated from Coral's public table"
)


def profiles(names: Sequence[str]) -> list[PartitionProfile]:
    """Read the shipped profiles of some networks."""
    return [load_partition_profile(name) for name in names]


def device() -> Accelerator:
    """Coral's USB accelerator, as its public figures describe it."""
    return load_accelerator(ACCELERATOR)


def tenants(
    found: Sequence[PartitionProfile], rates_per_s: Sequence[float] | Float64
) -> tuple[Tenant, ...]:
    """One tenant for each profile, called as its network."""
    return tuple(
        Tenant(name=profile.model_id, profile=profile, rate_per_s=float(rate))
        for profile, rate in zip(found, rates_per_s, strict=True)
    )


def problem(  # noqa: PLR0913 - a problem's circumstances
    found: Sequence[PartitionProfile],
    rates_per_s: Sequence[float] | Float64,
    *,
    cores: int = CORES,
    assumptions: Assumptions | None = None,
    residency: Residency = "switch",
    objective: Objective = "mean",
) -> Problem:
    """Put networks at given rates on the simulated device."""
    return Problem.of(
        tenants(found, rates_per_s),
        device(),
        cores=cores,
        assumptions=assumptions,
        residency=residency,
        objective=objective,
    )


def rates_for(
    found: Sequence[PartitionProfile],
    accelerator: Accelerator,
    busy: float,
    *,
    equal: Literal["load", "rates"],
) -> Float64:
    """Rates that keep the accelerator busy with everything on it, as its compiler leaves it.

    Reloading is counted unless all fit together: Σ λ_i (s_i + α_i T_i) = busy. The shares q_i do
    not depend on the common factor of the rates, so it follows directly.

    Args:
        found: Profiles.
        accelerator: What they share.
        busy: Its utilisation, 0 to 1.
        equal: Whether every network loads the accelerator alike (λ_i = x / s_i, the paper's Figure
            6), or is asked alike (its Figure 7).

    Returns:
        [n] requests per second.
    """
    alone = problem(found, np.ones(len(found)))
    places = alone.last
    rows = np.arange(len(found))
    service, load = alone.service_s[rows, places], alone.load_s[rows, places]
    rates = 1 / service if equal == "load" else np.ones(len(found))
    shares = rates / rates.sum()
    together = float(alone.prefix_bytes[rows, places].sum()) <= accelerator.sram_bytes
    miss = np.zeros(len(found)) if together or len(found) == 1 else 1 - shares
    return np.asarray(rates * busy / float((rates * (service + miss * load)).sum()))
