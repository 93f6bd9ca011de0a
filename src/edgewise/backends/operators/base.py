"""What every backend promises for one operator: called with torch tensors, it answers with them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch

    from edgewise.profiles.operators import OperatorShape


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weights:
    """Parameters of one operator or segment.

    Attributes:
        tensors: By role, contiguous float32 on the CPU, never written to. ``linear`` has
            ``weight`` [N, K] and ``bias`` [N] where the shape says so; norms ``weight`` [N] (and
            ``bias``); ``norm_linear`` those of the linear and ``norm.weight``; ``mlp`` ``gate``
            [N, K], ``up`` [N, K], ``down`` [K, N], or ``gate_up`` [2 N, K] where packed;
            ``norm_mlp`` those and ``norm.weight``; ``layer`` ``q``, ``k``, ``v``, ``o`` (and
            ``q.bias``, ``k.bias``, ``v.bias``), ``q_norm``, ``k_norm`` where the shape has them,
            ``input_norm``, ``post_norm`` and those of ``mlp``; an activation has none.
        eps: Of the norms.
    """

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    eps: float = 1e-5


class OperatorProgram(ABC):
    """One operator or segment with its weights, loaded on one backend with one thread policy.

    Calling it is what the runtime does and what is measured. Threads may call one program at once.

    Attributes:
        shape: What it computes; ``m`` is what it was loaded for, see ``any_rows``.
        backend: Runtime on device, for example ``"onnxruntime:CPU"``.
        threads: How many threads one call uses.
        any_rows: Whether it takes inputs of any number of rows.
    """

    shape: OperatorShape
    backend: str
    threads: int
    any_rows: bool

    @abstractmethod
    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Compute, and return when the result is readable.

        Inputs are read where they are, without a copy, if they are contiguous; others, and
        tensors that need no gradient graph, are made so first. Leading dimensions of 1 are kept.
        No rows give no rows, without a call of the runtime.

        Args:
            inputs: ``x`` [..., M, K] float32, on the CPU; an activation takes any shape. A ``layer``
                takes ``hidden`` [1, M, K], ``cos`` and ``sin`` [1, M, head_dim], ``past_keys`` and
                ``past_values`` [1, kv_heads, P, head_dim] with P = 0 in prefill. ``attention``
                (torch only) takes q [1, M, heads * head_dim], k and v [1, M, kv_heads *
                head_dim], cos, sin, past_keys, past_values; ``rope`` and ``add``, ``multiply``
                (torch only) what they combine.

        Returns:
            A fresh tensor [..., M, N] that no later call writes to; of a ``layer`` (hidden [1, M,
            K], new keys and new values [1, kv_heads, M, head_dim], keys with RoPE applied).

        Raises:
            ShapeError: An input has another width, type or device.
            BackendError: The runtime failed; its own message is the cause.
        """

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """Memory that this backend keeps for its own copy of the weights; 0 where shared."""


def load_operator(
    shape: OperatorShape, weights: Weights, backend: str, *, threads: int = 1
) -> OperatorProgram:
    """Load an operator or segment on a backend.

    Args:
        shape: What to compute.
        weights: Its parameters; kept alive by the program.
        backend: ``runtime:device`` of :func:`operator_backends`.
        threads: Of each call.

    Raises:
        BackendUnavailable: Not installed, or no such device here.
        OpUnsupported: It cannot run this kind of operator.
        BackendError: The runtime refuses it.
    """
    raise NotImplementedError


def operator_backends() -> tuple[str, ...]:
    """Backends that can run operators here, ``"torch:cpu"`` first."""
    raise NotImplementedError


def random_weights(shape: OperatorShape, rng: np.random.Generator) -> Weights:
    """Weights as trained ones are distributed: none subnormal, activations keep their scale."""
    raise NotImplementedError


def random_inputs(shape: OperatorShape, rng: np.random.Generator) -> tuple[torch.Tensor, ...]:
    """Inputs of an operator as a normalised hidden state has them, RoPE angles as at position P."""
    raise NotImplementedError
