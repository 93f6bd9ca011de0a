"""OpenVINO: one compiled model per operator for any number of rows, tensors shared by address.

Rows are a dynamic axis. A model compiled for one number of rows answers 4 to 14 us earlier, and
needs a packed copy of the weights for every number: too dear for what it gives. Each model keeps
one packed copy of its matrices; the originals and vectors are shared.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from edgewise.backends.operators.base import OperatorProgram, Weights
from edgewise.backends.operators.boundary import KEPT, SharedMemoryProgram, address
from edgewise.backends.operators.graphs import OperatorGraph, operator_graph
from edgewise.backends.operators.weights import check_weights
from edgewise.backends.threads import openvino_settings
from edgewise.errors import BackendError, BackendUnavailable
from edgewise.profiles.operators import OperatorShape


def load(
    shape: OperatorShape, weights: Weights, device: str, *, threads: int = 1
) -> OperatorProgram:
    """Compile a model.

    Raises:
        BackendUnavailable: onnx is not installed, or OpenVINO has no such device here.
        OpUnsupported: A fixed operator, or an unknown function.
        ShapeError: Weights are missing, or have other sizes.
        BackendError: The runtime refuses the graph.
    """
    backend = f"openvino:{device}"
    graph = operator_graph(shape, check_weights(shape, weights), weights.eps, backend=backend)
    devices = _core().available_devices
    if device not in devices:
        raise BackendUnavailable(
            f"backend {backend!r} is not available: OpenVINO lists"
            f" {', '.join(devices) or 'no device'}",
            help="edgewise doctor --backends",
        )
    return OpenVinoOperator(shape, weights, graph, device=device, threads=threads)


@functools.cache
def _core() -> Any:
    return importlib.import_module("openvino").Core()


class OpenVinoOperator(SharedMemoryProgram):
    """A compiled model and, per thread, one infer request with the tensors it saw last."""

    def __init__(
        self,
        shape: OperatorShape,
        weights: Weights,
        graph: OperatorGraph,
        *,
        device: str,
        threads: int,
    ) -> None:
        super().__init__(shape, weights, graph, backend=f"openvino:{device}", threads=threads)
        self._openvino: Any = importlib.import_module("openvino")
        settings = openvino_settings(threads, device)
        try:
            self._model = _core().compile_model(self._network(graph), device, settings)
        except Exception as error:
            raise BackendError(f"OpenVINO refuses {shape.key!r}: {error}") from error
        sizes = (*graph.inputs.values(), *graph.outputs.values())
        self._ranks = [len(size) for size in sizes]

    def _network(self, graph: OperatorGraph) -> Any:
        """Read a graph and put constants that share our memory in the weights' place."""
        network = _core().read_model(graph.parametric())
        constant = self._openvino.op.Constant
        for parameter in network.get_parameters():
            tensor = graph.weights.get(parameter.friendly_name)
            if tensor is None:
                continue
            output = constant(tensor.numpy(), shared_memory=True).output(0)
            for reader in parameter.output(0).get_target_inputs():
                reader.replace_source_output(output)
            network.remove_parameter(parameter)
        network.validate_nodes_and_infer_types()
        return network

    def _execute(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        try:
            call: _Call = self._local.call
        except AttributeError:
            request = self._model.create_infer_request()
            call = self._local.call = _Call(
                self._openvino, request, num_inputs=len(inputs), ranks=self._ranks
            )
        call(inputs, outputs)


class _Call:
    """One thread's infer request, and its names for memory by address.

    Names do not own the memory: it would never be handed out again at that address. One is looked
    at only while a tensor lies there.
    """

    def __init__(
        self, openvino: Any, request: Any, *, num_inputs: int, ranks: Sequence[int]
    ) -> None:
        self._openvino, self._ranks = openvino, ranks
        num_outputs = len(ranks) - num_inputs
        self._setters = (
            *(functools.partial(request.set_input_tensor, i) for i in range(num_inputs)),
            *(functools.partial(request.set_output_tensor, i) for i in range(num_outputs)),
        )
        # In the calling thread: a hand-over to one of OpenVINO's costs more than a small operator.
        self._infer = functools.partial(request.infer, share_inputs=True, share_outputs=True)
        self._bound: list[Any] = [None] * len(ranks)
        # The request does not keep what it was given alive.
        self._held: list[Any] = [None] * len(ranks)
        self._names: dict[Any, Any] = {}

    def __call__(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        for i, x in enumerate((*inputs, *outputs)):
            key = i, address(x), x.shape
            if self._bound[i] != key:
                self._bound[i] = None  # unknown, should this fail
                self._held[i] = name = self._name(key, x)
                self._setters[i](name)
                self._bound[i] = key
        self._infer()

    def _name(self, key: tuple[int, int, Any], x: Tensor) -> Any:
        """Make an OpenVINO tensor of the memory under a tensor, or take the one made before."""
        found = self._names.get(key)
        if found is None:
            place, start, size = key
            raw: Any = (ctypes.c_float * x.numel()).from_address(start)
            rank = self._ranks[place]
            if rank != len(size):
                size = (-1,) if rank == 1 else (-1, size[-1])
            array = np.frombuffer(raw, np.float32).reshape(size)
            found = self._openvino.Tensor(array, shared_memory=True)
            if len(self._names) >= KEPT * len(self._ranks):
                del self._names[next(iter(self._names))]
            self._names[key] = found
        return found
