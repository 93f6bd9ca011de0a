"""MobileNetV2 1.0, the implementation in transformers, with random weights."""

from __future__ import annotations

from edgewise.data.preprocess import Preprocess
from edgewise.frontends.torch_module import import_torch
from edgewise.frontends.zoo.backbone import Backbone, import_transformers
from edgewise.frontends.zoo.random_weights import NOTE, initialise


def build(*, size_pixels: int, seed: int) -> Backbone:
    """Build it.

    Source:
        Sandler et al., MobileNetV2: inverted residuals and linear bottlenecks, CVPR 2018
        (arXiv:1801.04381).
    """
    torch, transformers = import_torch(), import_transformers()
    config = transformers.MobileNetV2Config(image_size=size_pixels, num_labels=1000)
    with torch.random.fork_rng(devices=[]):
        module = transformers.MobileNetV2ForImageClassification(config)
    initialise(module, torch.zeros(1, 3, size_pixels, size_pixels), seed=seed)
    return Backbone(
        name="mobilenet_v2",
        module=module,
        preprocess=Preprocess(size=(size_pixels, size_pixels), mean=(127.5,) * 3, std=(127.5,) * 3),
        weights="random",
        provenance={
            "architecture": "MobileNetV2 1.0 of transformers (arXiv:1801.04381)",
            "weights": NOTE,
            "weights_seed": seed,
        },
    )
