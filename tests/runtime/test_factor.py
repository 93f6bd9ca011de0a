from __future__ import annotations

import math
from typing import Any

import pytest

from edgewise.runtime.executor import execute


@pytest.mark.parametrize("budget_s", [0.9, 1.3, 2.3, 3.3, 4.3, math.inf])
@pytest.mark.parametrize("factor", [0.5, 1.0, 4.0])
def test_a_request_that_costs_a_factor_more_goes_as_deep_with_a_factor_more_time(
    make_session: Any, x: Any, budget_s: float, factor: float
) -> None:
    def run(factor: float) -> Any:
        session = make_session(slower=factor)
        return execute(
            session._setting, x, budget_s=budget_s * factor, arrival_s=0.0, factor=factor
        )

    one, many = run(1.0), run(factor)

    assert many.exit_index == one.exit_index
    assert many.feasible == one.feasible
    assert many.observed_s == pytest.approx(one.observed_s * factor)
    assert many.predicted_s == pytest.approx(one.predicted_s * factor)
