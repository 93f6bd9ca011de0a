"""ONNX Runtime on the CPU: one session per operator for any number of rows, no spinning threads.

A session takes any number of rows, and a layer any number of past tokens, so prefill of every
length and decode share one packed copy of the matrices; the originals and vectors are shared.
Without packing (``session.disable_prepacking``) nothing would be copied, but most shapes were
measured 1.1 to 1.9 times slower.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from edgewise.backends.operators.base import OperatorProgram, Weights
from edgewise.backends.operators.boundary import KEPT, SharedMemoryProgram, address
from edgewise.backends.operators.graphs import OperatorGraph, operator_graph
from edgewise.backends.operators.weights import check_weights
from edgewise.backends.threads import onnxruntime_options
from edgewise.errors import BackendError
from edgewise.profiles.operators import OperatorShape

NAME = "onnxruntime:CPU"


def load(
    shape: OperatorShape, weights: Weights, device: str, *, threads: int = 1
) -> OperatorProgram:
    """Make a session.

    Raises:
        BackendUnavailable: onnx is not installed.
        OpUnsupported: A fixed operator, or an unknown function.
        ShapeError: Weights are missing, or have other sizes.
        BackendError: The runtime refuses the graph.
    """
    del device  # there is one
    graph = operator_graph(shape, check_weights(shape, weights), weights.eps, backend=NAME)
    return OnnxRuntimeOperator(shape, weights, graph, threads=threads)


class OnnxRuntimeOperator(SharedMemoryProgram):
    """A session and, per thread, calls that are bound to addresses."""

    def __init__(
        self, shape: OperatorShape, weights: Weights, graph: OperatorGraph, *, threads: int
    ) -> None:
        super().__init__(shape, weights, graph, backend=NAME, threads=threads)
        runtime: Any = importlib.import_module("onnxruntime")
        options = onnxruntime_options(threads)
        # There are hundreds of sessions with next to nothing to allocate: no arena for each, and no
        # plan kept for every number of rows and tokens ever seen.
        options.enable_cpu_mem_arena = False
        options.enable_mem_pattern = False
        self._shared = {
            role: runtime.OrtValue.ortvalue_from_numpy(tensor.numpy())
            for role, tensor in graph.weights.items()
        }
        if self._shared:
            options.add_external_initializers(list(self._shared), list(self._shared.values()))
        try:
            self._session = runtime.InferenceSession(
                graph.external(), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            raise BackendError(f"ONNX Runtime refuses {shape.key!r}: {error}") from error
        self._inputs, self._outputs = tuple(graph.inputs), tuple(graph.outputs)
        self._ranks = {n: len(size) for n, size in {**graph.inputs, **graph.outputs}.items()}

    def _execute(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        try:
            bound: dict[Any, Any] = self._local.bound
        except AttributeError:
            bound = self._local.bound = {}
        key = tuple([(address(x), x.shape) for x in (*inputs, *outputs)])
        binding = bound.get(key)
        if binding is None:
            binding = self._bind(inputs, outputs)
            if len(bound) >= KEPT:
                del bound[next(iter(bound))]
            bound[key] = binding
        self._session.run_with_iobinding(binding)

    def _bind(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Any:
        binding = self._session.io_binding()
        for name, x in zip(self._inputs, inputs, strict=True):
            size = self._size(name, x)
            binding.bind_input(name, "cpu", 0, np.float32, size, address(x))
        for name, y in zip(self._outputs, outputs, strict=True):
            size = self._size(name, y)
            binding.bind_output(name, "cpu", 0, np.float32, size, address(y))
        return binding

    def _size(self, name: str, x: Tensor) -> tuple[int, ...]:
        """Size of a tensor as the graph sees it."""
        rank = self._ranks[name]
        if rank == x.dim():
            return tuple(x.shape)
        return (x.numel(),) if rank == 1 else (x.numel() // x.shape[-1], x.shape[-1])
