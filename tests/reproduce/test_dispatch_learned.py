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


def test_table_2_judges_the_guard_by_its_worst_model(table2: Reproduction) -> None:
    for claim, ending in (
        ("with the guard", ": guarded and tried"),
        ("nor where its plan", ": guarded"),
        ("nor where nothing", ": guarded, nothing measured"),
    ):
        verdict = next(v for v in table2.verdicts if v.claim.startswith(claim))
        simulated = [f for f in table2.figures if f.provenance == "simulated"]
        gains = [f.ours for f in simulated if f.name.endswith(ending)]
        known = [gain for gain in gains if gain is not None]

        assert len(known) == 4 * 3
        assert verdict.holds is (min(known) >= -1)
    assert all(f.paper is None for f in table2.figures)  # fewer models than in the paper


def test_table_2_says_how_many_shapes_a_measured_plan_takes(table2: Reproduction) -> None:
    found = [f for f in table2.figures if " of " in f.note and f.note.endswith("shapes")]

    assert len(found) == 4 * (3 + 1)  # objectives of the simulated table, latency of the measured
    for figure in found:
        some, of, every, _ = figure.note.split()
        assert of == "of"
        assert int(some) < int(every)


def test_measured_and_simulated_figures_are_told_apart(
    table1: Reproduction, table2: Reproduction
) -> None:
    for found in (table1, table2):
        assert {f.provenance for f in found.figures} == {"simulated", "measured"}
        for figure in found.figures:
            if figure.paper is not None:
                assert figure.provenance == "simulated"
