"""Xception with random weights."""

from __future__ import annotations

from torch import nn

from edgewise.frontends.zoo.backbone import Backbone
from edgewise.frontends.zoo.blocks import Residual, classifier, conv, random_backbone

DEFAULT_PIXELS = 299
MIN_PIXELS = 96


def _separable(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, inputs, 3, padding=1, groups=inputs, bias=False),
        nn.Conv2d(inputs, outputs, 1, bias=False),
        nn.BatchNorm2d(outputs),
    )


def _shrink(inputs: int, middle: int, outputs: int, *, first_relu: bool = True) -> nn.Module:
    body = nn.Sequential(
        *([nn.ReLU()] if first_relu else []),
        _separable(inputs, middle),
        nn.ReLU(),
        _separable(middle, outputs),
        nn.MaxPool2d(3, stride=2, padding=1),
    )
    shortcut = nn.Sequential(
        nn.Conv2d(inputs, outputs, 1, stride=2, bias=False), nn.BatchNorm2d(outputs)
    )
    return Residual(body, shortcut)


def _middle() -> nn.Module:
    steps: list[nn.Module] = []
    for _ in range(3):
        steps += [nn.ReLU(), _separable(728, 728)]
    return Residual(nn.Sequential(*steps))


def _module() -> nn.Module:
    return nn.Sequential(
        conv(3, 32, 3, stride=2, padding=0),
        conv(32, 64, 3, padding=0),
        _shrink(64, 128, 128, first_relu=False),
        _shrink(128, 256, 256),
        _shrink(256, 728, 728),
        *(_middle() for _ in range(8)),
        _shrink(728, 728, 1024),
        _separable(1024, 1536),
        nn.ReLU(),
        _separable(1536, 2048),
        nn.ReLU(),
        classifier(2048),
    )


def build(*, size_pixels: int, seed: int) -> Backbone:
    """Build it.

    Source:
        Chollet, Xception: deep learning with depthwise separable convolutions, CVPR 2017
        (arXiv:1610.02357).
    """
    return random_backbone(
        "xception",
        _module,
        size_pixels=size_pixels,
        seed=seed,
        architecture="Xception (arXiv:1610.02357)",
    )
