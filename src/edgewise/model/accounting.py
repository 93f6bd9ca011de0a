"""How much work exits add to a backbone: the accounting of UniExit's Table 6."""

from __future__ import annotations

import math
from collections.abc import Sequence


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
