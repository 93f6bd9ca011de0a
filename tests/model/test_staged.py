from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edgewise.errors import ConfigError, ModelError, ShapeError
from edgewise.model import ExitHead, Graph, HeadSpec, Op, StagedModel, TensorSpec
from edgewise.model.heads import default_head_spec, random_head


class FakeSource:
    """Six operators of known work; nothing can be run."""

    dynamic_batch = True

    def __init__(self, *, dtype: str = "float32", inputs: int = 1, answer: Any = (1, 10)) -> None:
        names = ["x", "a", "b", "c", "d", "y"]
        shapes: list[Any] = [(1, 3, 8, 8), *[(1, 4, 8, 8)] * 4, answer]
        ops = [
            Op(
                name=after,
                kind="conv",
                inputs=(before, *(f"x{k}" for k in range(1, inputs))),
                outputs=(after,),
                flops=10.0 * k,
                weight_bytes=k,
                is_contraction=True,
            )
            for k, (before, after) in enumerate(itertools.pairwise(names), start=1)
        ]
        self.graph = Graph(
            inputs=("x", *(f"x{k}" for k in range(1, inputs))),
            outputs=("y",),
            ops=tuple(ops),
            tensors={
                n: TensorSpec(name=n, shape=s, dtype=dtype)
                for n, s in zip(names, shapes, strict=True)
                if s is not None
            },
        )

    def onnx_segment(self, start: str, stop: str, *, batch: int = 1) -> Any:
        raise NotImplementedError

    def torch_segment(self, start: str, stop: str) -> None:  # noqa: ARG002
        return None

    def weights_digest(self) -> str:
        return "0" * 64


def stage(exits: Any = 3, **options: Any) -> StagedModel:
    return StagedModel.from_source(FakeSource(**options), exits=exits, name="fake")


def test_stages_follow_one_another_and_share_out_work_and_weights() -> None:
    model = stage(["a", "c"])

    assert [(s.start.name, s.stop.name) for s in model.stages] == [
        ("x", "a"),
        ("a", "c"),
        ("c", "y"),
    ]
    assert [s.flops for s in model.stages] == [10.0, 50.0, 90.0]
    assert [s.weight_bytes for s in model.stages] == [1, 5, 9]
    assert [s.num_ops for s in model.stages] == [1, 2, 2]
    assert [e.depth_ratio for e in model.exits] == pytest.approx([1 / 15, 6 / 15, 1.0])
    assert model.flops == 150.0
    assert model.num_exits == 3


def test_work_to_an_exit_counts_its_head_alone_or_every_head_on_the_way() -> None:
    model = stage(["a", "c"]).with_random_heads(width=16)
    heads = [e.head.spec.flops if e.head else 0.0 for e in model.exits]

    assert model.flops_to(1) == 60.0 + heads[1]
    assert model.flops_to(1, every_head=True) == 60.0 + heads[0] + heads[1]
    assert model.flops_to(2) == 150.0


@pytest.mark.parametrize("index", [-1, 3, 100])
def test_an_exit_out_of_range_is_refused_with_the_range(index: int) -> None:
    with pytest.raises(ConfigError, match="from 0 to 2"):
        stage().flops_to(index)
    with pytest.raises(ConfigError, match="from 0 to 2"):
        stage().with_heads({index: random_head(HeadSpec(
            kind="pool", feature_shape=(1, 4, 8, 8), width=2, num_classes=10
        ), np.random.default_rng(0))})  # fmt: skip


def test_heads_are_added_to_a_copy() -> None:
    bare = stage()
    full = bare.with_random_heads()

    assert not bare.has_all_heads
    assert full.has_all_heads
    assert all(e.head is None for e in bare.exits)
    assert full.exits[-1].head is None, "the model's own classifier answers there"


def test_random_heads_keep_heads_that_are_there() -> None:
    first = stage().with_random_heads(seed=1)
    kept = replace(first, exits=(first.exits[0], *stage().exits[1:])).with_random_heads(seed=2)

    assert kept.exits[0].head is first.exits[0].head
    assert kept.exits[1].head is not None


def test_a_head_for_other_features_is_refused() -> None:
    spec = HeadSpec(kind="pool", feature_shape=(1, 4, 4, 4), width=2, num_classes=10)

    with pytest.raises(ShapeError, match="exit 0"):
        stage().with_heads({0: random_head(spec, np.random.default_rng(0))})


def test_a_truncated_model_ends_early_and_needs_a_head_there() -> None:
    model = stage(["a", "c"]).truncated(2, num_classes=10)

    assert [e.depth_ratio for e in model.exits] == pytest.approx([1 / 6, 1.0])
    assert not model.has_all_heads
    assert model.with_random_heads().has_all_heads
    for wrong in (0, -1, 4):
        with pytest.raises(ConfigError):
            stage(["a", "c"]).truncated(wrong, num_classes=10)


def test_the_version_follows_heads_and_cuts_and_not_names_or_temperatures() -> None:
    model = stage(["a", "c"]).with_random_heads(seed=0)
    head = model.exits[0].head
    assert head is not None
    weights = {k: v.copy() for k, v in head.weights.items()}
    weights["linear.bias"][0] += 1.0
    other = model.with_heads({0: replace(head, weights=weights)})
    warmer = model.with_heads({0: replace(head, temperature=2.0)}, accuracy={0: 0.5})

    assert model.version() == replace(model, name="other").version() == warmer.version()
    assert len({m.version() for m in (model, other, stage(["a", "c"]), stage(["a", "d"]))}) == 4


def test_two_inputs_no_logits_and_other_types_are_refused() -> None:
    with pytest.raises(ModelError, match="one input tensor, found 2: x, x1"):
        stage(inputs=2)
    for answer in [(1, 10, 4, 4), (1,), None]:
        with pytest.raises(ModelError, match="logits"):
            stage(answer=answer)
    with pytest.raises(ModelError, match="float16"):
        stage(dtype="float16")


def test_stages_that_do_not_follow_one_another_are_refused() -> None:
    model = stage()

    with pytest.raises(ModelError, match="starts at"):
        replace(model, stages=model.stages[::-1])
    with pytest.raises(ModelError, match="one exit per stage"):
        replace(model, stages=model.stages[:1])


def test_a_head_is_chosen_from_the_feature_shape_alone() -> None:
    assert default_head_spec((1, 8, 4, 4), 10).kind == "pool"
    assert default_head_spec((1, 17, 8), 10).kind == "token"
    assert default_head_spec((1, 8, 4, 4), 10, kind="conv").kind == "conv"
    for shape in [(1, 8), (1,), (1, 2, 3, 4, 5)]:
        with pytest.raises(ShapeError, match="needs features"):
            default_head_spec(shape, 10)
    with pytest.raises(ConfigError, match="'poool'") as caught:
        default_head_spec((1, 8, 4, 4), 10, kind="poool")
    assert "'pool'" in str(caught.value.help)


@pytest.mark.parametrize(("width", "classes"), [(0, 10), (8, 0), (-1, 10)])
def test_a_head_without_width_or_classes_is_refused(width: int, classes: int) -> None:
    with pytest.raises(ConfigError, match="above zero"):
        HeadSpec(kind="pool", feature_shape=(1, 4, 8, 8), width=width, num_classes=classes)


def test_a_head_with_missing_or_misshapen_arrays_is_refused() -> None:
    spec = HeadSpec(kind="pool", feature_shape=(1, 4, 8, 8), width=2, num_classes=10)
    good = random_head(spec, np.random.default_rng(0))

    for name, shape in spec.weight_shapes().items():
        with pytest.raises(ShapeError, match=name):
            ExitHead(spec=spec, weights={k: v for k, v in good.weights.items() if k != name})
        wrong = dict(good.weights) | {name: np.zeros((*shape, 1), np.float32)}
        with pytest.raises(ShapeError, match=name):
            ExitHead(spec=spec, weights=wrong)


@pytest.mark.parametrize("kind", ["conv", "pool", "token"])
def test_a_head_answers_each_sample_by_its_definition(kind: Any) -> None:
    shape = (1, 5, 6) if kind == "token" else (1, 6, 5, 4)
    spec = default_head_spec(shape, 3, kind=kind, width=4)
    head = random_head(spec, np.random.default_rng(0))
    x = np.random.default_rng(1).standard_normal((2, *shape[1:])).astype(np.float32)
    w = {k: v.astype(np.float64) for k, v in head.weights.items()}

    for sample, found in zip(x.astype(np.float64), head(x), strict=True):
        places = sample if kind == "token" else sample.reshape(6, -1).T  # [P, C]
        if kind != "conv":
            places = places.mean(axis=0, keepdims=True)
        hidden = [np.maximum(w["hidden.weight"] @ p + w["hidden.bias"], 0) for p in places]
        wanted = w["linear.weight"] @ np.mean(hidden, axis=0) + w["linear.bias"]
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


def test_pooling_first_costs_as_many_times_less_as_there_are_positions() -> None:
    shape = (1, 64, 14, 14)
    conv = default_head_spec(shape, 10, kind="conv", width=64).flops
    pool = default_head_spec(shape, 10, kind="pool", width=64).flops

    assert conv == 2 * 64 * 64 * 196 + 196 * 64 + 2 * 64 * 10
    assert pool == 2 * 64 * 64 + 196 * 64 + 2 * 64 * 10
    assert math.isclose(conv / pool, 73.9, rel_tol=0.01)
