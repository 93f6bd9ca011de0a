"""ONNX models cut in two: each half a complete model for one sample."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from edgewise.errors import ModelError
from edgewise.frontends.onnx_file import OnnxSource, import_onnx
from edgewise.frontends.partition import PartitionedModel
from edgewise.frontends.places import check_ends, choose_places


class OnnxCutter:
    """Makes the pieces of one ONNX model."""

    def __init__(self, source: OnnxSource) -> None:
        self.source = source

    def segment(self, start: str, stop: str) -> bytes:
        """Content of an ONNX file that computes one tensor from another.

        Raises:
            ModelError: It cannot be written.
        """
        try:
            content: bytes = self.source.onnx_segment(start, stop).SerializeToString()
        except ValueError as error:
            raise ModelError(
                f"cannot write the piece of {self.source.name!r} from {start!r} to {stop!r}:"
                f" {error}"
            ) from error
        return content

    def constants(self, start: str, stop: str) -> Mapping[str, int]:
        """Parameters that the piece between two tensors reads, and their bytes."""
        onnx = import_onnx()
        graph = self.source.onnx_segment(start, stop).graph
        tensors = {t.name: t for t in graph.initializer}
        for node in graph.node:
            if node.op_type == "Constant" and node.attribute[0].HasField("t"):
                tensors[node.output[0]] = node.attribute[0].t
        return {name: onnx.numpy_helper.to_array(tensor).nbytes for name, tensor in tensors.items()}


def read(path: Path, *, places: int | Sequence[str] | None = None) -> PartitionedModel:
    """Read an ONNX file, as `edgewise.frontends.partition.read_partitioned`."""
    source = OnnxSource.read(path)
    initialisers = {t.name for t in source.proto.graph.initializer}
    check_ends(
        source.name,
        [v.name for v in source.proto.graph.input if v.name not in initialisers],
        [v.name for v in source.proto.graph.output],
    )
    cutter = OnnxCutter(source)
    return PartitionedModel(
        name=source.name,
        version=_version(path, source),
        format="onnx",
        places=choose_places(source.graph, places, constants=cutter.constants),
        cutter=cutter,
    )


def _version(path: Path, source: OnnxSource) -> str:
    """Of the file; of its operators and weights where those lie in other files."""
    onnx = import_onnx()
    outer = onnx.load(path, load_external_data=False).graph.initializer
    if any(onnx.external_data_helper.uses_external_data(t) for t in outer):
        return source.weights_digest()
    return hashlib.sha256(path.read_bytes()).hexdigest()
