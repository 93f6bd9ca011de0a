"""Eight-bit ONNX models, by ONNX Runtime's own static quantiser."""

from __future__ import annotations

import importlib
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgewise.errors import BackendUnavailable, DataError, ModelError
from edgewise.frontends.onnx_file import import_onnx


def quantise_onnx(
    model: str | Path | bytes, images: npt.ArrayLike, *, per_channel: bool = True
) -> bytes:
    """Quantise weights to int8 and activations to uint8, as pairs of operators say (QDQ).

    The range of each activation is the smallest and largest value that the images give. Weights
    take 8 bits; where two operators share some they take 7, since on x86 without VNNI ONNX Runtime
    1.32 cannot load shared ones of 8 bits unless it lets their products saturate.

    Args:
        model: An ONNX file or its content, in floating point, with one input.
        images: Typical inputs, [N, ...], as the model takes them; some 32 are enough.
        per_channel: One scale for each output channel of a weight rather than for all.

    Returns:
        Content of an ONNX file with floating-point input and output.

    Raises:
        BackendUnavailable: onnx or onnxruntime is not installed.
        DataError: There are no images, or not of the model's input shape.
        ModelError: The model cannot be read or quantised.
    """
    onnx = import_onnx()
    try:
        quantization = importlib.import_module("onnxruntime.quantization")
        shape_inference = importlib.import_module("onnxruntime.quantization.shape_inference")
    except ImportError as error:
        raise BackendUnavailable(
            f"the quantiser of onnxruntime needs a package that is missing ({error})",
            help="pip install 'edgewise[onnx]'",
        ) from error
    try:
        proto = onnx.load_from_string(model) if isinstance(model, bytes) else onnx.load(model)
        onnx.checker.check_model(proto)
    except Exception as error:
        raise ModelError(f"the model to quantise is not a usable ONNX file: {error}") from error
    samples = np.asarray(images, dtype=np.float32)
    name = _check_images(proto, samples)

    # Given files, because the quantiser's forms for models in memory differ between its releases.
    with tempfile.TemporaryDirectory(prefix="edgewise-") as folder:
        before, ready, after = (Path(folder) / f"{k}.onnx" for k in ("float", "ready", "int8"))
        onnx.save(proto, before)
        try:
            # ONNX's own shape inference is enough for convolutional nets and needs no sympy.
            shape_inference.quant_pre_process(before, ready, skip_symbolic_shape=True)
            quantization.quantize_static(
                ready,
                after,
                _Reader(name, samples),
                quant_format=quantization.QuantFormat.QDQ,
                per_channel=per_channel,
                reduce_range=_shares_weights(onnx.load(ready).graph),
                activation_type=quantization.QuantType.QUInt8,
                weight_type=quantization.QuantType.QInt8,
            )
        except Exception as error:
            raise ModelError(f"ONNX Runtime cannot quantise this model: {error}") from error
        return after.read_bytes()


class _Reader:
    """Hands the images to the quantiser one by one, as its ``CalibrationDataReader``."""

    def __init__(self, name: str, samples: npt.NDArray[np.float32]) -> None:
        self._name, self._samples = name, samples
        self.rewind()

    def rewind(self) -> None:
        self._left: Iterator[Any] = iter(self._samples)

    def get_next(self) -> dict[str, npt.NDArray[np.float32]] | None:
        sample = next(self._left, None)
        return None if sample is None else {self._name: sample[np.newaxis]}


def _shares_weights(graph: Any) -> bool:
    """Whether two operators read the same matrix or kernel."""
    readers = Counter(name for node in graph.node for name in set(node.input))
    return any(readers[t.name] > 1 and len(t.dims) > 1 for t in graph.initializer)


def _check_images(proto: Any, samples: npt.NDArray[np.float32]) -> str:
    """Name of the model's input, which the images must fit."""
    initialisers = {t.name for t in proto.graph.initializer}
    inputs = [v for v in proto.graph.input if v.name not in initialisers]
    if len(inputs) != 1:
        raise ModelError(f"expected one input of the model to quantise, found {len(inputs)}")
    wanted = [d.dim_value for d in inputs[0].type.tensor_type.shape.dim][1:]
    if samples.ndim < 1 or not len(samples) or list(samples.shape[1:]) != wanted:
        raise DataError(
            f"expected images of the shape {['N', *wanted]}, found {list(samples.shape)}",
            help="pass a few dozen inputs, prepared as the model takes them",
        )
    return str(inputs[0].name)
