"""DenseNet-201 with random weights."""

from __future__ import annotations

from torch import nn

from edgewise.frontends.zoo.backbone import Backbone
from edgewise.frontends.zoo.blocks import Branches, classifier, conv, random_backbone

_GROWTH, _LAYERS = 32, (6, 12, 48, 32)


def _layer(channels: int) -> nn.Module:
    grown = nn.Sequential(
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        conv(channels, 4 * _GROWTH, 1),
        nn.Conv2d(4 * _GROWTH, _GROWTH, 3, padding=1, bias=False),
    )
    return Branches(nn.Identity(), grown)


def _module() -> nn.Module:
    parts: list[nn.Module] = [conv(3, 64, 7, stride=2), nn.MaxPool2d(3, stride=2, padding=1)]
    channels = 64
    for number, layers in enumerate(_LAYERS):
        for _ in range(layers):
            parts.append(_layer(channels))
            channels += _GROWTH
        parts += [nn.BatchNorm2d(channels), nn.ReLU()]
        if number < len(_LAYERS) - 1:
            parts += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
            channels //= 2
    return nn.Sequential(*parts, classifier(channels))


def build(*, size_pixels: int, seed: int) -> Backbone:
    """Build it.

    Source:
        Huang et al., Densely connected convolutional networks, CVPR 2017 (arXiv:1608.06993).
    """
    return random_backbone(
        "densenet201",
        _module,
        size_pixels=size_pixels,
        seed=seed,
        architecture="DenseNet-201 (arXiv:1608.06993)",
        scaled=False,
    )
