"""What every backend promises for one operator: called with torch tensors, it answers with them."""

from __future__ import annotations

import importlib
import importlib.util
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, cast

from edgewise.backends.base import import_runtime
from edgewise.backends.operators.weights import Weights, random_inputs, random_weights
from edgewise.errors import BackendUnavailable, ConfigError, nearest_names

if TYPE_CHECKING:
    import torch

    from edgewise.profiles.operators import OperatorShape

__all__ = [
    "OperatorProgram",
    "Weights",
    "load_operator",
    "operator_backends",
    "random_inputs",
    "random_weights",
]

# Which extra of Edgewise brings what a runtime needs; each is one file of this folder.
_EXTRAS = {"torch": "torch", "onnxruntime": "onnx", "openvino": "openvino"}
_NAMES = ("torch:cpu", "torch:cuda", "onnxruntime:CPU", "openvino:CPU")


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

        Inputs are read where they are, without a copy, if they are contiguous; others are made so
        first. No gradient flows through. Leading dimensions are kept. No rows give no rows,
        without a call of the runtime.

        Args:
            inputs: ``x`` [..., M, K] float32, on the CPU; an activation takes any shape. A
                ``layer`` takes ``hidden`` [1, M, K], ``cos`` and ``sin`` [1, M, head_dim],
                ``past_keys`` and ``past_values`` [1, kv_heads, P, head_dim] with P = 0 in
                prefill. On torch only: ``rope`` takes x [1, M, heads * head_dim], cos, sin;
                ``attention`` takes q [1, heads, M, head_dim], k and v [1, kv_heads, M,
                head_dim], past_keys, past_values, and is causal; ``add`` and ``multiply`` take
                what they combine, ``embedding`` tokens [1, M] int64.

        Returns:
            A fresh tensor [..., M, N] that no later call writes to; of a ``layer`` (hidden [1, M,
            K], new keys and new values [1, kv_heads, M, head_dim], keys with RoPE applied); of
            ``rope`` [1, heads, M, head_dim]; of ``attention`` [1, M, heads * head_dim].

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
        threads: Of each call. For torch they are a setting of the process, which is left alone.

    Raises:
        BackendUnavailable: Not installed, or no such device here.
        OpUnsupported: It cannot run this kind of operator.
        ShapeError: Weights are missing, or have other sizes.
        BackendError: The runtime refuses it.
    """
    if threads < 1:
        raise ConfigError(f"expected at least one thread, found {threads}")
    if backend not in _NAMES:
        raise BackendUnavailable(
            f"no backend {backend!r} runs single operators; {nearest_names(backend, _NAMES)}",
            help=f"here are {', '.join(operator_backends()) or 'none'}",
        )
    runtime, _, device = backend.partition(":")
    import_runtime("torch", backend=backend, extra="torch")
    import_runtime(runtime, backend=backend, extra=_EXTRAS[runtime])
    file: Any = importlib.import_module(f"edgewise.backends.operators.{runtime}")
    return cast("OperatorProgram", file.load(shape, weights, device, threads=threads))


def operator_backends() -> tuple[str, ...]:
    """Backends that can run operators here, ``"torch:cpu"`` first; none without torch."""
    if not _installed("torch"):
        return ()
    import torch

    found = ["torch:cpu"]
    if torch.cuda.is_available():
        found.append("torch:cuda")
    graphs = [r for r in ("onnxruntime", "openvino") if _installed(r) and _installed("onnx")]
    return (*found, *(f"{runtime}:CPU" for runtime in graphs))


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
