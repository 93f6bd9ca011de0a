"""Inception-v4 with random weights."""

from __future__ import annotations

from torch import nn

from edgewise.frontends.zoo.backbone import Backbone
from edgewise.frontends.zoo.blocks import Branches, classifier, conv, random_backbone

DEFAULT_PIXELS = 299
MIN_PIXELS = 96


def _pooled(inputs: int, outputs: int) -> nn.Sequential:
    mean = nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)
    return nn.Sequential(mean, conv(inputs, outputs, 1))


def _stem() -> nn.Sequential:
    return nn.Sequential(
        conv(3, 32, 3, stride=2, padding=0),
        conv(32, 32, 3, padding=0),
        conv(32, 64, 3),
        Branches(nn.MaxPool2d(3, stride=2), conv(64, 96, 3, stride=2, padding=0)),
        Branches(
            nn.Sequential(conv(160, 64, 1), conv(64, 96, 3, padding=0)),
            nn.Sequential(
                conv(160, 64, 1),
                conv(64, 64, (1, 7)),
                conv(64, 64, (7, 1)),
                conv(64, 96, 3, padding=0),
            ),
        ),
        Branches(conv(192, 192, 3, stride=2, padding=0), nn.MaxPool2d(3, stride=2)),
    )


def _a() -> nn.Module:
    return Branches(
        conv(384, 96, 1),
        nn.Sequential(conv(384, 64, 1), conv(64, 96, 3)),
        nn.Sequential(conv(384, 64, 1), conv(64, 96, 3), conv(96, 96, 3)),
        _pooled(384, 96),
    )


def _b() -> nn.Module:
    return Branches(
        conv(1024, 384, 1),
        nn.Sequential(conv(1024, 192, 1), conv(192, 224, (1, 7)), conv(224, 256, (7, 1))),
        nn.Sequential(
            conv(1024, 192, 1),
            conv(192, 192, (7, 1)),
            conv(192, 224, (1, 7)),
            conv(224, 224, (7, 1)),
            conv(224, 256, (1, 7)),
        ),
        _pooled(1024, 128),
    )


def _c() -> nn.Module:
    return Branches(
        conv(1536, 256, 1),
        nn.Sequential(conv(1536, 384, 1), Branches(conv(384, 256, (1, 3)), conv(384, 256, (3, 1)))),
        nn.Sequential(
            conv(1536, 384, 1),
            conv(384, 448, (3, 1)),
            conv(448, 512, (1, 3)),
            Branches(conv(512, 256, (1, 3)), conv(512, 256, (3, 1))),
        ),
        _pooled(1536, 256),
    )


def _shrink_a() -> nn.Module:
    return Branches(
        conv(384, 384, 3, stride=2, padding=0),
        nn.Sequential(conv(384, 192, 1), conv(192, 224, 3), conv(224, 256, 3, stride=2, padding=0)),
        nn.MaxPool2d(3, stride=2),
    )


def _shrink_b() -> nn.Module:
    return Branches(
        nn.Sequential(conv(1024, 192, 1), conv(192, 192, 3, stride=2, padding=0)),
        nn.Sequential(
            conv(1024, 256, 1),
            conv(256, 256, (1, 7)),
            conv(256, 320, (7, 1)),
            conv(320, 320, 3, stride=2, padding=0),
        ),
        nn.MaxPool2d(3, stride=2),
    )


def _module() -> nn.Module:
    return nn.Sequential(
        _stem(),
        *(_a() for _ in range(4)),
        _shrink_a(),
        *(_b() for _ in range(7)),
        _shrink_b(),
        *(_c() for _ in range(3)),
        classifier(1536),
    )


def build(*, size_pixels: int, seed: int) -> Backbone:
    """Build it.

    Source:
        Szegedy et al., Inception-v4, Inception-ResNet and the impact of residual connections on
        learning, AAAI 2017 (arXiv:1602.07261).
    """
    return random_backbone(
        "inception_v4",
        _module,
        size_pixels=size_pixels,
        seed=seed,
        architecture="Inception-v4 (arXiv:1602.07261)",
    )
