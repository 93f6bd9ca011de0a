from __future__ import annotations

import pytest

from edgewise.bench.simulation import Row
from edgewise.predict.conformal import Coverage
from edgewise.reproduce import Setup, run_claim
from edgewise.reproduce._simulated import Rows
from edgewise.reproduce.uniexit_table7 import (
    _LEVELS,
    _conformal,
    _conformal_verdict,
    _coverage_verdict,
)


def rows_at(points: dict[str, tuple[float, float]]) -> dict[str, Rows]:
    """DSR and depth by name."""
    return {
        name: Rows(
            name=name,
            rows=(
                Row(
                    policy=name,
                    requests=100,
                    feasible_ratio=1.0,
                    dsr=dsr,
                    dsr_all=dsr,
                    mean_depth_ratio=depth,
                    depth_of_oracle=depth,
                    accuracy=0.9,
                    right_in_time=0.9,
                    premature_ratio=0.0,
                    mean_s=0.01,
                    p99_s=0.01,
                    energy_j=0.1,
                ),
            ),
        )
        for name, (dsr, depth) in points.items()
    }


FRONT = {
    _conformal(level): point
    for level, point in zip(
        _LEVELS, [(0.99, 0.5), (0.98, 0.6), (0.97, 0.65), (0.96, 0.7)], strict=True
    )
}


@pytest.mark.parametrize(
    ("fallback", "holds"),
    [
        pytest.param((0.975, 0.60), True, id="a level has both"),
        pytest.param((0.985, 0.54), True, id="between two levels the front is above"),
        pytest.param((0.985, 0.56), False, id="between two levels the front is below"),
        pytest.param((0.995, 0.40), True, id="more in time than all levels, and not as deep"),
        pytest.param((0.995, 0.55), False, id="more in time and deeper than the safest level"),
        pytest.param((0.950, 0.75), None, id="fewer in time than all levels, and deeper"),
    ],
)
def test_conformal_margins_are_compared_where_as_many_are_in_time(
    fallback: tuple[float, float], *, holds: bool | None
) -> None:
    assert _conformal_verdict("net", rows_at(FRONT | {"fallback": fallback})).holds is holds


def test_coverage_a_point_and_a_half_off_does_not_hold() -> None:
    good = {0.9: Coverage(nominal=0.9, covered=9050, count=10000)}
    bad = {0.9: Coverage(nominal=0.9, covered=9150, count=10000)}

    assert _coverage_verdict(good).holds is True
    assert _coverage_verdict(bad).holds is False


def test_coverage_of_few_units_cannot_be_judged() -> None:
    assert _coverage_verdict({0.9: Coverage(nominal=0.9, covered=0, count=10)}).holds is None


def test_every_margin_is_played_with_an_old_and_a_fresh_state() -> None:
    pytest.importorskip("safetensors")

    found = run_claim("uniexit-table7", Setup(quick=True, limit=40))

    assert {f.provenance for f in found.figures} == {"simulated"}
    names = [f.name for f in found.figures]
    for player in ("no margin", "p95", "fallback", "edgewise", *map(_conformal, _LEVELS)):
        assert f"ResNet-50, Orin Nano, {player}: in time" in names
    assert "ResNet-50, Orin Nano, fallback, fresh state: in time" in names
    gain = next(f for f in found.figures if "gain" in f.name)
    assert gain.paper == pytest.approx(4.19)
