from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgewise.bench.quota import CpuQuota, QuotaUnavailable
from edgewise.bench.throttle import Repetition, Request, ThrottleRow
from edgewise.cli.output import to_plain
from edgewise.errors import ConfigError
from edgewise.report.evaluation import Estimate
from edgewise.reproduce import Setup, real_throttle, run_claim
from edgewise.reproduce.real_throttle import _running_mean, charts, figures, judge

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="co-runners need Linux")


def estimate(value: float) -> Estimate:
    return Estimate(value=value, low=value - 0.02, high=value + 0.02)


def row(policy: str, *, dsr: float = 1.0, depth: float = 0.8, **changes: Any) -> ThrottleRow:
    made = ThrottleRow(
        policy=policy,
        requests=100,
        dsr=estimate(dsr),
        mean_depth_ratio=estimate(depth),
        depth_of_oracle=estimate(depth / 0.8),
        accuracy=estimate(0.9),
        right_in_time=estimate(0.9 * dsr),
        p50_s=0.01,
        p99_s=0.02,
    )
    return replace(made, **changes)


def held(*rows: ThrottleRow) -> list[bool | None]:
    return [verdict.holds for verdict in judge(rows)]


ORACLE = row("oracle")


def test_deadlines_depth_and_rivals_are_judged_apart() -> None:
    rival = row("spinn", dsr=0.99, depth=0.5)

    assert held(row("edgewise", dsr=0.95, depth=0.73), rival, ORACLE) == [True, True, True]
    assert held(row("edgewise", dsr=0.94, depth=0.8), rival, ORACLE) == [False, True, True]
    assert held(row("edgewise", dsr=1.0, depth=0.7), rival, ORACLE) == [True, False, True]


@pytest.mark.parametrize("name", ["spinn", "static_table_scaled"])
@pytest.mark.parametrize(
    ("dsr", "depth", "holds"),
    [(0.97, 0.85, False), (0.97, 0.75, True), (0.95, 0.85, True)],
    ids=["better in both", "better in time only", "deeper only"],
)
def test_a_rival_with_a_scale_factor_must_not_be_better_in_both(
    name: str, dsr: float, depth: float, *, holds: bool
) -> None:
    assert held(row("edgewise", dsr=0.96), row(name, dsr=dsr, depth=depth), ORACLE)[2] is holds


def test_a_rival_without_a_scale_factor_does_not_count() -> None:
    assert held(row("edgewise", dsr=0.96), row("branchynet", depth=0.9), ORACLE)[2] is None


def test_without_hindsight_depth_cannot_be_judged() -> None:
    assert held(row("edgewise", depth_of_oracle=None), row("spinn"))[1] is None


def test_a_limit_that_does_not_exist_is_no_number() -> None:
    once = Estimate(value=0.9, low=float("-inf"), high=float("inf"))
    found = figures([row("edgewise", dsr=0.9)], "measured")
    assert found[0].low == pytest.approx(88.0)

    (first, *_) = figures([replace(row("edgewise"), dsr=once)], "measured")
    assert (first.ours, first.low, first.high) == (90.0, None, None)


def test_the_figure_needs_neither_a_quota_nor_a_co_runner() -> None:
    shown = Repetition(
        requests=(
            Request(
                policy="edgewise", at_s=1.0, depth_ratio=0.5, latency_s=0.01, met=True, right=True
            ),
        ),
        quotas=(),
        loads=(),
    )
    drawn = charts([row("edgewise")], shown, budget_s=0.02, provenance="measured")

    assert [list(s.y) for s in drawn[0].series] == [[1.0, 1.0]]
    assert [list(s.y) for s in drawn[2].series] == [[0.5]]


def left_behind() -> list[str]:
    """Threads and control groups that only a claim would have made."""
    names = [t.name for t in threading.enumerate() if t.name.startswith("edgewise")]
    try:
        with CpuQuota() as quota:
            assert quota.group is not None
            home = quota.group.parent
    except QuotaUnavailable:
        return names
    return names + [each.name for each in home.glob("edgewise-*")]


def run_quick(checkpoint: Path, images: Path, tmp_path: Path) -> Any:
    return run_claim(
        "real-throttle",
        Setup(
            models=(str(checkpoint),),
            data=str(images),
            backend="onnxruntime:CPU",
            store=tmp_path / "profiles.sqlite",
            quick=True,
        ),
    )


@pytest.mark.usefixtures("whole_machine")  # others' control groups would count as left behind
def test_the_claim_runs_and_leaves_nothing_behind(
    checkpoint: Path, images: Path, tmp_path: Path
) -> None:
    found = run_quick(checkpoint, images, tmp_path)

    rows = found.details["rows"]
    assert {"edgewise", "static_table", "spinn", "branchynet", "full_depth", "oracle"} <= set(rows)
    assert {f.provenance for f in found.figures} == {"measured"}
    assert len(found.verdicts) == 3
    assert found.details["budget_s"] == pytest.approx(1.5 * found.details["full_depth_s"])
    assert any("1.5 times the median" in note for note in found.notes)
    json.dumps(to_plain(found), allow_nan=False)
    assert left_behind() == []


@pytest.mark.usefixtures("whole_machine")
def test_without_permission_co_runners_alone_disturb_and_the_notes_say_why(
    checkpoint: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_periods_s: Sequence[float], *, seconds: float) -> None:
        assert seconds > 0
        raise QuotaUnavailable("no permission here")

    monkeypatch.setattr(real_throttle, "quota_effect", refuse)
    found = run_quick(checkpoint, images, tmp_path)

    assert "co-runners only, no CPU quota: no permission here" in found.notes
    assert found.details["time_line"]["quotas"] == []
    assert found.details["time_line"]["loads"]
    assert "runs without the device's state" in " ".join(found.notes)
    assert "edgewise_without_state" not in found.details["rows"]
    assert left_behind() == []


def test_several_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected one model, found a, b"):
        run_claim("real-throttle", Setup(models=("a", "b")))


def test_a_running_mean_is_over_the_last_ten_requests() -> None:
    assert _running_mean([1.0, 0.0, 0.5]) == [1.0, 0.5, 0.5]
    assert _running_mean([float(n) for n in range(20)])[-1] == pytest.approx(14.5)
