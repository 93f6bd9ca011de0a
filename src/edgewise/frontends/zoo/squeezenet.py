"""SqueezeNet 1.1 with random weights."""

from __future__ import annotations

from torch import nn

from edgewise.frontends.zoo.backbone import Backbone
from edgewise.frontends.zoo.blocks import Branches, random_backbone


def _fire(inputs: int, squeezed: int, expanded: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, squeezed, 1),
        nn.ReLU(),
        Branches(
            nn.Sequential(nn.Conv2d(squeezed, expanded, 1), nn.ReLU()),
            nn.Sequential(nn.Conv2d(squeezed, expanded, 3, padding=1), nn.ReLU()),
        ),
    )


def _module() -> nn.Module:
    def pool() -> nn.Module:
        return nn.MaxPool2d(3, stride=2, ceil_mode=True)

    return nn.Sequential(
        nn.Conv2d(3, 64, 3, stride=2),
        nn.ReLU(),
        pool(),
        _fire(64, 16, 64),
        _fire(128, 16, 64),
        pool(),
        _fire(128, 32, 128),
        _fire(256, 32, 128),
        pool(),
        _fire(256, 48, 192),
        _fire(384, 48, 192),
        _fire(384, 64, 256),
        _fire(512, 64, 256),
        nn.Conv2d(512, 1000, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


def build(*, size_pixels: int, seed: int) -> Backbone:
    """Build it.

    Source:
        Iandola et al., SqueezeNet (arXiv:1602.07360), in its authors' release 1.1.
    """
    return random_backbone(
        "squeezenet",
        _module,
        size_pixels=size_pixels,
        seed=seed,
        architecture="SqueezeNet 1.1 (arXiv:1602.07360)",
        scaled=False,
    )
