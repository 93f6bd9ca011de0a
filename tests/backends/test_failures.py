"""A runtime that fails midway: its own words are the cause, and nothing of it stays."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from edgewise.backends import Program, available_backends, load_program
from edgewise.errors import BackendError

X = np.linspace(-1, 1, 768, dtype=np.float32).reshape(1, 3, 16, 16)


class Broken:
    """Fails however it is used: as a callable, a request or an evaluator."""

    input_names = ("x",)

    def __call__(self, *_: Any) -> Any:
        raise RuntimeError("the runtime's own words")

    run = __call__


def break_stage(program: Program, context: Any, index: int) -> None:
    """Put something broken in the place of one stage of one context."""
    segment = (index, index + 1)
    runtime = program.backend.partition(":")[0]
    if runtime == "torch":
        assert context is not None
        context._program = type("Copy", (), dict(program.__dict__))()
        context._program.failed = program.failed
        context._program.pieces = dict(program.pieces) | {segment: Broken()}  # type: ignore[attr-defined]
    elif runtime == "numpy":
        context._singles[index] = Broken()
    else:
        context._segments[segment] = Broken()


@pytest.mark.parametrize("backend", available_backends())
def test_a_stage_that_fails_is_told_with_its_cause_and_later_calls_are_right(
    backend: str, staged: Any
) -> None:
    program = load_program(staged("residual").with_random_heads(), backend, check=False)

    def run(*, broken: bool) -> Any:
        with program.context() as context:
            context.set_boundary(0, X)
            if broken:
                break_stage(program, context, 1)
            for k in range(2):
                context.run_segment(k, k + 1)
            return context.run_head(1)

    before = run(broken=False)
    for _ in range(2):
        with pytest.raises(
            BackendError, match="failed in segment 1-2: the runtime's own"
        ) as caught:
            run(broken=True)
        assert isinstance(caught.value.__cause__, RuntimeError)
    np.testing.assert_array_equal(run(broken=False), before)


@pytest.mark.parametrize("backend", ["onnxruntime:CPU", "openvino:CPU"])
def test_a_piece_that_a_runtime_cannot_compile_is_refused(backend: str, staged: Any) -> None:
    if backend not in available_backends():
        pytest.skip(f"{backend} is not installed")
    onnx = importlib.import_module("onnx")

    class Strange:
        def __init__(self, source: Any) -> None:
            self._source = source

        def __getattr__(self, name: str) -> Any:
            return getattr(self._source, name)

        def onnx_segment(self, start: str, stop: str, *, batch: int = 1) -> Any:
            copy = onnx.ModelProto()
            copy.CopyFrom(self._source.onnx_segment(start, stop, batch=batch))
            copy.graph.node[0].op_type = "NoSuchOperator"
            return copy

    from dataclasses import replace

    model = staged("residual").with_random_heads()
    with pytest.raises(BackendError, match="refuses a stage of 'residual'") as caught:
        load_program(replace(model, source=Strange(model.source)), backend)
    assert caught.value.__cause__ is not None
