"""Pieces of a model with exits as ONNX files: stages in a row, and the last exit's head."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from edgewise.backends.onnx_pieces import head_proto
from edgewise.errors import ModelError

if TYPE_CHECKING:
    from edgewise.model.heads import ExitHead
    from edgewise.model.staged import StagedModel

_HEAD_OPSET = 18  # its ReduceMean takes axes as an input


def staged_segment(model: StagedModel, start: int, stop: int) -> bytes:
    """Write the stages between two places as one ONNX file.

    Args:
        model: Whose places are 0, before its first stage, to the number of its stages.
        start: First place.
        stop: Last place; at the model's end the last exit's head is in the file too.

    Raises:
        ModelError: The places are not in order.
    """
    last = len(model.stages)
    if not 0 <= start < stop <= last:
        raise ModelError(
            f"model {model.name!r} has the places 0 to {last}; found a piece from {start} to {stop}"
        )
    names = [model.input.name, *(s.stop.name for s in model.stages)]
    proto = model.source.onnx_segment(names[start], names[stop])
    head = model.exits[-1].head if stop == last else None
    if head is not None:
        proto = _with_head(proto, head)
    content: bytes = proto.SerializeToString()
    return content


def _with_head(proto: Any, head: ExitHead) -> Any:
    """Let a head follow the only output of a piece."""
    onnx = importlib.import_module("onnx")
    opset = next(o.version for o in proto.opset_import if o.domain in {"", "ai.onnx"})
    if opset < _HEAD_OPSET:
        proto = importlib.import_module("onnx.version_converter").convert_version(
            proto, _HEAD_OPSET
        )
    features = proto.graph.output[0].name
    follower = onnx.compose.add_prefix(head_proto(head), "exit.")
    for node in follower.graph.node:
        for k, name in enumerate(node.input):
            if name == "exit.features":
                node.input[k] = features
    whole = onnx.ModelProto()
    whole.CopyFrom(proto)
    whole.graph.node.extend(follower.graph.node)
    whole.graph.initializer.extend(follower.graph.initializer)
    del whole.graph.output[:]
    whole.graph.output.extend(follower.graph.output)
    return whole
