from __future__ import annotations

import numpy as np
import pytest

from edgewise.predict.kinds.lut import StateTable
from edgewise.predict.predictor import fit_predictor
from edgewise.reproduce import Setup, run_claim
from edgewise.reproduce._predicted import ORIN, profiled, timed
from edgewise.reproduce.uniexit_table3 import accounting_figures, allocated_bytes, covered


def test_the_papers_two_memories_differ_by_one_dimension_of_clocks() -> None:
    figures = {f.name: f for f in accounting_figures()}

    ratio = figures["independent over synchronised"]
    assert (ratio.paper, ratio.ours) == (22.0, 22.0)
    # 464.6 bytes for each of 17,600 states are the paper's 7.80 MiB.
    assert figures["bytes per state"].paper == pytest.approx(7.80 * 2**20 / 17_600, rel=1e-3)


def test_a_table_weighs_at_least_its_arrays_and_grows_with_its_states() -> None:
    rng = np.random.default_rng(0)

    def table(count: int) -> StateTable:
        return StateTable(
            rng.random((count, 2)),
            rng.random((count, 4)),
            features=("cpu.frequency_ratio", "gpu.frequency_ratio"),
            units=("stage:0", "stage:1", "head:0", "head:1"),
        )

    small, large = table(500), table(2000)

    assert allocated_bytes(small) > small.num_bytes
    assert 3 < allocated_bytes(large) / allocated_bytes(small) < 5


def test_more_coverage_keeps_the_states_of_less() -> None:
    every = profiled(ORIN, "resnet50", seed=0, states=np.random.default_rng(1).random((50, 5)))

    few, more = (covered(every, share, seed=3).states for share in (0.2, 0.6))

    assert (len(few), len(more)) == (10, 30)
    assert {row.tobytes() for row in few} <= {row.tobytes() for row in more}


def test_calls_are_timed_in_turns_and_the_first_turn_does_not_count() -> None:
    turns: list[str] = []
    now = 0.0

    def tick(name: str, seconds: float) -> None:
        nonlocal now
        now += seconds if len(turns) > 2 else 100 * seconds
        turns.append(name)

    found = timed(
        {"a": lambda: tick("a", 1.0), "b": lambda: tick("b", 2.0)},
        rounds=3,
        repeats=1,
        now_s=lambda: now,
    )

    assert turns == ["a", "b"] * 4
    assert found["b"].p50_s == pytest.approx(2.0)
    assert found["a"].low_s is None  # three rounds are too few for an interval


def test_a_predictor_is_weighed_without_what_it_was_fitted_to() -> None:
    every = profiled(ORIN, "resnet50", seed=0, states=np.random.default_rng(2).random((400, 5)))
    fitted = fit_predictor("physical", every)

    assert fitted.num_bytes < allocated_bytes(fitted) < 100 * 1024


@pytest.fixture(scope="module")
def found():  # type: ignore[no-untyped-def]
    return run_claim("uniexit-table3", Setup(quick=True))


def test_arithmetic_and_what_was_measured_are_told_apart(found) -> None:  # type: ignore[no-untyped-def]
    assert {f.provenance for f in found.figures} == {"estimated", "measured"}
    assert all(f.provenance == "measured" for f in found.figures if f.unit == "s")


def test_a_full_table_weighs_more_than_any_predictor(found) -> None:  # type: ignore[no-untyped-def]
    weights = {name: row["bytes"] for name, row in found.details.items()}

    assert weights["resnet50 1.0 lut"] > 10 * weights["resnet50 1.0 mlp"]
    assert weights["resnet50 1.0 mlp"] > weights["resnet50 1.0 physical"]
    memory = [v for v in found.verdicts if "memory" in v.claim or "KiB" in v.claim]
    assert [v.holds for v in memory] == [True, True]
    assert len(found.charts) == 2
