"""Networks of the zoo as eight-bit ONNX files: what an accelerator's partition starts from.

Weights are random: times are real, answers are not.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from edgewise.device.user_cache import user_cache
from edgewise.errors import ModelError
from edgewise.frontends.onnx_file import import_onnx
from edgewise.frontends.quantise import quantise_onnx
from edgewise.frontends.zoo import Backbone, build_backbone

CALIBRATION_IMAGES = 4
VERSION = 1  # of the way these files are made; raise it when that changes


def int8_file(
    name: str, folder: Path, *, say: Callable[[str], None] = lambda _: None
) -> tuple[Path, str]:
    """Build, export and quantise a network, unless its file is there already.

    Args:
        name: Of the zoo.
        folder: Where files are kept.
        say: Told what takes so long.

    Returns:
        The file, with eight-bit input and answer, and how it was made, for people.

    Raises:
        ConfigError: No such network.
        BackendUnavailable: torch, transformers, onnx or onnxruntime is not installed.
        ModelError: It cannot be quantised.
    """
    path = folder / f"{name.replace('-', '_')}-int8-v{VERSION}.onnx"
    made = (
        f"{name} of Edgewise's zoo, random weights (times are real, answers are not); int8 by ONNX"
        f" Runtime's static quantiser (QDQ, per channel, {CALIBRATION_IMAGES} random images),"
        " eight-bit input and answer"
    )
    if not path.is_file():
        say(f"{name}: building, exporting and quantising, once")
        backbone = build_backbone(name)
        content = with_eight_bit_ends(_quantised(backbone))
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        part.write_bytes(content)
        part.replace(path)
    return path, made


def models_folder() -> Path:
    """Where such files are kept unless told otherwise: in the user's cache."""
    return user_cache() / "models"


def with_eight_bit_ends(model: bytes) -> bytes:
    """Let a quantised model take and give eight-bit numbers, as accelerators do.

    The quantiser at the input and the dequantiser at the answer are left to the host.

    Args:
        model: ONNX file in which the input is only quantised, and the answer comes from a
            dequantiser.

    Raises:
        ModelError: Its ends are not of that form.
    """
    onnx = import_onnx()
    proto = onnx.load_from_string(model)
    graph = proto.graph
    (given,), (answer,) = graph.input, graph.output
    readers = [n for n in graph.node if given.name in n.input]
    writers = [n for n in graph.node if answer.name in n.output]
    if [n.op_type for n in readers] != ["QuantizeLinear"] or [n.op_type for n in writers] != [
        "DequantizeLinear"
    ]:
        raise ModelError(
            "expected a model whose input goes to one QuantizeLinear and whose answer comes from a"
            f" DequantizeLinear, found {[n.op_type for n in (*readers, *writers)]}"
        )
    zero_points = {t.name: t.data_type for t in graph.initializer}
    for value, node, tensor in (
        (given, readers[0], readers[0].output[0]),
        (answer, writers[0], writers[0].input[0]),
    ):
        value.name = tensor
        value.type.tensor_type.elem_type = zero_points[node.input[2]]
        graph.node.remove(node)
    known = {given.name, answer.name}
    for info in [v for v in graph.value_info if v.name in known]:
        graph.value_info.remove(info)
    onnx.checker.check_model(proto)
    content: bytes = proto.SerializeToString()
    return content


def _quantised(backbone: Backbone) -> bytes:
    import torch

    exported: Any = io.BytesIO()  # typed for paths only
    example = backbone.example()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            _answering(backbone.module),
            (example,),
            exported,
            dynamo=False,  # a tenth of the other exporter's time, and the same graph
            opset_version=17,
            input_names=["image"],
            output_names=["logits"],
        )
    rng = np.random.default_rng(0)
    shape = (CALIBRATION_IMAGES, *example.shape[1:])
    return quantise_onnx(exported.getvalue(), rng.standard_normal(shape).astype(np.float32))


def _answering(module: Any) -> Any:
    """A module that answers with the logits alone: transformers' answer with a record."""
    import torch

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, image: torch.Tensor) -> Any:
            found = self.module(image)
            return found if isinstance(found, torch.Tensor) else found.logits

    return Logits().eval()
