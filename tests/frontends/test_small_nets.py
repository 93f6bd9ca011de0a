from __future__ import annotations

import numpy as np
import pytest
import torch

from edgewise.errors import ConfigError
from edgewise.frontends.zoo import build_backbone
from edgewise.model.staged import StagedModel
from edgewise.training import stage_backbone

pytest.importorskip("transformers")
SMALL = ["small_resnet", "small_mobilenet"]


@pytest.fixture(scope="module", params=SMALL)
def small(request: pytest.FixtureRequest) -> StagedModel:
    torch.set_num_threads(1)
    return stage_backbone(build_backbone(request.param).stage(), exits=8)


def test_the_net_has_places_for_many_exits_at_even_steps(small: StagedModel) -> None:
    depths = [e.depth_ratio for e in small.exits]

    assert small.input.shape == (1, 1, 28, 28)
    assert small.num_exits >= 7
    assert max(np.diff([0.0, *depths])) < 0.25
    assert all(len(s.stop.shape) == 4 for s in small.stages)


def test_the_net_is_small_enough_to_train_and_to_ship(small: StagedModel) -> None:
    heads = sum(
        4 * np.prod(shape)
        for e in small.with_random_heads().exits
        if e.head
        for shape in e.head.spec.weight_shapes().values()
    )

    assert 3e6 < small.flops / 2 < 8e6  # multiply-adds
    assert sum(s.weight_bytes for s in small.stages) + heads < 4e6  # bytes, before float16


@pytest.mark.parametrize("name", SMALL)
def test_weights_follow_the_seed_and_statistics_are_kept_over_batches(name: str) -> None:
    one, same, other = (build_backbone(name, seed=s).module for s in (1, 1, 2))
    x = torch.from_numpy(np.random.default_rng(0).uniform(-1, 1, (2, 1, 28, 28)).astype("float32"))
    with torch.inference_mode():
        logits, again, different = (m(x)["logits"] for m in (one, same, other))

    assert torch.equal(logits, again)
    assert not torch.equal(logits, different)
    norms = [m for m in one.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert {m.momentum for m in norms} == {0.1}


@pytest.mark.parametrize("name", SMALL)
def test_another_image_size_fits_and_a_tiny_one_is_refused(name: str) -> None:
    backbone = build_backbone(name, size_pixels=32)
    with torch.inference_mode():
        answer = backbone.module(backbone.example())["logits"]

    assert answer.shape == (1, 10)
    with pytest.raises(ConfigError, match="at least 16 pixels, found 8"):
        build_backbone(name, size_pixels=8)
