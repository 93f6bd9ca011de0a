from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgewise.device.accelerator import load_accelerator
from edgewise.errors import ConfigError
from edgewise.placement.forecast import forecast
from edgewise.placement.plan import make_placement, placement_text, read_shares
from edgewise.placement.problem import Problem
from edgewise.placement.study import random_mixes

CORAL = load_accelerator("coral-usb")


@pytest.fixture(scope="module")
def problem() -> Problem:
    return random_mixes(1, CORAL, seed=2)[0]


def test_a_plan_says_what_the_forecast_says(problem: Problem) -> None:
    found = forecast(problem, np.array([[4, 8]]), np.array([[2, 2]]))

    plan = make_placement(problem, [4, 8], [2, 2], method="hand")

    assert plan.stable
    assert plan.score == found.score[0]
    assert [p.response_s for p in plan.predicted] == found.response_s[0].tolist()
    assert plan.predicted[0].response_s < plan.predicted[0].p95_s < plan.predicted[0].p99_s
    assert plan.shares[0].cut == problem.tenants[0].profile.cuts[4]
    assert plan.predicted[0].deadline_miss is None


def test_a_plan_that_cannot_run_has_an_infinite_score(problem: Problem) -> None:
    plan = make_placement(problem, [0, 0], [4, 0], method="hand")

    assert not plan.stable
    assert math.isinf(plan.score)
    assert math.isinf(plan.predicted[1].p99_s)
    assert json.loads(placement_text(plan))["score"] is None


@pytest.mark.parametrize("residency", ["switch", "pinned"])
def test_a_file_gives_the_plan_back(problem: Problem, residency: Any, tmp_path: Path) -> None:
    asked = problem.with_residency(residency)
    shares = [4e6, 2e6] if residency == "pinned" else None
    plan = make_placement(asked, [4, 8], [2, 2], shares_bytes=shares, method="hand")
    file = tmp_path / "plan.json"
    file.write_text(placement_text(plan))

    again = read_shares(file, asked)

    assert again.shares == plan.shares
    assert again.score == plan.score


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(("place", 11), "its places are 0 to 10", id="no such place"),
        pytest.param(("place", 3), "the profile has changed", id="another cut"),
        pytest.param(("place", -1), "whole number of zero or more", id="below the first"),
        pytest.param(("cores", 4), "6 cores are given away, 4 are there", id="too many cores"),
        pytest.param(("cores", 0), "no core to run it", id="no core"),
        pytest.param(("cores", True), "whole number", id="no number"),
        pytest.param(("tenant", "t7"), "its tenants are", id="unknown tenant"),
        pytest.param(("sram_bytes", 10**9), "accelerator memory are given away", id="memory"),
        pytest.param(("coers", 1), "unknown key 'coers'", id="unknown key"),
    ],
)
def test_a_file_edited_by_hand_is_checked(
    problem: Problem, change: tuple[str, Any], message: str, tmp_path: Path
) -> None:
    found = json.loads(placement_text(make_placement(problem, [4, 8], [2, 2], method="hand")))
    found["shares"][0][change[0]] = change[1]
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(found))

    with pytest.raises(ConfigError, match=message):
        read_shares(file, problem)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "edgewise-placement", "version": 9}'])
def test_what_is_no_plan_is_refused(problem: Problem, text: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(text)

    with pytest.raises(ConfigError):
        read_shares(file, problem)
