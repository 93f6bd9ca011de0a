"""ResNet-50 with activations before its convolutions, with random weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from edgewise.frontends.zoo.backbone import Backbone
from edgewise.frontends.zoo.blocks import classifier, conv, random_backbone

_GROUPS = ((64, 3), (128, 4), (256, 6), (512, 3))


class _Bottleneck(nn.Module):
    """Normalise and activate once; the shortcut of a widening block reads the activated input."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.BatchNorm2d(inputs), nn.ReLU())
        self.body = nn.Sequential(
            conv(inputs, width, 1),
            conv(width, width, 3, stride=stride),
            nn.Conv2d(width, 4 * width, 1),
        )
        self.shortcut = (
            None if inputs == 4 * width else nn.Conv2d(inputs, 4 * width, 1, stride=stride)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Add the body to the shortcut."""
        active = self.before(x)
        return torch.add(self.body(active), x if self.shortcut is None else self.shortcut(active))


def _module() -> nn.Module:
    parts: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, stride=2, padding=3),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    channels = 64
    for number, (width, blocks) in enumerate(_GROUPS):
        for k in range(blocks):
            parts.append(_Bottleneck(channels, width, 2 if k == 0 and number > 0 else 1))
            channels = 4 * width
    return nn.Sequential(*parts, nn.BatchNorm2d(channels), nn.ReLU(), classifier(channels))


def build(*, size_pixels: int, seed: int) -> Backbone:
    """Build it.

    Source:
        He et al., Identity mappings in deep residual networks, ECCV 2016 (arXiv:1603.05027).
    """
    return random_backbone(
        "resnet50_v2",
        _module,
        size_pixels=size_pixels,
        seed=seed,
        architecture="ResNet-50 v2 (arXiv:1603.05027)",
    )
