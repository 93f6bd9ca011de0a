"""MnasNet-B1 1.0 with random weights."""

from __future__ import annotations

from torch import nn

from edgewise.frontends.zoo.backbone import Backbone
from edgewise.frontends.zoo.blocks import Residual, classifier, conv, random_backbone

# Kernel, stride of the first block, channels, expansion, blocks.
_GROUPS = (
    (3, 2, 24, 3, 3),
    (5, 2, 40, 3, 3),
    (5, 2, 80, 6, 3),
    (3, 1, 96, 6, 2),
    (5, 2, 192, 6, 4),
    (3, 1, 320, 6, 1),
)


def _depthwise(channels: int, kernel: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(
            channels,
            channels,
            kernel,
            stride=stride,
            padding=kernel // 2,
            groups=channels,
            bias=False,
        ),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
    )


def _project(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs))


def _block(inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> nn.Module:
    wide = inputs * expansion
    body = nn.Sequential(
        conv(inputs, wide, 1), _depthwise(wide, kernel, stride), _project(wide, outputs)
    )
    return Residual(body) if stride == 1 and inputs == outputs else body


def _module() -> nn.Module:
    parts: list[nn.Module] = [conv(3, 32, 3, stride=2), _depthwise(32, 3, 1), _project(32, 16)]
    channels = 16
    for kernel, stride, outputs, expansion, blocks in _GROUPS:
        for k in range(blocks):
            parts.append(_block(channels, outputs, kernel, stride if k == 0 else 1, expansion))
            channels = outputs
    return nn.Sequential(*parts, conv(channels, 1280, 1), classifier(1280))


def build(*, size_pixels: int, seed: int) -> Backbone:
    """Build it.

    Source:
        Tan et al., MnasNet: platform-aware neural architecture search for mobile, CVPR 2019
        (arXiv:1807.11626), model B1.
    """
    return random_backbone(
        "mnasnet",
        _module,
        size_pixels=size_pixels,
        seed=seed,
        architecture="MnasNet-B1 1.0 (arXiv:1807.11626)",
        scaled=False,
    )
