from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgewise.report.evaluation import Estimate, Evaluation, EvaluationRow
from edgewise.reproduce import Setup, run_claim
from edgewise.reproduce.uniexit_fig5 import judge


def estimate(value: float) -> Estimate:
    return Estimate(value=value, low=value - 0.02, high=value + 0.02)


def row(policy: str, *, dsr: float, accuracy: float, **changes: Any) -> EvaluationRow:
    made = EvaluationRow(
        policy=policy,
        budget_ratio=1.0,
        budget_s=0.01,
        requests=100,
        dsr=estimate(dsr),
        accuracy=estimate(accuracy),
        accuracy_in_time=estimate(dsr * accuracy),
        mean_depth_ratio=estimate(0.9),
        flops_ratio=estimate(0.9),
        mean_s=0.009,
        p50_s=0.009,
        p99_s=0.01,
    )
    return replace(made, **changes)


def evaluation(*rows: EvaluationRow) -> Evaluation:
    return Evaluation(
        model="net",
        backend="null",
        threads=1,
        data="",
        full_depth_s=0.01,
        provenance="simulated",
        rows=rows,
        skipped={},
        energy_note="",
    )


MINE = row("edgewise", dsr=0.99, accuracy=0.8)


def test_the_most_accurate_policy_in_time_wins() -> None:
    found = judge(
        evaluation(
            MINE,
            row("late", dsr=0.9, accuracy=0.99),
            row("oracle", dsr=1.0, accuracy=0.95, is_bound=True),
            row("edgewise_saving", dsr=1.0, accuracy=0.9),
            row("msdnet", dsr=0.98, accuracy=0.7),
        )
    )

    assert found.holds is True
    assert "70.0 %" in found.detail


@pytest.mark.parametrize(
    ("edge", "holds"),
    [
        (Estimate(value=-0.02, low=-0.05, high=0.01), True),
        (Estimate(value=-0.1, low=-0.2, high=-0.01), False),
    ],
    ids=["inside the interval", "outside the interval"],
)
def test_a_rival_that_is_better_wins_only_outside_the_interval(
    edge: Estimate, *, holds: bool
) -> None:
    rival = row("msdnet", dsr=1.0, accuracy=0.85, edge_over=edge)

    assert judge(evaluation(MINE, rival)).holds is holds


def test_who_misses_deadlines_itself_has_not_won() -> None:
    assert judge(evaluation(row("edgewise", dsr=0.9, accuracy=0.99))).holds is False


def test_without_rivals_in_time_it_wins_and_says_so() -> None:
    found = judge(evaluation(MINE, row("full_depth", dsr=0.5, accuracy=0.9)))

    assert found.holds is True
    assert "no other policy" in found.detail


def test_what_was_not_compared_cannot_be_judged() -> None:
    assert judge(evaluation(row("msdnet", dsr=1.0, accuracy=0.9))).holds is None


def test_the_claim_compares_all_policies_on_two_nets(
    checkpoint: Path, images: Path, tmp_path: Path
) -> None:
    found = run_claim(
        "uniexit-fig5",
        Setup(
            models=(str(checkpoint), str(checkpoint)),
            data=str(images),
            backend="onnxruntime:CPU",
            limit=3,
            store=tmp_path / "profiles.sqlite",
            quick=True,
        ),
    )

    assert len(found.verdicts) == 2
    assert {f.provenance for f in found.figures} == {"measured"}
    assert [f.paper for f in found.figures if f.name == "tiny, edgewise: deadlines met"] == [
        100.0,
        100.0,
    ]
    assert any("E3" in note for note in found.notes)
