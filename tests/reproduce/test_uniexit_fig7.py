from __future__ import annotations

from dataclasses import replace

import pytest

from edgewise.bench.simulation import Row
from edgewise.reproduce import Setup, run_claim
from edgewise.reproduce._simulated import PLAYERS, Rows
from edgewise.reproduce.uniexit_fig7 import _verdicts

ROW = Row(
    policy="x",
    requests=100,
    feasible_ratio=1.0,
    dsr=0.5,
    dsr_all=0.5,
    mean_depth_ratio=0.5,
    depth_of_oracle=0.5,
    accuracy=0.9,
    right_in_time=0.45,
    premature_ratio=0.1,
    mean_s=0.01,
    p99_s=0.02,
    energy_j=0.1,
)


def made_up(*, dsr: float = 0.99, depth: float = 0.97) -> dict[str, Rows]:
    rows = {name: Rows(name=name, rows=(ROW,)) for name in (*PLAYERS, "oracle")}
    ours = replace(ROW, dsr=dsr, depth_of_oracle=depth)
    return rows | {"edgewise": Rows(name="edgewise", rows=(ours,))}


@pytest.mark.parametrize(
    ("edgewise", "held"),
    [
        pytest.param({}, [True, True, True], id="in time and deep"),
        pytest.param({"dsr": 0.97}, [False, True, True], id="late too often"),
        pytest.param({"depth": 0.94}, [True, False, True], id="too shallow"),
        pytest.param({"dsr": 0.4}, [False, True, False], id="worse than a static profile"),
    ],
)
def test_each_verdict_can_fail_alone(edgewise: dict[str, float], held: list[bool]) -> None:
    assert [v.holds for v in _verdicts("net", made_up(**edgewise))] == held


def test_every_policy_is_played_and_the_oracle_is_last() -> None:
    pytest.importorskip("safetensors")

    found = run_claim("uniexit-fig7", Setup(quick=True, limit=25))

    assert {f.provenance for f in found.figures} == {"simulated"}
    (rows,) = found.details.values()
    assert list(rows) == [*PLAYERS, "oracle"]
    assert [f.paper for f in found.figures if f.paper is not None] == [98.56]
    assert rows["oracle"][0]["dsr"] == 1.0
    assert rows["edgewise"][0]["dsr"] > rows["static_table"][0]["dsr"]
