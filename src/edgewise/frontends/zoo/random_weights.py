"""Random weights under which activations neither vanish nor explode."""

from __future__ import annotations

from typing import Any

from edgewise.frontends.torch_module import import_torch

NOTE = "random weights: the cost is real, the answers are not"


def initialise(module: Any, example: Any, *, seed: int) -> None:
    """Draw weights and let every batch normalisation measure its statistics once.

    Kaiming's scale keeps the variance through a layer, but residual sums would still double it at
    each block; statistics measured on noise make each branch add the same again.

    Args:
        module: Changed in place; left in evaluation mode.
        example: [1, C, H, W]; only its shape is used.
        seed: The same seed draws the same weights; torch's global generator is not touched.

    Source:
        He et al., Delving deep into rectifiers, ICCV 2015 (arXiv:1502.01852), fan-out mode.
    """
    torch = import_torch()
    generator = torch.Generator().manual_seed(seed)
    norms = []
    for part in module.modules():
        if isinstance(part, torch.nn.Conv2d):
            torch.nn.init.kaiming_normal_(
                part.weight, mode="fan_out", nonlinearity="relu", generator=generator
            )
            if part.bias is not None:
                torch.nn.init.zeros_(part.bias)
        elif isinstance(part, torch.nn.Linear):
            torch.nn.init.normal_(part.weight, std=0.01, generator=generator)
            torch.nn.init.zeros_(part.bias)
        elif isinstance(part, torch.nn.BatchNorm2d):
            norms.append((part, part.momentum))
            torch.nn.init.ones_(part.weight)
            torch.nn.init.zeros_(part.bias)
            part.momentum = 1.0  # the running statistics become those of this one batch
    noise = torch.empty(2, *example.shape[1:]).uniform_(-1.0, 1.0, generator=generator)
    module.eval()
    for part, _ in norms:
        part.train()
    with torch.no_grad():
        module(noise)
    module.eval()
    for part, momentum in norms:
        part.momentum = momentum
