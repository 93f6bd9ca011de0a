"""ResNet-50, the implementation in transformers, with random weights."""

from __future__ import annotations

from edgewise.data.preprocess import Preprocess
from edgewise.frontends.torch_module import import_torch
from edgewise.frontends.zoo.backbone import Backbone, import_transformers
from edgewise.frontends.zoo.random_weights import NOTE, initialise


def build(*, size_pixels: int, seed: int) -> Backbone:
    """Build it.

    Source:
        He et al., Deep residual learning for image recognition, CVPR 2016 (arXiv:1512.03385).
    """
    torch, transformers = import_torch(), import_transformers()
    with torch.random.fork_rng(devices=[]):
        module = transformers.ResNetForImageClassification(
            transformers.ResNetConfig(num_labels=1000)
        )
    initialise(module, torch.zeros(1, 3, size_pixels, size_pixels), seed=seed)
    return Backbone(
        name="resnet50",
        module=module,
        preprocess=Preprocess(
            size=(size_pixels, size_pixels),
            mean=(123.675, 116.28, 103.53),
            std=(58.395, 57.12, 57.375),
        ),
        weights="random",
        provenance={
            "architecture": "ResNet-50 of transformers (arXiv:1512.03385)",
            "weights": NOTE,
            "weights_seed": seed,
        },
    )
