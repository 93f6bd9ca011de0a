"""How much work exits add to a backbone: the accounting of UniExit's Table 6."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def run_every_head_ratio(backbone: float, heads: Sequence[float]) -> float:
    """Work of a network that runs each head on its way to the last, over its backbone.

    Args:
        backbone: Work of the network without intermediate heads, any unit.
        heads: Work of each intermediate head, the same unit.

    Returns:
        At least 1.0; multiply by 100 for the paper's percentages.

    Source:
        UniExit, Table 6, row "Ref. EE".

    Example:
        >>> run_every_head_ratio(100.0, [10.0, 20.0])
        1.3
    """
    return (backbone + math.fsum(heads)) / backbone


def run_chosen_head_ratio(backbone: float, head: float) -> float:
    """Work at full depth of a network that runs only the head that was chosen.

    Source:
        UniExit, Table 6, row "UniExit".

    Example:
        >>> run_chosen_head_ratio(100.0, 1.5)
        1.015
    """
    return (backbone + head) / backbone


def llama_layer_weights(
    *, hidden: int, intermediate: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> int:
    """Weights of one Llama decoder layer, norms excepted: its multiply-adds per token.

    Example:
        >>> llama_layer_weights(hidden=2048, intermediate=8192, num_heads=32, num_kv_heads=8,
        ...                     head_dim=64)
        60817408
    """
    attention = hidden * head_dim * (2 * num_heads + 2 * num_kv_heads)
    return attention + 3 * hidden * intermediate


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWork:
    """Work of one residual block and the map it ends with.

    Attributes:
        macs: Multiply-adds of its convolutions for one sample.
        channels: Channels of its output.
        positions: H·W of its output.
    """

    macs: int
    channels: int
    positions: int

    def head_macs(self, width: int, num_classes: int) -> int:
        """Multiply-adds of an exit head here: 1x1 convolution to ``width``, pool, linear."""
        return self.channels * self.positions * width + width * num_classes


def bottleneck_blocks(
    *,
    depths: Sequence[int] = (3, 4, 6, 3),
    stem_channels: int = 64,
    expansion: int = 4,
    image_size: int = 224,
) -> tuple[BlockWork, ...]:
    """Work of each bottleneck of a ResNet, the stem counted with the first; ResNet-50 by default.

    The stride lies in the 3x3 convolution, as in the variant that transformers and torchvision
    have. Norms, activations and additions are not counted, as in published FLOPs.

    Args:
        depths: Bottlenecks of each stage; channels double and sizes halve from stage to stage.
        stem_channels: Channels of the 7x7 stem, and inner channels of the first stage.
        expansion: Output channels of a bottleneck over its inner channels.
        image_size: Height and width of the image, pixels, a multiple of 32.

    Returns:
        One record per bottleneck; the classifier, ``channels · classes``, is not in them.

    Source:
        K. He et al., Deep Residual Learning for Image Recognition (2016), table 1.

    Example:
        >>> sum(b.macs for b in bottleneck_blocks()) + 2048 * 1000  # the well-known 4.09 G
        4089184256
    """
    side = image_size // 2
    stem = 7 * 7 * 3 * stem_channels * side**2
    side //= 2
    given = stem_channels
    found = []
    for stage, depth in enumerate(depths):
        inner = stem_channels * 2**stage
        outer = inner * expansion
        for block in range(depth):
            stride = 2 if stage and not block else 1
            before, side = side, side // stride
            macs = given * inner * before**2 + (9 * inner * inner + inner * outer) * side**2
            if given != outer:
                macs += given * outer * side**2
            found.append(BlockWork(macs=macs + stem, channels=outer, positions=side**2))
            stem, given = 0, outer
    return tuple(found)
