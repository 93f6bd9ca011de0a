"""ResNet-18, the implementation in transformers, with random weights."""

from __future__ import annotations

from typing import Any

from edgewise.frontends.zoo.backbone import Backbone, import_transformers
from edgewise.frontends.zoo.blocks import random_backbone


def build(*, size_pixels: int, seed: int) -> Backbone:
    """Build it.

    Source:
        He et al., Deep residual learning for image recognition, CVPR 2016 (arXiv:1512.03385).
    """
    transformers = import_transformers()

    def make() -> Any:
        config = transformers.ResNetConfig(
            layer_type="basic",
            hidden_sizes=[64, 128, 256, 512],
            depths=[2, 2, 2, 2],
            num_labels=1000,
        )
        return transformers.ResNetForImageClassification(config)

    return random_backbone(
        "resnet18",
        make,
        size_pixels=size_pixels,
        seed=seed,
        architecture="ResNet-18 of transformers (arXiv:1512.03385)",
        scaled=False,
    )
