"""Weights and inputs of operators: what each kind has, random ones, and what slows a CPU down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from edgewise.backends.base import import_runtime
from edgewise.errors import ShapeError

if TYPE_CHECKING:
    import torch

    from edgewise.profiles.operators import AttentionShape, OperatorShape

_VOCABULARY = 1024  # rows of a random embedding: what a look-up costs does not depend on it
_ROPE_BASE = 10_000.0
_SUBNORMAL_PATTERN = 0x7F800000  # exponent bits of a float32
_LARGEST_DRAW = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weights:
    """Parameters of one operator or segment.

    Attributes:
        tensors: By role, contiguous float32 on the CPU, never written to.

            ======================  ==========================================================
            kind                    roles
            ======================  ==========================================================
            linear                  ``weight`` [N, K]; ``bias`` [N] where the shape says so
            rmsnorm                 ``weight`` [N]
            layernorm               ``weight`` [N]; ``bias`` [N] where the shape says so
            norm_linear             those of the linear, ``norm.weight`` [K]; may have
                                    ``norm.bias`` [K] if it is a layer norm
            mlp, silu-gated         ``gate`` [N, K], ``up`` [N, K], ``down`` [K, N]
            mlp, gelu-packed        ``gate_up`` [2 N, K]: first what is activated, then the
                                    gate; ``down`` [K, N]
            norm_mlp                those of the mlp, ``norm.weight`` [K]; may have
                                    ``norm.bias`` [K] if packed, whose norm is a layer norm
            layer                   ``q`` [heads * head_dim, K], ``k`` and ``v`` [kv_heads *
                                    head_dim, K], ``o`` [K, heads * head_dim]; ``q.bias``,
                                    ``k.bias``, ``v.bias`` where the shape says so; ``q_norm``
                                    and ``k_norm``, [head_dim] or as wide as q and k, where it
                                    does; ``input_norm`` [K], the norm before attention (after
                                    it where norms stand behind); ``post_norm`` [K], that of
                                    the MLP; those of the silu-gated mlp
            embedding               ``weight`` [any, K]
            all others              none
            ======================  ==========================================================
        eps: Of all its norms.
    """

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    eps: float = 1e-5


def weight_sizes(  # noqa: PLR0911 - a table
    shape: OperatorShape,
) -> dict[str, tuple[int, ...]]:
    """Sizes of the weights that an operator must have, by role.

    Example:
        >>> from edgewise.profiles.operators import OperatorShape
        >>> weight_sizes(OperatorShape(kind="mlp", m=1, k=4, n=6, function="gelu-packed"))
        {'gate_up': (12, 4), 'down': (4, 6)}
    """
    k, n = shape.k, shape.n
    bias: dict[str, tuple[int, ...]] = {"bias": (n,)} if shape.bias else {}
    match shape.kind:
        case "linear":
            return {"weight": (n, k), **bias}
        case "norm_linear":
            return {"norm.weight": (k,), "weight": (n, k), **bias}
        case "rmsnorm":
            return {"weight": (n,)}
        case "layernorm":
            return {"weight": (n,), **bias}
        case "mlp":
            return _mlp_sizes(shape)
        case "norm_mlp":
            return {"norm.weight": (k,), **_mlp_sizes(shape)}
        case "layer":
            return _layer_sizes(shape)
        case "embedding":
            return {"weight": (_VOCABULARY, k)}
        case _:
            return {}


def _mlp_sizes(shape: OperatorShape) -> dict[str, tuple[int, ...]]:
    k, n = shape.k, shape.n
    if shape.function == "gelu-packed":
        return {"gate_up": (2 * n, k), "down": (k, n)}
    return {"gate": (n, k), "up": (n, k), "down": (k, n)}


def _layer_sizes(shape: OperatorShape) -> dict[str, tuple[int, ...]]:
    a, k = attention_of(shape), shape.k
    q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    found: dict[str, tuple[int, ...]] = {"q": (q, k), "k": (kv, k), "v": (kv, k), "o": (k, q)}
    if shape.bias:
        found |= {"q.bias": (q,), "k.bias": (kv,), "v.bias": (kv,)}
    if a.qk_norm:
        head = a.qk_norm == "head"
        found |= {"q_norm": (a.head_dim if head else q,), "k_norm": (a.head_dim if head else kv,)}
    return {**found, "input_norm": (k,), "post_norm": (k,), **_mlp_sizes(shape)}


def check_weights(shape: OperatorShape, weights: Weights) -> dict[str, torch.Tensor]:
    """Take from weights what a shape needs.

    Returns:
        By role: what is required, and a ``norm.bias`` where there is one.

    Raises:
        ShapeError: One is missing, or has another size, type, layout or device.
    """
    import torch

    sizes = weight_sizes(shape)
    if "norm.bias" in weights.tensors and "norm.weight" in sizes:
        sizes["norm.bias"] = (shape.k,)
    found = {}
    for role, size in sizes.items():
        tensor = weights.tensors.get(role)
        if tensor is None:
            raise ShapeError(
                f"{shape.key!r} needs the weights {', '.join(sizes)};"
                f" found {', '.join(weights.tensors) or 'none'}"
            )
        if shape.kind == "embedding":
            size = (tensor.shape[0], shape.k)  # noqa: PLW2901 - a vocabulary has any size
        if (
            tuple(tensor.shape) != size
            or tensor.dtype is not torch.float32
            or not tensor.is_cpu
            or not tensor.is_contiguous()
        ):
            raise ShapeError(
                f"weight {role!r} of {shape.key!r} is a contiguous float32 tensor {list(size)} on"
                f" the CPU, found {tensor.dtype} {list(tensor.shape)} on {tensor.device},"
                f" strides {tensor.stride()}"
            )
        found[role] = tensor.detach()
    return found


def random_weights(shape: OperatorShape, rng: np.random.Generator) -> Weights:
    """Weights as trained ones are distributed: none subnormal, activations keep their scale."""
    import_runtime("torch", backend="torch:cpu", extra="torch")
    import torch

    tensors = {}
    for role, size in weight_sizes(shape).items():
        values = _normal(rng, size)
        if len(size) == 2:
            values /= np.float32(1.0 if shape.kind == "embedding" else np.sqrt(size[1]))
        elif role.endswith("bias"):
            values *= np.float32(0.02)
        else:
            values = np.float32(1.0) + np.float32(0.1) * values
        tensors[role] = torch.from_numpy(values)
    return Weights(tensors=tensors)


def random_inputs(shape: OperatorShape, rng: np.random.Generator) -> tuple[torch.Tensor, ...]:
    """Inputs of an operator as a normalised hidden state has them, RoPE angles as at position P."""
    import_runtime("torch", backend="torch:cpu", extra="torch")
    import torch

    def normal(*size: int) -> torch.Tensor:
        return torch.from_numpy(_normal(rng, size))

    m, k = shape.m, shape.k
    match shape.kind:
        case "layer":
            a = attention_of(shape)
            past = [normal(1, a.kv_heads, a.past, a.head_dim) for _ in range(2)]
            return (normal(1, m, k), *_angles(m, a), *past)
        case "rope":
            return (normal(1, m, k), *_angles(m, attention_of(shape)))
        case "attention":
            a = attention_of(shape)
            heads = (a.heads, a.kv_heads, a.kv_heads)
            past = [normal(1, a.kv_heads, a.past, a.head_dim) for _ in range(2)]
            return (*(normal(1, h, m, a.head_dim) for h in heads), *past)
        case "add" | "multiply":
            return normal(1, m, k), normal(1, m, k)
        case "embedding":
            return (torch.from_numpy(rng.integers(0, _VOCABULARY, size=(1, m))),)
        case _:
            return (normal(1, m, k),)


def attention_of(shape: OperatorShape) -> AttentionShape:
    """Take the attention shape that every layer, attention and RoPE has."""
    return cast("AttentionShape", shape.attention)


def _normal(rng: np.random.Generator, size: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Standard normal numbers; of very many, some are repeated, because drawing takes seconds."""
    count = int(np.prod(size))
    drawn = rng.standard_normal(min(count, _LARGEST_DRAW), dtype=np.float32)
    return (drawn if count <= _LARGEST_DRAW else np.resize(drawn, count)).reshape(size)


def _angles(m: int, a: AttentionShape) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine [1, M, head_dim] of positions P to P + M - 1."""
    import torch

    positions = torch.arange(a.past, a.past + m, dtype=torch.float32)
    steps = torch.arange(0, a.head_dim, 2, dtype=torch.float32) / a.head_dim
    half = torch.outer(positions, _ROPE_BASE**-steps)
    both = torch.cat((half, half), dim=-1)[None]
    return both.cos(), both.sin()


def subnormal_share(weights: Weights) -> float:
    """Which share of the weights is subnormal: not zero, but below 1.2e-38 in magnitude.

    A CPU multiplies such numbers in microcode, tens of times slower. Trained networks have been
    seen to be full of them.

    Returns:
        Between 0 and 1; 0 without weights.

    Source:
        pytorch issues 19651 and 21734.
    """
    total = found = 0
    for tensor in weights.tensors.values():
        bits = tensor.detach().numpy().view(np.uint32)
        found += int(np.count_nonzero(((bits & _SUBNORMAL_PATTERN) == 0) & (bits << 1 != 0)))
        total += bits.size
    return found / total if total else 0.0
