from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgewise.backends.null import NullProgram
from edgewise.clock import VirtualClock
from edgewise.frontends.outline import outline_model
from edgewise.model import StagedModel
from edgewise.reproduce import Setup, run_claim
from edgewise.reproduce.uniexit_fig9 import (
    ExitTimes,
    describe,
    measure_exits,
    with_conv_heads,
)


def measured(*, head_s: float) -> tuple[StagedModel, ExitTimes]:
    clock = VirtualClock()

    def cost_s(unit: str) -> float:
        kind, _, place = unit.partition(":")
        if kind == "head":
            return head_s
        start, stop = map(int, place.split("-"))
        return 0.9 if stop - start > 1 else 1.0 * (stop - start)

    model = outline_model(4)
    program = NullProgram(model, clock=clock, cost_s=cost_s)
    return model, measure_exits(program, rounds=3, now_s=clock.now_s)


def test_every_head_on_the_way_is_in_the_time_to_an_exit() -> None:
    _, times = measured(head_s=0.5)

    assert times.every_s == pytest.approx(np.tile([1.5, 3.0, 4.5, 6.0], (3, 1)))
    assert times.chosen_s == pytest.approx(np.tile([1.5, 2.5, 3.5, 4.5], (3, 1)))
    assert times.advance() == pytest.approx([6.0 / 4.5] * 3)


def test_fused_runs_are_timed_beside_single_stages() -> None:
    _, times = measured(head_s=0.5)

    # Pieces 0-1, 0-2, 0-2 and 2-3, 0-4.
    assert times.fused_s[0] == pytest.approx([1.5, 1.4, 2.4, 1.4])


def test_a_head_that_takes_as_long_as_two_stages_gives_the_papers_advance() -> None:
    """Of two stages between exits: here one stage of theirs is half of ours."""
    clock = VirtualClock()
    program = NullProgram(
        outline_model(40), clock=clock, cost_s=lambda u: 1.0 if u.startswith("head") else 2.0
    )

    times = measure_exits(program, rounds=1, now_s=clock.now_s)

    assert times.advance()[0] == pytest.approx(1.5, abs=0.03)


def test_an_exit_that_is_surely_slower_is_named() -> None:
    rng = np.random.default_rng(0)
    every = np.cumsum(rng.uniform(0.9, 1.1, (20, 3)), axis=1)
    chosen = every - [0.0, 0.2, -0.5]

    times = ExitTimes(every_s=every, chosen_s=chosen, fused_s=chosen)

    assert times.slower_exits() == [2]


def test_a_difference_that_rounds_do_not_agree_on_does_not_count() -> None:
    every = np.ones((20, 2))
    chosen = every + np.where(np.arange(20) % 2, 0.1, -0.09)[:, None]

    assert ExitTimes(every_s=every, chosen_s=chosen, fused_s=chosen).slower_exits() == []


def test_paper_and_ours_stand_side_by_side_and_never_in_one_figure() -> None:
    model, times = measured(head_s=0.5)

    figures, verdict = describe("outline", model, times)

    advance = figures[-1]
    assert (advance.paper, advance.provenance) == (1.5, "measured")
    assert advance.ours == pytest.approx(6.0 / 4.5)
    assert len(figures) == 2 * 4 + 1
    assert verdict.holds is True


def test_wide_heads_replace_those_on_maps(tiny: StagedModel) -> None:
    wide = with_conv_heads(tiny, width=32)

    kinds = [e.head.spec.kind if e.head else None for e in wide.exits]
    assert kinds == ["conv", "conv", None]
    assert wide.flops_to(0) > tiny.flops_to(0)


def test_the_claim_measures_a_checkpoint_on_this_machine(checkpoint: Path) -> None:
    found = run_claim(
        "uniexit-fig9", Setup(models=(str(checkpoint),), backend="onnxruntime:CPU", quick=True)
    )

    assert {f.provenance for f in found.figures} == {"measured"}
    assert all(f.ours is not None and f.ours > 0 for f in found.figures)
    assert len(found.verdicts) == 1
    assert any("% right" in f.note for f in found.figures)
