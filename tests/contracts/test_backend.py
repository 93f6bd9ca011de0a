"""What every backend promises, asked of each that is installed here, and of the null one."""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edgewise.backends import Program, available_backends, load_program
from edgewise.errors import BackendError, BackendUnavailable, ConfigError, ShapeError
from edgewise.model import ExitHead, StagedModel
from edgewise.model.heads import default_head_spec, random_head

Float32 = npt.NDArray[np.float32]
REAL = available_backends()
EVERY = (*REAL, "null")
RUNTIME_PACKAGES = {
    "torch": ("torch", "torch"),
    "onnxruntime": ("onnxruntime", "onnx"),
    "openvino": ("openvino", "openvino"),
    "numpy": ("onnx.reference", "onnx"),
}


@pytest.fixture(scope="module")
def model(staged: Any) -> StagedModel:
    """Five stages; heads of two kinds, and the net's own answer at the end."""
    bare: StagedModel = staged("residual", exits=["stem", "relu", "relu_1", "relu_2"])
    rng = np.random.default_rng(0)
    heads: dict[int, ExitHead] = {}
    for k, kind in enumerate(["conv", "pool", "conv", "pool"]):
        spec = default_head_spec(bare.stages[k].stop.shape, 7, kind=kind, width=16)
        heads[k] = random_head(spec, rng)
    return bare.with_heads(heads)


@pytest.fixture(scope="module")
def load(model: StagedModel) -> Callable[[str], Program]:
    """Each backend is loaded once; programs are shared, which is what they promise to bear."""
    return functools.cache(lambda backend: load_program(model, backend))


@pytest.fixture(params=EVERY)
def program(request: pytest.FixtureRequest, load: Callable[[str], Program]) -> Program:
    return load(request.param)


@pytest.fixture(params=REAL)
def real(request: pytest.FixtureRequest, load: Callable[[str], Program]) -> Program:
    return load(request.param)


def inputs(batch: int, seed: int = 0) -> Float32:
    rng = np.random.default_rng(seed)
    return rng.uniform(-1, 1, (batch, 3, 16, 16)).astype(np.float32)


def expected(model: StagedModel, x: Float32) -> tuple[list[Float32], list[Float32]]:
    """Boundaries and answers by torch and numpy alone."""
    torch = importlib.import_module("torch")
    bounds, answers = [x], []
    for stage, place in zip(model.stages, model.exits, strict=True):
        piece = model.source.torch_segment(stage.start.name, stage.stop.name)
        assert piece is not None
        with torch.no_grad():
            bounds.append(piece(torch.from_numpy(bounds[-1].copy())).numpy())
        answers.append(bounds[-1] if place.head is None else place.head(bounds[-1]))
    return bounds, answers


def close(found: Float32, wanted: Float32) -> None:
    assert found.shape == wanted.shape
    assert found.dtype == np.float32
    scale = float(np.abs(wanted).max())
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=2e-5 * scale)


def answer(program: Program, x: Float32, depth: int) -> Float32:
    with program.context(len(x)) as context:
        context.set_boundary(0, x)
        for k in range(depth + 1):
            context.run_segment(k, k + 1)
        return context.run_head(depth)


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_every_stage_and_head_computes_what_torch_and_numpy_do(
    real: Program, model: StagedModel, batch: int
) -> None:
    x = inputs(batch)
    bounds, answers = expected(model, x)

    with real.context(batch) as context:
        context.set_boundary(0, x)
        for k in range(len(model.stages)):
            context.run_segment(k, k + 1)
            close(context.boundary(k + 1), bounds[k + 1])
            close(context.run_head(k), answers[k])


def test_a_fused_segment_computes_what_its_stages_do(real: Program, model: StagedModel) -> None:
    x = inputs(2)
    bounds, _ = expected(model, x)

    assert any(stop - start > 1 for start, stop in real.segments)
    with real.context(2) as context:
        for start, stop in sorted(real.segments):
            context.set_boundary(start, bounds[start])
            context.run_segment(start, stop)
            close(context.boundary(stop), bounds[stop])


def test_a_request_may_continue_from_any_position(real: Program, model: StagedModel) -> None:
    """How unfinished samples of a batch are regrouped: their features are set, not computed."""
    bounds, answers = expected(model, inputs(5))
    kept = np.array([1, 4])

    with real.context(2) as context:
        context.set_boundary(3, bounds[3][kept])
        context.run_segment(3, 4)
        close(context.run_head(3), answers[3][kept])


def test_shapes_are_those_of_the_model(program: Program, model: StagedModel) -> None:
    with program.context(2) as context:
        context.set_boundary(0, inputs(2))
        assert context.batch == 2
        for k, stage in enumerate(model.stages):
            context.run_segment(k, k + 1)
            assert context.boundary(k + 1).shape == (2, *stage.stop.shape[1:])
            logits = context.run_head(k)
            assert logits.shape == (2, model.num_classes)
            assert logits.dtype == np.float32


def test_the_input_is_only_read_and_may_be_read_only_strided_or_double(program: Program) -> None:
    x = inputs(2)
    before, first = x.copy(), answer(program, x, 4)
    np.testing.assert_array_equal(x, before)

    x.flags.writeable = False
    np.testing.assert_array_equal(answer(program, x, 4), first)
    strided = np.repeat(x, 2, axis=3)[..., ::2]
    np.testing.assert_array_equal(answer(program, strided, 4), first)
    np.testing.assert_array_equal(answer(program, x.astype(np.float64), 4), first)


def test_results_are_copies_that_later_calls_do_not_touch(program: Program) -> None:
    with program.context() as context:
        context.set_boundary(0, inputs(1))
        context.run_segment(0, 1)
        kept = [context.boundary(0), context.boundary(1), context.run_head(0)]
        copies = [a.copy() for a in kept]
        context.set_boundary(0, inputs(1, seed=9))
        context.run_segment(0, 1)
        context.run_head(0)
        for found, copy in zip(kept, copies, strict=True):
            np.testing.assert_array_equal(found, copy)

        context.set_boundary(0, inputs(1))
        for written in (context.boundary(0), context.boundary(1), context.run_head(0)):
            written[...] = np.nan
        context.run_segment(0, 1)
        np.testing.assert_array_equal(context.run_head(0), copies[2])


def test_the_last_answer_is_a_copy_too(program: Program) -> None:
    last = len(program.model.stages)
    with program.context() as context:
        context.set_boundary(0, inputs(1))
        for k in range(last):
            context.run_segment(k, k + 1)
        first = context.run_head(last - 1)
        first[...] = np.nan

        assert np.isfinite(context.run_head(last - 1)).all()


def test_depth_is_an_argument_and_leaves_no_trace(real: Program) -> None:
    x = inputs(1)
    alone = {depth: answer(real, x, depth) for depth in range(5)}

    for depth in (4, 0, 3, 1, 4, 2, 0):
        np.testing.assert_array_equal(answer(real, x, depth), alone[depth])


def test_two_contexts_at_once_do_not_meet(real: Program, model: StagedModel) -> None:
    ones, others = inputs(1, seed=1), inputs(1, seed=2)
    with real.context() as a, real.context() as b:
        a.set_boundary(0, ones)
        b.set_boundary(0, others)
        for k in range(5):
            a.run_segment(k, k + 1)
            b.run_segment(k, k + 1)
        close(a.run_head(4), expected(model, ones)[1][4])
        close(b.run_head(4), expected(model, others)[1][4])


def test_eight_threads_at_mixed_depths_and_batches_get_what_one_alone_gets(real: Program) -> None:
    jobs = [(seed, seed % 5, 1 + seed % 2) for seed in range(48)]
    alone = [answer(real, inputs(batch, seed), depth) for seed, depth, batch in jobs]
    together = threading.Barrier(8)

    def run(job: tuple[int, int, int]) -> Float32:
        if job[0] < 8:
            together.wait()
        seed, depth, batch = job
        return answer(real, inputs(batch, seed), depth)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(run, jobs))

    for one, other in zip(found, alone, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_call_that_raises_midway_leaves_no_trace_in_later_calls(program: Program) -> None:
    x = inputs(1)
    before = answer(program, x, 4)
    spoiled = []

    def fail() -> None:
        with program.context() as context:
            spoiled.append(context)
            context.set_boundary(0, np.full_like(x, np.nan))
            context.run_segment(0, 1)
            raise RuntimeError("midway")

    for _ in range(3):
        with pytest.raises(RuntimeError, match="midway"):
            fail()

    with program.context() as one, program.context() as other:
        assert all(one is not s and other is not s for s in spoiled)
    np.testing.assert_array_equal(answer(program, x, 4), before)


def test_a_context_is_lent_again_after_a_good_call(program: Program) -> None:
    with program.context() as first:
        pass
    with program.context() as second:
        assert second is first


@pytest.mark.parametrize(
    "values",
    [
        np.zeros((3, 16, 16), np.float32),
        np.zeros((1, 3, 16, 15), np.float32),
        np.zeros((2, 3, 16, 16), np.float32),
        np.zeros((0, 3, 16, 16), np.float32),
        np.zeros((1, 3, 16, 16), np.complex64),
        np.full((1, 3, 16, 16), "a"),
        [[0.0]],
    ],
    ids=["no batch", "size", "batch", "empty", "complex", "text", "list"],
)
def test_an_array_of_another_shape_or_type_is_refused(program: Program, values: Any) -> None:
    with pytest.raises(ShapeError, match="expected"), program.context() as context:
        context.set_boundary(0, values)


def test_a_batch_of_nothing_is_refused(program: Program) -> None:
    with pytest.raises(ConfigError, match="at least one sample"), program.context(0):
        pass


@pytest.mark.parametrize(("start", "stop"), [(1, 3), (2, 2), (3, 1), (4, 6), (-1, 0)])
def test_a_segment_that_was_not_compiled_is_refused_and_those_there_are_named(
    program: Program, start: int, stop: int
) -> None:
    assert (start, stop) not in program.segments
    with program.context() as context:
        context.set_boundary(0, inputs(1))
        with pytest.raises(ConfigError, match="not compiled") as caught:
            context.run_segment(start, stop)
    assert "0-1" in str(caught.value.help)


@pytest.mark.parametrize("exit_index", [-1, 5, 99])
def test_an_exit_that_does_not_exist_is_refused(program: Program, exit_index: int) -> None:
    with program.context() as context:
        context.set_boundary(0, inputs(1))
        context.run_segment(0, 1)
        with pytest.raises(ConfigError, match="from 0 to 4"):
            context.run_head(exit_index)


@pytest.mark.parametrize("backend", EVERY)
def test_a_model_without_heads_is_refused_with_the_way_to_get_them(
    backend: str, staged: Any
) -> None:
    with pytest.raises(ConfigError, match="no head at exit 0") as caught:
        load_program(staged("residual"), backend)
    assert "edgewise prepare" in str(caught.value.help)


@pytest.mark.parametrize("backend", EVERY)
def test_no_thread_at_all_is_refused(backend: str, model: StagedModel) -> None:
    with pytest.raises(ConfigError, match="at least one thread"):
        load_program(model, backend, threads=0)


@pytest.mark.parametrize("backend", EVERY)
def test_only_the_segments_that_are_wanted_are_compiled(backend: str, model: StagedModel) -> None:
    program = load_program(model, backend, segments=[(0, 5)], check=False)

    singles = {(k, k + 1) for k in range(5)}
    assert program.segments == singles | {(0, 5)}
    with pytest.raises(ConfigError, match="outside"):
        load_program(model, backend, segments=[(0, 6)])


class OneSample:
    """A source that was exported for one sample."""

    dynamic_batch = False

    def __init__(self, source: Any) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


@pytest.mark.parametrize("backend", EVERY)
def test_a_model_for_one_sample_refuses_a_batch(backend: str, model: StagedModel) -> None:
    single = replace(model, source=OneSample(model.source))
    program = load_program(single, backend, check=False)

    assert answer(program, inputs(1), 0).shape == (1, 7)
    with pytest.raises(BackendError, match="one sample, found a batch of 2"), program.context(2):
        pass


class Tampered(OneSample):
    """A source one of whose pieces has a weight that is off by one per cent."""

    dynamic_batch = True

    def __init__(self, source: Any, *, stop: str, start: str | None = None) -> None:
        super().__init__(source)
        self._stop, self._start = stop, start

    def onnx_segment(self, start: str, stop: str, *, batch: int = 1) -> Any:
        onnx = importlib.import_module("onnx")
        proto = self._source.onnx_segment(start, stop, batch=batch)
        if stop == self._stop and self._start in (None, start):
            copy = onnx.ModelProto()
            copy.CopyFrom(proto)
            weight = max(copy.graph.initializer, key=lambda t: len(t.raw_data))
            values = onnx.numpy_helper.to_array(weight) * np.float32(1.01)
            weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))
            return copy
        return proto


@pytest.mark.parametrize("backend", [b for b in REAL if not b.startswith("torch")])
def test_a_backend_that_computes_something_else_is_refused(
    backend: str, model: StagedModel
) -> None:
    wrong = replace(model, source=Tampered(model.source, stop=model.stages[2].stop.name))

    with pytest.raises(BackendError, match=r"computes stage 2 .* wrongly") as caught:
        load_program(wrong, backend)
    assert backend in str(caught.value)


@pytest.mark.parametrize("backend", [b for b in REAL if b.startswith(("onnxruntime", "openvino"))])
def test_a_fused_piece_that_computes_something_else_is_refused(
    backend: str, model: StagedModel
) -> None:
    start, stop = model.stages[0].start.name, model.stages[4].stop.name
    wrong = replace(model, source=Tampered(model.source, start=start, stop=stop))

    with pytest.raises(BackendError, match="the fused stages 0 to 4"):
        load_program(wrong, backend)


@pytest.mark.parametrize("backend", REAL)
def test_a_head_that_computes_something_else_is_refused(
    backend: str, model: StagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = load_program(model, backend, check=False)
    honest = ExitHead.__call__
    monkeypatch.setattr(ExitHead, "__call__", lambda s, x: honest(s, x) * np.float32(1.01))
    verify = importlib.import_module("edgewise.backends.onnx_pieces").verify

    if backend.startswith("numpy"):  # it runs this very function
        verify(program)
        return
    with pytest.raises(BackendError, match="the head of exit 0"):
        verify(program)


@pytest.mark.parametrize("backend", REAL)
def test_a_missing_package_is_told_with_the_extra_that_has_it(
    backend: str, model: StagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, extra = RUNTIME_PACKAGES[backend.partition(":")[0]]
    monkeypatch.setitem(sys.modules, package, None)

    with pytest.raises(BackendUnavailable, match="not installed") as caught:
        load_program(model, backend)
    assert caught.value.help == f"pip install 'edgewise[{extra}]'"
