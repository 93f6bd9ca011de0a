"""EfficientNet-B0, the implementation in transformers, with random weights."""

from __future__ import annotations

from typing import Any

from edgewise.frontends.zoo.backbone import Backbone, import_transformers
from edgewise.frontends.zoo.blocks import random_backbone


def build(*, size_pixels: int, seed: int) -> Backbone:
    """Build it.

    Source:
        Tan and Le, EfficientNet: rethinking model scaling for convolutional neural networks,
        ICML 2019 (arXiv:1905.11946).
    """
    transformers = import_transformers()

    def make() -> Any:
        config = transformers.EfficientNetConfig(
            image_size=size_pixels,
            width_coefficient=1.0,
            depth_coefficient=1.0,
            hidden_dim=1280,
            dropout_rate=0.2,
            num_labels=1000,
        )
        return transformers.EfficientNetForImageClassification(config)

    return random_backbone(
        "efficientnet_b0",
        make,
        size_pixels=size_pixels,
        seed=seed,
        architecture="EfficientNet-B0 of transformers (arXiv:1905.11946)",
        scaled=False,
    )
