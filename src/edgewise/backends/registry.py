"""Backends found by name; a new one is a new file here and a line in the table."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from edgewise.errors import BackendUnavailable, nearest_names

if TYPE_CHECKING:
    from edgewise.backends.base import Program, Segment
    from edgewise.model.staged import StagedModel

# Runtime → (module here, package that must be installed, default device), best first.
_RUNTIMES = {
    "onnxruntime": ("edgewise.backends.onnxruntime", "onnxruntime", "CPU"),
    "openvino": ("edgewise.backends.openvino", "openvino", "CPU"),
    "torch": ("edgewise.backends.torch", "torch", "cpu"),
    "numpy": ("edgewise.backends.numpy", "onnx", "CPU"),
    "null": ("edgewise.backends.null", "numpy", ""),
}


def backend_names() -> tuple[str, ...]:
    """Every backend Edgewise knows, installed or not, as ``runtime:device``."""
    return tuple(f"{r}:{d}" if d else r for r, (_, _, d) in _RUNTIMES.items())


def available_backends() -> tuple[str, ...]:
    """Backends that compute something and whose package is installed here, best first."""
    return tuple(
        f"{r}:{device}"
        for r, (_, package, device) in _RUNTIMES.items()
        if r != "null" and importlib.util.find_spec(package) is not None
    )


def full_name(backend: str) -> str:
    """Complete a backend's name: ``"openvino"`` becomes ``"openvino:CPU"``.

    Raises:
        BackendUnavailable: No such runtime is known; the nearest names are told.
    """
    runtime, _, device = backend.partition(":")
    if runtime not in _RUNTIMES:
        raise BackendUnavailable(
            f"unknown backend {backend!r}", help=nearest_names(backend, backend_names())
        )
    default = _RUNTIMES[runtime][2]
    if runtime != "openvino" and device and device != default:
        raise BackendUnavailable(
            f"backend {backend!r} is not supported: {runtime} runs on {default or 'nothing'} here",
            help=nearest_names(backend, backend_names()),
        )
    return f"{runtime}:{device or default}" if default else runtime


def load_program(
    model: StagedModel,
    backend: str = "onnxruntime:CPU",
    *,
    threads: int = 1,
    segments: Sequence[Segment] | None = None,
    check: bool = True,
    **options: Any,
) -> Program:
    """Load a staged model on a backend.

    Args:
        model: With a head at every exit.
        backend: ``runtime`` or ``runtime:device``.
        threads: Threads of each call.
        segments: Runs of stages to compile as one piece; ``buddy_segments`` by default.
        check: Compare every stage with the reference first.
        options: The backend's own arguments.

    Raises:
        BackendUnavailable: Unknown, not installed, or no such device.
        BackendError: The runtime refuses the model or computes something else.
    """
    runtime, _, device = full_name(backend).partition(":")
    if runtime == "openvino":
        options.setdefault("device", device)
    module = importlib.import_module(_RUNTIMES[runtime][0])
    program: Program = module.load(
        model, threads=threads, segments=segments, check=check, **options
    )
    return program
