from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgewise.backends import load_program
from edgewise.backends.null import NullProgram
from edgewise.clock import VirtualClock


def load(staged: Any, **options: Any) -> NullProgram:
    program = load_program(staged("residual").with_random_heads(), "null", **options)
    assert isinstance(program, NullProgram)
    return program


def test_a_head_runs_only_if_it_is_asked_and_no_stage_runs_twice(staged: Any) -> None:
    program = load(staged)

    with program.context() as context:
        context.set_boundary(0, np.zeros((1, 3, 16, 16), np.float32))
        context.run_segment(0, 2)
        context.run_head(1)
        context.run_segment(2, 3)

    assert program.ran == ["segment:0-2", "head:1", "segment:2-3"]


def test_units_are_charged_to_the_clock_that_was_passed_in(staged: Any) -> None:
    clock = VirtualClock(start_s=10.0)
    cost_s = {"segment:0-1": 0.25, "segment:1-2": 0.5, "head:0": 0.125}
    program = load(staged, clock=clock, cost_s=cost_s.__getitem__)

    with program.context(4) as context:
        context.run_segment(0, 1)
        assert clock.now_s() == 10.25
        context.run_segment(1, 2)
        context.run_head(0)

    assert clock.now_s() == 10.875


def test_made_up_answers_see_the_input_and_do_not_alias_it(staged: Any) -> None:
    def logits(exit_index: int, x: Any) -> Any:
        return x.reshape(len(x), -1)[:, :7] + exit_index if exit_index else x[:, 0, 0, :7]

    program = load(staged, logits=logits)
    x = np.arange(2 * 768, dtype=np.float32).reshape(2, 3, 16, 16)

    with program.context(2) as context:
        context.set_boundary(0, x)
        first = context.run_head(0)
        context.set_boundary(0, x + 1)

        np.testing.assert_array_equal(first, x[:, 0, 0, :7])
        np.testing.assert_array_equal(context.run_head(2), x.reshape(2, -1)[:, :7] + 3)


def test_a_cost_that_raises_leaves_the_context_unused(staged: Any) -> None:
    def cost_s(unit: str) -> float:
        if unit == "segment:1-2":
            raise RuntimeError("broken stage")
        return 0.0

    program = load(staged, cost_s=cost_s)
    lent = []

    def run() -> None:
        with program.context() as context:
            lent.append(context)
            context.run_segment(0, 1)
            context.run_segment(1, 2)

    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken"):
            run()

    assert lent[0] is not lent[1]
