from __future__ import annotations

import csv
import io
import math

import pytest

from edgewise.dispatch.problem import Totals
from edgewise.dispatch.replay import Gain, Outcome, Replay, Row
from edgewise.profiles.records import ThreadPolicy
from edgewise.report.dispatch import MEAN, gain_charts, replay_csv, switch_charts


def outcome(method: str, seconds: float, switches: int) -> Outcome:
    gain = 1 - seconds / 10
    return Outcome(
        method=method,
        totals=Totals(
            latency_s=seconds,
            energy_j=None,
            switch_s=0.0,
            gap_s=0.0,
            backend_switches=switches,
            device_switches=0,
            framework_switches=switches,
        ),
        gain=Gain(ratio=gain, low=gain - 0.1, high=gain + 0.1),
        exact=False,
        operators={"torch:cpu": 3},
    )


@pytest.fixture(name="found")
def two_models() -> Replay:
    rows = tuple(
        Row(
            model=name,
            objective="latency",
            instances=3,
            baseline="torch:cpu",
            statics={},
            outcomes={"local": outcome("local", 9, 4), "greedy": outcome("greedy", seconds, 3)},
        )
        for name, seconds in (("a-base", 8.0), ("b-1b", 6.0))
    )
    return Replay(
        table="made",
        provenance="measured",
        device_id="here",
        thread_policy=ThreadPolicy(threads=1),
        state="calm",
        backends=("torch:cpu",),
        segments=False,
        rows=rows,
        means={("latency", "greedy"): Gain(ratio=0.3, low=0.2, high=0.4)},
    )


def test_gains_are_per_cent_with_their_intervals_and_the_mean_last(found: Replay) -> None:
    paper = {("latency", "paper"): [17.0, None, 17.4]}

    (chart,) = gain_charts([found], methods=["greedy"], paper=paper)  # type: ignore[arg-type]

    ours, theirs = chart.series
    assert list(ours.x) == ["a", "b 1b", MEAN]
    assert list(ours.y) == pytest.approx([20, 40, 30])
    assert list(ours.low) == pytest.approx([10, 30, 20])
    assert theirs.name == "paper"
    assert chart.provenance == "measured and paper"


def test_switches_are_counted_over_all_models_and_none_is_no_share(found: Replay) -> None:
    (chart,) = switch_charts([found], methods=["greedy"])

    assert list(chart.series[0].y) == [75.0, None, 75.0]


def test_energy_that_is_not_known_is_an_empty_cell(found: Replay) -> None:
    lines = list(csv.DictReader(io.StringIO(replay_csv(found))))

    assert len(lines) == 4
    assert {line["energy_j"] for line in lines} == {""}
    assert math.isclose(float(lines[1]["gain_ratio"]), 0.2)
