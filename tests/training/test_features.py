from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgewise.backends import load_program
from edgewise.data import Preprocess, load_dataset
from edgewise.errors import ConfigError, ModelError
from edgewise.frontends.onnx_file import OnnxSource
from edgewise.model.staged import StagedModel
from edgewise.training.features import CachePlan, extract_features, load_features, map_grid
from edgewise.training.progress import Progress
from edgewise.training.work import WorkDirectory

pytest.importorskip("onnxruntime")
IMAGES = load_dataset("shapes", limit=21).images


def _model(proto: onnx.ModelProto) -> StagedModel:
    source = OnnxSource(proto, name="tiny")
    model = StagedModel.from_boundaries(source, ["relu0", "relu2"], name="tiny", num_classes=10)
    return model.with_random_heads()


def _plan(model: StagedModel) -> CachePlan:
    return CachePlan(
        shapes=tuple(s.stop.shape for s in model.stages),
        with_maps=frozenset({1}),
        num_images=len(IMAGES),
        shard_images=8,
    )


def test_pooled_vectors_and_whole_small_maps_are_kept(
    tiny_proto: Callable[[int], onnx.ModelProto], tiny_preprocess: Preprocess, tmp_path: Path
) -> None:
    model = _model(tiny_proto(0))
    program, plan, work = load_program(model), _plan(model), WorkDirectory(tmp_path)
    seen: list[Progress] = []
    extract_features(
        program, IMAGES, tiny_preprocess, plan=plan, work=work, on_progress=seen.append
    )
    pooled = load_features(work, plan, 0, maps=False)
    maps = load_features(work, plan, 1, maps=True)

    assert seen[-1] == Progress(phase="features", done=21, total=21)
    assert pooled.shape == (21, 8)
    assert maps.shape == (21, 16, 16)
    with program.context() as context:
        context.set_boundary(0, tiny_preprocess(IMAGES[20:]))
        context.run_segment(0, 1)
        context.run_segment(1, 2)
        # float16 keeps 11 bits.
        np.testing.assert_allclose(pooled[20], context.boundary(1)[0].mean((1, 2)), rtol=1e-3)
        whole = context.boundary(2)[0].reshape(16, -1).T
        np.testing.assert_allclose(maps[20], whole, rtol=1e-3, atol=1e-6)
    stored = sum(p.stat().st_size for p in (tmp_path / plan.folder).iterdir())
    assert plan.size_bytes < stored < plan.size_bytes + 3 * 1024  # headers


def test_shards_that_are_there_are_not_computed_again(
    tiny_proto: Callable[[int], onnx.ModelProto], tiny_preprocess: Preprocess, tmp_path: Path
) -> None:
    model = _model(tiny_proto(0))
    program, plan, work = load_program(model), _plan(model), WorkDirectory(tmp_path)
    extract_features(program, IMAGES, tiny_preprocess, plan=plan, work=work)
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / plan.folder).iterdir()}
    work.remove(plan.shard_name(1))
    extract_features(program, IMAGES, tiny_preprocess, plan=plan, work=work)

    after = {p.name: p.stat().st_mtime_ns for p in (tmp_path / plan.folder).iterdir()}
    assert after.keys() == before.keys()
    assert {n for n in after if after[n] != before[n]} == {"shard-00001.safetensors"}


def test_features_that_float16_cannot_hold_name_their_stage(
    tiny_proto: Callable[[int], onnx.ModelProto], tiny_preprocess: Preprocess, tmp_path: Path
) -> None:
    proto = tiny_proto(0)
    bias = next(t for t in proto.graph.initializer if t.name == "conv2.bias")
    bias.CopyFrom(onnx.numpy_helper.from_array(np.full(16, 1e6, np.float32), "conv2.bias"))
    model = _model(proto)

    with pytest.raises(ModelError, match=r"at the end of stage 1 \(relu2\) are NaN, infinite"):
        extract_features(
            load_program(model),
            IMAGES,
            tiny_preprocess,
            plan=_plan(model),
            work=WorkDirectory(tmp_path),
        )


def test_a_cache_that_would_be_enormous_is_refused() -> None:
    plan = CachePlan(
        shapes=((1, 1024, 7, 7),), with_maps=frozenset({0}), num_images=1_000_000, seed=0
    )

    with pytest.raises(ConfigError, match=r"of 1000000 images would take 9\d.\d* GiB"):
        plan.check_size()
    replace(plan, num_images=1000).check_size()


@given(channels=st.integers(1, 2048), height=st.integers(1, 300), width=st.integers(1, 300))
def test_the_kept_grid_lies_in_the_map_and_is_bounded(
    channels: int, height: int, width: int
) -> None:
    rows, columns, stride = map_grid((1, channels, height, width))

    assert rows >= 1
    assert columns >= 1
    assert (rows - 1) * stride < height
    assert (columns - 1) * stride < width
    if min(height, width) > 40:  # a strip cannot be thinned in its short direction
        assert rows * columns <= max(49, 8192 // channels)
