"""A tiny net whose claims can be run in a moment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgewise.model import StagedModel, Validation

CLASSES = 4


def _graph_model(path: Path) -> StagedModel:
    """Six convolutions and a classifier of four classes on 1 x 16 x 16, as ONNX."""
    onnx = pytest.importorskip("onnx")
    rng = np.random.default_rng(0)
    helper, to_array = onnx.helper, onnx.numpy_helper.from_array
    nodes, weights, name, before = [], [], "image", 1
    for k, after in enumerate((4, 8, 8, 8, 8, 8)):
        kernel = rng.standard_normal((after, before, 3, 3)) * np.sqrt(2 / (9 * before))
        weights.append(to_array(kernel.astype(np.float32), f"w{k}"))
        nodes.append(helper.make_node("Conv", [name, f"w{k}"], [f"c{k}"], pads=[1, 1, 1, 1]))
        nodes.append(helper.make_node("Relu", [f"c{k}"], [f"r{k}"]))
        name, before = f"r{k}", after
    nodes.append(helper.make_node("GlobalAveragePool", [name], ["pooled"]))
    nodes.append(helper.make_node("Flatten", ["pooled"], ["flat"]))
    weights.append(to_array(rng.standard_normal((before, CLASSES)).astype(np.float32), "linear"))
    nodes.append(helper.make_node("MatMul", ["flat", "linear"], ["logits"]))
    real = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info("image", real, ["batch", 1, 16, 16])],
        [helper.make_tensor_value_info("logits", real, ["batch", CLASSES])],
        weights,
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    proto.ir_version = 10
    onnx.save(proto, path)
    return StagedModel.from_onnx(path, exits=3, name="tiny").with_random_heads(width=8)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> StagedModel:
    """The net with made-up validation logits: three exits, each better than the one before."""
    pytest.importorskip("onnxruntime")
    model = _graph_model(tmp_path_factory.mktemp("net") / "tiny.onnx")
    rng = np.random.default_rng(1)
    labels = rng.integers(0, CLASSES, 80)
    logits = rng.normal(size=(3, 80, CLASSES))
    for k in range(3):
        logits[k, np.arange(80), labels] += k + 1.0
    validation = Validation(logits=logits.astype(np.float32), labels=labels, source="made up")
    return replace(
        model.with_heads({}, accuracy=dict(enumerate(validation.accuracy().tolist()))),
        validation=validation,
        preprocess={
            "size": [16, 16],
            "mean": [127.5],
            "std": [127.5],
            "channels": 1,
            "resample": "bilinear",
            "layout": "NCHW",
        },
    )


@pytest.fixture(scope="session")
def checkpoint(tiny: StagedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The net, saved."""
    pytest.importorskip("safetensors")
    from edgewise.frontends.checkpoint import save_checkpoint

    return save_checkpoint(tiny, tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty labelled images of four classes."""
    rng = np.random.default_rng(2)
    path = tmp_path_factory.mktemp("data") / "images.npz"
    np.savez(
        path,
        images=rng.integers(0, 256, (40, 16, 16), dtype=np.uint8),
        labels=np.arange(40) % CLASSES,
    )
    return path


_ZOO = ("mobilenet_v2", "squeezenet", "mnasnet", "efficientnet_b0", "resnet18")


@pytest.fixture(scope="module")
def small_zoo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A user's cache in which networks of the zoo are five small layers in a row."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    rng = np.random.default_rng(0)
    helper, real = onnx.helper, onnx.TensorProto.FLOAT
    nodes, weights, before = [], [], "x"
    for k in range(5):
        values = rng.standard_normal((64, 64)).astype(np.float32) / 8
        weights.append(onnx.numpy_helper.from_array(values, f"w{k}"))
        nodes.append(helper.make_node("MatMul", [before, f"w{k}"], [f"m{k}"]))
        before = "y" if k == 4 else f"r{k}"
        nodes.append(helper.make_node("Relu", [f"m{k}"], [before]))
    ends = [helper.make_tensor_value_info(name, real, [1, 64]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], initializer=weights)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    home = tmp_path_factory.mktemp("cache")
    folder = home / "edgewise" / "models"
    folder.mkdir(parents=True)
    for name in _ZOO:
        (folder / f"{name}-int8-v1.onnx").write_bytes(proto.SerializeToString())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(home))
        yield folder
