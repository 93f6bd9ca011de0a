"""torch: each operator as the transformers library computes it, so that its cost is the library's.

Segments are their operators one by one; fixed operators exist here only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from edgewise.backends.operators.base import OperatorProgram, Weights
from edgewise.backends.operators.boundary import check_layer, check_rows, check_tensor
from edgewise.backends.operators.weights import attention_of, check_weights
from edgewise.errors import BackendError, BackendUnavailable, OpUnsupported, ShapeError
from edgewise.profiles.operators import AttentionShape, OperatorShape

Run = Callable[..., Any]
Tensors = Mapping[str, Tensor]


def load(
    shape: OperatorShape, weights: Weights, device: str, *, threads: int = 1
) -> OperatorProgram:
    """Take an operator to torch on the CPU, or on a CUDA device.

    Raises:
        BackendUnavailable: There is no CUDA device.
        ShapeError: Weights are missing, or have other sizes.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise BackendUnavailable(
            "backend 'torch:cuda' is not available: torch finds no CUDA device",
            help="edgewise doctor --backends",
        )
    return TorchProgram(shape, weights, device=device, threads=threads)


class TorchProgram(OperatorProgram):
    """One operator. On CUDA, inputs and outputs are copied and the device is waited for."""

    any_rows = True

    def __init__(
        self, shape: OperatorShape, weights: Weights, *, device: str, threads: int
    ) -> None:
        if device == "cuda" and shape.is_fixed:
            raise OpUnsupported(f"{shape.kind!r} stays on torch:cpu")
        self.shape, self.weights, self.threads = shape, weights, threads
        self.backend = f"torch:{device}"
        tensors = check_weights(shape, weights)
        self._device = device
        if device != "cpu":
            tensors = {role: tensor.to(device) for role, tensor in tensors.items()}
        self._tensors = tensors
        self._run = _function(shape, tensors, weights.eps)
        self._check = _checker(shape)

    def __call__(self, *inputs: Tensor) -> Any:
        """Check and run."""
        checked = self._check(*inputs)
        try:
            if self._device == "cpu":
                return self._run(*checked)
            # `.to` and `.cpu` wait for the device, so nothing is read before it is written.
            result = self._run(*(x.to(self._device) for x in checked))
            return result.cpu() if isinstance(result, Tensor) else tuple(y.cpu() for y in result)
        except (IndexError, RuntimeError) as error:
            raise BackendError(f"{self.backend} failed on {self.shape.key!r}: {error}") from error

    @property
    def weight_bytes(self) -> int:
        """0 on the CPU: the weights are shared."""
        on_cpu = self._device == "cpu"
        return 0 if on_cpu else sum(4 * tensor.numel() for tensor in self._tensors.values())


def _checker(shape: OperatorShape) -> Callable[..., tuple[Tensor, ...]]:
    """What checks the inputs of a shape."""
    match shape.kind:
        case "layer":
            return functools.partial(check_layer, shape)
        case "rope" | "attention" | "add" | "multiply" | "embedding":
            return functools.partial(_check_fixed, shape)
        case _:
            return functools.partial(check_rows, shape)


def _check_fixed(shape: OperatorShape, *inputs: Tensor) -> tuple[Tensor, ...]:
    expected = {"rope": 3, "attention": 5, "embedding": 1}.get(shape.kind, 2)
    if len(inputs) != expected:
        raise ShapeError(f"{shape.kind} takes {expected} tensors, found {len(inputs)}")
    dtype = torch.int64 if shape.kind == "embedding" else torch.float32
    return tuple(check_tensor(x, "an input", shape, dtype=dtype) for x in inputs)


def _function(shape: OperatorShape, w: Tensors, eps: float) -> Run:  # noqa: C901, PLR0911, PLR0912 - a table
    """What computes a shape."""
    match shape.kind:
        case "linear":
            return functools.partial(_linear, w["weight"], w.get("bias"))
        case "activation":
            return _activation(shape.function)
        case "rmsnorm":
            return functools.partial(_rms_norm, w["weight"], eps)
        case "layernorm":
            return functools.partial(_layer_norm, w["weight"], w.get("bias"), eps)
        case "norm_linear":
            norm = _norm_before(w, eps, layer_norm=shape.function == "layernorm")
            linear = functools.partial(_linear, w["weight"], w.get("bias"))
            return lambda x: linear(norm(x))
        case "mlp":
            return _mlp(shape, w)
        case "norm_mlp":
            norm = _norm_before(w, eps, layer_norm=shape.function == "gelu-packed")
            mlp = _mlp(shape, w)
            return lambda x: mlp(norm(x))
        case "layer":
            return _Layer(shape, w, eps)
        case "attention":
            return functools.partial(_attention, attention_of(shape))
        case "rope":
            return functools.partial(_rope_of_rows, attention_of(shape))
        case "add":
            return torch.add
        case "multiply":
            return torch.mul
        case "embedding":
            return lambda tokens: functional.embedding(tokens, w["weight"])


def _linear(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    return functional.linear(x, weight, bias)


def _rms_norm(weight: Tensor, eps: float, x: Tensor) -> Tensor:
    # As LlamaRMSNorm does it, not `functional.rms_norm`, which is faster and not what runs.
    variance = x.pow(2).mean(-1, keepdim=True)
    return weight * (x * torch.rsqrt(variance + eps))


def _layer_norm(weight: Tensor, bias: Tensor | None, eps: float, x: Tensor) -> Tensor:
    return functional.layer_norm(x, weight.shape, weight, bias, eps)


def _norm_before(w: Tensors, eps: float, *, layer_norm: bool) -> Run:
    if layer_norm:
        return functools.partial(_layer_norm, w["norm.weight"], w.get("norm.bias"), eps)
    return functools.partial(_rms_norm, w["norm.weight"], eps)


def _activation(function: str) -> Run:
    found: dict[str, Run] = {"silu": functional.silu, "gelu": functional.gelu}
    if function not in found:
        raise OpUnsupported(f"activations are {', '.join(found)}; found {function!r}")
    return found[function]


def _mlp(shape: OperatorShape, w: Tensors) -> Run:
    if shape.function == "gelu-packed":

        def packed(x: Tensor) -> Tensor:
            active, gate = functional.linear(x, w["gate_up"]).chunk(2, dim=-1)
            return functional.linear(functional.gelu(active) * gate, w["down"])

        return packed
    if shape.function != "silu-gated":
        raise OpUnsupported(f"MLPs are silu-gated or gelu-packed; found {shape.function!r}")

    def gated(x: Tensor) -> Tensor:
        gate = functional.silu(functional.linear(x, w["gate"]))
        return functional.linear(gate * functional.linear(x, w["up"]), w["down"])

    return gated


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [1, heads, M, head_dim] by angles [1, 1, M, head_dim]."""
    half = x.shape[-1] // 2
    return (x * cos) + (torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin)


def _rope_of_rows(a: AttentionShape, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    heads = x.view(1, x.shape[1], a.heads, a.head_dim).transpose(1, 2)
    return _rope(heads, cos.unsqueeze(1), sin.unsqueeze(1))


def _attention(  # noqa: PLR0913, PLR0917 - what attention is a function of
    a: AttentionShape, q: Tensor, k: Tensor, v: Tensor, past_keys: Tensor, past_values: Tensor
) -> Tensor:
    """Extend the cache as ``DynamicCache`` does, attend causally, and put heads side by side."""
    k, v = torch.cat((past_keys, k), dim=-2), torch.cat((past_values, v), dim=-2)
    rows, total = q.shape[2], k.shape[2]
    # torch's own causal mask is for equal lengths: it starts at the upper left.
    mask = causal_mask(rows, total, device=q.device) if 1 < rows < total else None
    grouped = a.heads != a.kv_heads
    if grouped and mask is not None:  # as the library: with a mask, heads are repeated
        k, v = (z.repeat_interleave(a.heads // a.kv_heads, dim=1) for z in (k, v))
        grouped = False
    y = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=rows > 1 and mask is None, enable_gqa=grouped
    )
    return y.transpose(1, 2).reshape(1, rows, a.heads * a.head_dim)


def causal_mask(rows: int, total: int, *, device: torch.device | str = "cpu") -> Tensor:
    """Which of the keys each of the last rows sees, [rows, total]."""
    return torch.ones(rows, total, dtype=torch.bool, device=device).tril(diagonal=total - rows)


class _Layer:
    """A decoder layer as Llama, Qwen2, Qwen3 and OLMo2 compute it."""

    def __init__(self, shape: OperatorShape, w: Tensors, eps: float) -> None:
        self.a, self.w, self.eps = attention_of(shape), w, eps
        self.mlp = _mlp(shape, w)

    def norm(self, role: str, x: Tensor) -> Tensor:
        return _rms_norm(self.w[role], self.eps, x)

    def projected(self, role: str, x: Tensor) -> Tensor:
        """Queries, keys or values, [1, heads, M, head_dim]."""
        y = functional.linear(x, self.w[role], self.w.get(f"{role}.bias"))
        normed = role != "v"
        if normed and self.a.qk_norm == "full":
            y = self.norm(f"{role}_norm", y)
        y = y.view(1, y.shape[1], y.shape[-1] // self.a.head_dim, self.a.head_dim)
        if normed and self.a.qk_norm == "head":
            y = self.norm(f"{role}_norm", y)
        return y.transpose(1, 2)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        a = self.a
        y = x if a.post_norm else self.norm("input_norm", x)
        q, k, v = (self.projected(role, y) for role in "qkv")
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        q, k = _rope(q, cos, sin), _rope(k, cos, sin)
        y = functional.linear(_attention(a, q, k, v, *past), self.w["o"])
        x = x + (self.norm("input_norm", y) if a.post_norm else y)
        y = self.mlp(x if a.post_norm else self.norm("post_norm", x))
        return x + (self.norm("post_norm", y) if a.post_norm else y), k, v
