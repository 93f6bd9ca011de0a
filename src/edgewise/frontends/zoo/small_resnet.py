"""A bottleneck ResNet for images of 28 pixels: transformers' blocks, narrow, with a small stem.

Eight bottlenecks of similar work, each of which can end a stage. It trains on one core in minutes.
"""

from __future__ import annotations

from edgewise.data.preprocess import Preprocess
from edgewise.frontends.torch_module import import_torch
from edgewise.frontends.zoo.backbone import Backbone, import_transformers
from edgewise.frontends.zoo.random_weights import NOTE, initialise

DEFAULT_PIXELS = 28
MIN_PIXELS = 16
_STEM, _WIDTHS, _DEPTHS = 24, (48, 96, 192), (3, 3, 2)


def build(*, size_pixels: int, seed: int) -> Backbone:
    """Build it, untrained.

    Source:
        He et al., Deep residual learning for image recognition, CVPR 2016 (arXiv:1512.03385); the
        stem is a 3x3 convolution without pooling, as their CIFAR networks have it, at stride 2.
    """
    torch, transformers = import_torch(), import_transformers()
    config = transformers.ResNetConfig(
        num_channels=1,
        num_labels=10,
        embedding_size=_STEM,
        hidden_sizes=list(_WIDTHS),
        depths=list(_DEPTHS),
    )
    with torch.random.fork_rng(devices=[]):
        module = transformers.ResNetForImageClassification(config)
        stem = module.resnet.embedder
        stem.embedder.convolution = torch.nn.Conv2d(1, _STEM, 3, stride=2, padding=1, bias=False)
        stem.pooler = torch.nn.Identity()
    initialise(module, torch.zeros(1, 1, size_pixels, size_pixels), seed=seed)
    return Backbone(
        name="small_resnet",
        module=module,
        # Mean and deviation of Fashion-MNIST's training images; they suit any grey images.
        preprocess=Preprocess(
            size=(size_pixels, size_pixels), mean=(72.9,), std=(90.0,), channels=1
        ),
        weights="random",
        provenance={
            "architecture": "bottleneck ResNet of transformers (arXiv:1512.03385), depths 3, 3, 2,"
            " widths 48, 96, 192, 3x3 stem",
            "weights": NOTE,
            "weights_seed": seed,
        },
    )
