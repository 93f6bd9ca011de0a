from __future__ import annotations

import pytest

from edgewise.reproduce import Setup, run_claim

pytest.importorskip("safetensors")


def test_tighter_deadlines_are_played_and_infeasible_requests_counted_apart() -> None:
    found = run_claim("uniexit-fig13", Setup(quick=True, limit=40))

    (by_ratio,) = found.details.values()
    feasible = [rows["oracle"][0]["feasible_ratio"] for rows in by_ratio.values()]
    depths = [rows["oracle"][0]["mean_depth_ratio"] for rows in by_ratio.values()]
    assert list(by_ratio) == ["0.25", "0.5", "0.75", "1"]
    # At the lowest clocks the first exit takes longer than 4 ms, and never 16 ms.
    assert feasible[0] < 0.8
    assert feasible[-1] == 1.0
    assert depths[1:] == sorted(depths[1:])
    assert len(found.verdicts) == 1
    assert "have a feasible exit" in found.figures[0].note
