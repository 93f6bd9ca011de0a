from __future__ import annotations

from collections.abc import Iterator

import pytest

from edgewise.reproduce import Reproduction, Setup, run_claim, uniexit_fig15
from edgewise.reproduce._predicted import LM
from edgewise.reproduce._simulated import Rows
from edgewise.reproduce.uniexit_fig15 import _verdicts, sweep


@pytest.fixture(scope="module", autouse=True)
def _short_training() -> Iterator[None]:
    """Nothing here judges the network."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uniexit_fig15, "_QUICK_STEPS", 100)
        yield


@pytest.fixture(scope="module")
def found() -> Reproduction:
    pytest.importorskip("safetensors")
    return run_claim("uniexit-fig15", Setup(quick=True, limit=60))


def test_every_predictor_has_a_row_at_every_coverage(found: Reproduction) -> None:
    shares = {f.name.rpartition(":")[0]: f for f in found.figures if f.name.endswith("DSR")}

    assert len(shares) == 2 * 3
    assert {f.provenance for f in found.figures} == {"simulated"}
    assert all(0 < (f.ours or 0) <= 100 for f in found.figures if f.name.endswith("DSR"))


def test_a_full_table_decides_as_the_physical_model_does(found: Reproduction) -> None:
    table, model = (found.details[f"resnet50 1.0 {kind}"][0] for kind in ("lut", "physical"))

    assert table["dsr"] == pytest.approx(model["dsr"], abs=0.02)
    assert table["mean_depth_ratio"] == pytest.approx(model["mean_depth_ratio"], abs=0.02)


def test_the_physical_model_does_not_need_more_states(found: Reproduction) -> None:
    few, every = (found.details[f"resnet50 {c} physical"][0] for c in (0.2, 1.0))

    assert few["dsr"] == pytest.approx(every["dsr"], abs=0.02)
    assert few["mean_depth_ratio"] == pytest.approx(every["mean_depth_ratio"], abs=0.01)


def test_the_same_seed_gives_the_same_rows() -> None:
    pytest.importorskip("safetensors")
    setup = Setup(quick=True, limit=8)

    first, second = (sweep("resnet50", (0.2,), seeds=(3,), setup=setup) for _ in range(2))

    assert {k: r.rows for k, r in first.items()} == {k: r.rows for k, r in second.items()}


def test_a_token_is_played_too_but_has_no_accuracy() -> None:
    pytest.importorskip("safetensors")
    setup = Setup(quick=True, limit=4)

    rows = sweep(LM, (1.0,), seeds=(0,), setup=setup)

    assert {key[2] for key in rows} == {"lut", "mlp", "physical"}


def test_a_table_that_stays_behind_at_full_coverage_fails_the_claim(
    found: Reproduction,
) -> None:
    from edgewise.bench.simulation import Row

    def rows(coverage: float, kind: str, **change: float) -> Rows:
        row = {**found.details[f"resnet50 {coverage} {kind}"][0], **change}
        return Rows(name=kind, rows=(Row(**row),))

    behind = {
        ("resnet50", c, kind): rows(c, kind, dsr=0.9 if kind == "lut" else 0.99)
        for c in (0.2, 1.0)
        for kind in ("lut", "mlp", "physical")
    }

    assert [v.holds for v in _verdicts("resnet50", behind)] == [True, False, True]
