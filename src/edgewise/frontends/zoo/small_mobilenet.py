"""MobileNetV2 at width 0.35 for images of 28 pixels: transformers' blocks with fewer strides.

Its 16 inverted residuals run on 14, 7 and 4 pixels. It trains on one core in minutes.
"""

from __future__ import annotations

from edgewise.data.preprocess import Preprocess
from edgewise.frontends.torch_module import import_torch
from edgewise.frontends.zoo.backbone import Backbone, import_transformers
from edgewise.frontends.zoo.random_weights import NOTE, initialise

DEFAULT_PIXELS = 28
MIN_PIXELS = 16
_WIDTH, _EXPANSION = 0.35, 4
_STRIDES = (1, 1, 2, 1, 1, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1)


def build(*, size_pixels: int, seed: int) -> Backbone:
    """Build it, untrained.

    Source:
        Sandler et al., MobileNetV2: inverted residuals and linear bottlenecks, CVPR 2018
        (arXiv:1801.04381); there the strides suit 224 pixels and the expansion is 6.
    """
    torch, transformers = import_torch(), import_transformers()
    config = transformers.MobileNetV2Config(
        num_channels=1,
        num_labels=10,
        image_size=size_pixels,
        depth_multiplier=_WIDTH,
        expand_ratio=_EXPANSION,
        finegrained_output=False,
        tf_padding=False,
    )
    with torch.random.fork_rng(devices=[]):
        module = transformers.MobileNetV2ForImageClassification(config)
    # Blocks that change their stride here change their channels too, so none of them adds its
    # input to its output: whether it does was decided when it was made.
    for block, stride in zip(module.mobilenet_v2.layer, _STRIDES, strict=True):
        block.conv_3x3.convolution.stride = (stride, stride)
    for part in module.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            part.momentum = 0.1  # 0.997 there, which keeps the last batch alone
    initialise(module, torch.zeros(1, 1, size_pixels, size_pixels), seed=seed)
    return Backbone(
        name="small_mobilenet",
        module=module,
        preprocess=Preprocess(
            size=(size_pixels, size_pixels), mean=(72.9,), std=(90.0,), channels=1
        ),
        weights="random",
        provenance={
            "architecture": "MobileNetV2 of transformers (arXiv:1801.04381), width 0.35, expansion"
            " 4, strides for 28 pixels",
            "weights": NOTE,
            "weights_seed": seed,
        },
    )
