"""Where tensors cross from torch into another runtime and back: by address, without a copy.

Everything that can go wrong with a bare address is checked here, before one is taken: type, device,
layout, size, gradient. Programs of both runtimes share this; each adds how a call is bound.
"""

from __future__ import annotations

import functools
import math
import threading
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from edgewise.backends.operators.base import OperatorProgram, Weights
from edgewise.backends.operators.graphs import OperatorGraph
from edgewise.backends.operators.weights import attention_of
from edgewise.errors import BackendError, EdgeError, ShapeError
from edgewise.profiles.operators import OperatorShape

# Calls of one program in one thread that are kept bound. Allocators hand out the same addresses
# again and again in steady state, so that a few suffice.
KEPT = 32
_MASKED = -math.inf


def check_tensor(
    x: Any, name: str, shape: OperatorShape, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Make sure that something is a tensor whose address may be taken.

    Returns:
        The same tensor, or, if it was not contiguous or tracked a gradient, one that is and does
        not.

    Raises:
        ShapeError: It is no tensor, has another type, or is not in the CPU's memory.
    """
    # Of other subclasses (fakes, wrappers) nobody knows what lies at their address.
    if type(x) is not Tensor and type(x) is not torch.nn.Parameter:
        raise ShapeError(
            f"{name} of {shape.key!r} is a torch.Tensor, found {type(x).__name__}",
            help="torch.from_numpy, from_dlpack and as_subclass make one without a copy",
        )
    if x.dtype is not dtype or not x.is_cpu or x.layout is not torch.strided or x.is_nested:
        layout = "nested" if x.is_nested else x.layout
        raise ShapeError(
            f"{name} of {shape.key!r} is a dense {dtype} tensor on the CPU,"
            f" found {x.dtype} on {x.device}, layout {layout}"
        )
    if x.requires_grad:
        x = x.detach()
    if not x.is_contiguous():
        x = x.contiguous()
    resolved: Tensor = x.resolve_neg() if x.is_neg() else x
    return resolved


def check_rows(shape: OperatorShape, *inputs: Any) -> tuple[Tensor]:
    """Check the only input of everything that works on rows.

    Raises:
        ShapeError: It is not one tensor [..., K]; of an activation, not one tensor.
    """
    if len(inputs) != 1:
        raise ShapeError(f"{shape.key!r} takes one tensor, found {len(inputs)}")
    x = check_tensor(inputs[0], "the input", shape)
    if shape.kind != "activation" and (x.dim() == 0 or x.shape[-1] != shape.k):
        raise ShapeError(f"the input of {shape.key!r} is [..., {shape.k}], found {list(x.shape)}")
    return (x,)


def check_layer(shape: OperatorShape, *inputs: Any) -> tuple[Tensor, ...]:
    """Check the five inputs of a layer.

    Raises:
        ShapeError: One of them has another size than the others and the shape ask for.
    """
    names = ("hidden", "cos", "sin", "past_keys", "past_values")
    if len(inputs) != len(names):
        raise ShapeError(f"a layer takes {', '.join(names)}; found {len(inputs)} tensors")
    checked = tuple(check_tensor(x, n, shape) for n, x in zip(names, inputs, strict=True))
    a, m = attention_of(shape), checked[0].shape[-2] if checked[0].dim() == 3 else shape.m
    past = checked[3].shape[2] if checked[3].dim() == 4 else a.past
    cache = (1, a.kv_heads, past, a.head_dim)
    sizes = ((1, m, shape.k), (1, m, a.head_dim), (1, m, a.head_dim), cache, cache)
    for name, x, size in zip(names, checked, sizes, strict=True):
        if tuple(x.shape) != size:
            raise ShapeError(f"{name} of {shape.key!r} is {list(size)}, found {list(x.shape)}")
    return checked


class SharedMemoryProgram(OperatorProgram):
    """A program of a runtime that reads and writes torch's memory.

    Args:
        shape: What it computes.
        weights: Kept alive, because the runtime reads them where they are.
        graph: What was made of both.
        backend: Runtime and device.
        threads: Of each call.
    """

    any_rows = True

    def __init__(
        self,
        shape: OperatorShape,
        weights: Weights,
        graph: OperatorGraph,
        *,
        backend: str,
        threads: int,
    ) -> None:
        self.shape, self.weights, self.backend, self.threads = shape, weights, backend, threads
        self._matrices = [w for w in graph.weights.values() if w.dim() == 2]
        self._width = shape.k if shape.kind in {"mlp", "norm_mlp"} else shape.n
        self._keeps_size = shape.kind == "activation" or self._width == shape.k
        # Threads take turns with nothing: each has bindings of its own.
        self._local = threading.local()
        self._is_layer = shape.kind == "layer"
        if self._is_layer:
            a = attention_of(shape)
            self._nobody = _empty((1, a.kv_heads, 1, a.head_dim)).zero_()

    @abstractmethod
    def _execute(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Run on checked tensors, read and written where they are; none has a size of zero.

        Addresses may be remembered, tensors may not: memory that is held is never handed out
        again at the same address. The caller holds all of them until this returns.
        """

    @property
    def weight_bytes(self) -> int:
        """Of the matrices, which both runtimes keep once more, packed for their kernels."""
        return sum(4 * matrix.numel() for matrix in self._matrices)

    def __call__(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Check, make outputs, run."""
        if self._is_layer:
            return self._call_layer(*check_layer(self.shape, *inputs))
        (x,) = check_rows(self.shape, *inputs)
        # The first is faster than asking for a size.
        y = torch.empty_like(x) if self._keeps_size else _empty([*x.shape[:-1], self._width])
        if x.numel():
            self._try((x,), (y,))
        return y

    def _call_layer(self, *checked: Tensor) -> tuple[Tensor, ...]:
        hidden, cos, sin, keys, values = checked
        rows, past = hidden.shape[1], keys.shape[2]
        a = attention_of(self.shape)
        if past == 0:  # runtimes refuse tensors without elements: one token that nobody sees
            keys = values = self._nobody
        new = (1, a.kv_heads, rows, a.head_dim)
        outputs = (torch.empty_like(hidden), _empty(new), _empty(new))
        if rows:
            mask = additive_mask(rows, past)
            self._try((hidden, cos, sin, mask, keys, values), outputs)
        return outputs

    def _try(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        try:
            self._execute(inputs, outputs)
        except EdgeError:
            raise
        except Exception as error:
            self._local.__dict__.clear()  # whatever state it left: bind anew
            raise BackendError(f"{self.backend} failed on {self.shape.key!r}: {error}") from error


# Whatever the process's default type and device are: a runtime writes float32 to the CPU's memory.
_empty = functools.partial(torch.empty, dtype=torch.float32, device=torch.device("cpu"))


def additive_mask(rows: int, past: int) -> Tensor:
    """What is added to attention scores [M, T]: 0 where a key is seen, minus infinity elsewhere.

    Args:
        rows: M, new tokens.
        past: P, tokens before them. T is P + M, with P = 0 counted as one token that nobody sees.

    Example:
        >>> additive_mask(2, 0)
        tensor([[-inf, 0., -inf],
                [-inf, 0., 0.]])
    """
    mask = _empty((rows, max(past, 1) + rows)).zero_()
    if past == 0:
        mask[:, 0] = _MASKED
    if rows > 1:
        mask += torch.full_like(mask, _MASKED).triu(diagonal=max(past, 1) + 1)
    return mask


def address(x: Tensor) -> int:
    """Where a tensor's first element lies.

    Raises:
        ShapeError: It has no memory: it stands for others (a fake, a batch of ``vmap``) or for
            zeros.
    """
    try:
        found = x.data_ptr()
    except RuntimeError as error:
        raise ShapeError(f"expected a tensor with memory of its own: {error}") from error
    if not found:
        raise ShapeError(f"expected a tensor with memory of its own, found a {type(x).__name__}")
    return found
