from __future__ import annotations

import pytest

from edgewise.device.accelerator import load_accelerator
from edgewise.errors import ConfigError
from edgewise.placement.search import search
from edgewise.placement.study import random_mixes


def test_too_many_plans_are_refused_with_their_number() -> None:
    problem = random_mixes(3, load_accelerator("coral-usb"), seed=0)[2]

    # 11 places of four tenants, and 70 ways to give at most 4 cores to them.
    with pytest.raises(ConfigError, match="1024870 plans are too many"):
        search(problem, "exhaustive")
