"""The two claims on learned selectors, with few trees."""

from __future__ import annotations

import pytest

from edgewise.reproduce import Reproduction, Setup, run_claim

pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def table1() -> Reproduction:
    return run_claim("dispatch-table1", Setup(quick=True))


@pytest.fixture(scope="module")
def table2() -> Reproduction:
    models = ("qwen2.5-0.5b", "qwen3-0.6b", "tinyllama-1.1b", "smollm2-360m")
    return run_claim("dispatch-table2", Setup(quick=True, models=models))


def test_table_1_has_the_papers_counts(table1: Reproduction) -> None:
    counts = {f.name: (f.paper, f.ours) for f in table1.figures if f.unit == "count"}

    assert len(counts) == 5
    assert all(paper == ours for paper, ours in counts.values())


def test_table_1_sets_accuracies_beside_the_papers_and_selectors_beside_one_backend(
    table1: Reproduction,
) -> None:
    by_name = {f.name: f for f in table1.figures}
    first = by_name["latency, operator-local: accuracy"]
    regret = by_name["latency, operator-local: regret"]
    one = by_name["latency, operator-local: regret of one backend for all"]

    assert first.paper == 0.8741
    assert first.ours is not None
    assert 0.5 < first.ours < 1
    assert regret.ours is not None
    assert one.ours is not None
    assert 0 < regret.ours < one.ours
    assert by_name["EDP, transition-aware: accuracy"].paper == 0.9005


def test_table_1_does_not_judge_the_boards_regrets_by_simulated_costs(
    table1: Reproduction,
) -> None:
    verdict = next(v for v in table1.verdicts if v.claim.startswith("regrets below"))

    assert verdict.holds is None
    assert "simulated" in verdict.detail


def test_table_2_keeps_every_model_above_the_floor_with_the_guard(table2: Reproduction) -> None:
    guarded = [f.ours for f in table2.figures if f.name.endswith("guarded")]
    verdict = next(v for v in table2.verdicts if v.claim.startswith("with the guard"))

    simulated = [f for f in table2.figures if f.provenance == "simulated"]
    assert len([f for f in simulated if f.name.endswith(": learned")]) == 4 * 3
    assert verdict.holds is (min(ours for ours in guarded if ours is not None) >= -1)
    assert all(f.paper is None for f in table2.figures)  # fewer models than in the paper


def test_table_2_plans_from_a_few_shapes_without_losing_to_one_backend(
    table2: Reproduction,
) -> None:
    few = [f for f in table2.figures if f.name.endswith("few shapes measured")]

    assert few
    assert all(f.ours is not None and f.ours > -1 for f in few)
    assert all(f.note.endswith("shapes") for f in few)


def test_measured_and_simulated_figures_are_told_apart(
    table1: Reproduction, table2: Reproduction
) -> None:
    for found in (table1, table2):
        assert {f.provenance for f in found.figures} == {"simulated", "measured"}
        for figure in found.figures:
            if figure.paper is not None:
                assert figure.provenance == "simulated"
