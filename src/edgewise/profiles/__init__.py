"""Measured costs: what they are, what may be concluded from them, and where they are kept.

Nothing here measures (``edgewise.profiling`` does) or predicts (``edgewise.predict`` does).
"""

from edgewise.profiles.campaign import Campaign
from edgewise.profiles.exchange import read_profile, write_profile
from edgewise.profiles.records import (
    Cost,
    Method,
    Profile,
    Provenance,
    ThreadPolicy,
    UnitKey,
    UnitKind,
)
from edgewise.profiles.statistics import (
    Interval,
    Steadiness,
    conformal_quantile,
    median,
    median_bootstrap_interval,
    quantile,
    quantile_interval,
    rank_sum_p_value,
    steady,
)
from edgewise.profiles.store import ProfileStore, ProfileSummary, default_store_path

__all__ = [
    "Campaign",
    "Cost",
    "Interval",
    "Method",
    "Profile",
    "ProfileStore",
    "ProfileSummary",
    "Provenance",
    "Steadiness",
    "ThreadPolicy",
    "UnitKey",
    "UnitKind",
    "conformal_quantile",
    "default_store_path",
    "median",
    "median_bootstrap_interval",
    "quantile",
    "quantile_interval",
    "rank_sum_p_value",
    "read_profile",
    "steady",
    "write_profile",
]
