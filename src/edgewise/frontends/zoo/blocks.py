"""Parts that several of the larger networks are made of; `build_backbone` has asked for torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from edgewise.data.preprocess import Preprocess
from edgewise.frontends.zoo.backbone import Backbone
from edgewise.frontends.zoo.random_weights import NOTE, initialise

Pair = int | tuple[int, int]


def conv(
    inputs: int, outputs: int, kernel: Pair, *, stride: int = 1, padding: Pair | None = None
) -> nn.Sequential:
    """Convolution, normalisation, ReLU; padded to keep the size unless told otherwise."""
    sides = (kernel, kernel) if isinstance(kernel, int) else kernel
    pad = (sides[0] // 2, sides[1] // 2) if padding is None else padding
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=pad, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class Branches(nn.Module):
    """Runs parts on the same input and joins their channels."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        """Join what the parts give."""
        return torch.cat([part(x) for part in self.parts], dim=1)


class Residual(nn.Module):
    """Adds a body to its input, or to a shortcut of it."""

    def __init__(self, body: nn.Module, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.body = body
        self.shortcut = nn.Identity() if shortcut is None else shortcut

    def forward(self, x: Tensor) -> Tensor:
        """Add them."""
        return self.body(x) + self.shortcut(x)  # type: ignore[no-any-return]


def classifier(channels: int, *, classes: int = 1000) -> nn.Sequential:
    """Global mean, then one linear layer."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def random_backbone(  # noqa: PLR0913 - what differs between networks
    name: str,
    make: Callable[[], nn.Module],
    *,
    size_pixels: int,
    seed: int,
    architecture: str,
    scaled: bool = True,
) -> Backbone:
    """Build a network with random weights for images of three channels.

    Args:
        name: Of the backbone.
        make: Builds the module; its draws do not touch torch's global generator.
        size_pixels: Of the input.
        seed: Of the weights.
        architecture: What it is, and its paper.
        scaled: Whether pixels become -1..1; else ImageNet's mean and deviation are used.
    """
    with torch.random.fork_rng(devices=[]):
        module = make()
    initialise(module, torch.zeros(1, 3, size_pixels, size_pixels), seed=seed)
    mean = (127.5,) * 3 if scaled else (123.675, 116.28, 103.53)
    std = (127.5,) * 3 if scaled else (58.395, 57.12, 57.375)
    return Backbone(
        name=name,
        module=module,
        preprocess=Preprocess(size=(size_pixels, size_pixels), mean=mean, std=std),
        weights="random",
        provenance={"architecture": architecture, "weights": NOTE, "weights_seed": seed},
    )
