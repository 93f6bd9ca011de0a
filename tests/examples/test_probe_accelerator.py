"""The probe of a simulated device finds the description that it was made from."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from edgewise.device.accelerator import load_accelerator

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
SCRIPT = Path(__file__).parents[2] / "examples/probe_accelerator.py"
DEVICE = """\
name = "small"
sram_bytes = 40_000
in_bytes_per_s = 10e6
out_bytes_per_s = 5e6
fixed_s = 1e-3
cache_policy = "lru"
"""


def write_net(path: Path, width: int) -> str:
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    weights = np.ones((50, width), dtype=np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        path.stem,
        [helper.make_tensor_value_info("x", kind, [1, 50])],
        [helper.make_tensor_value_info("y", kind, [1, width])],
        initializer=[onnx.numpy_helper.from_array(weights, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path.write_bytes(model.SerializeToString())
    return str(path)


def test_the_probe_finds_a_simulated_device_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("probe_accelerator", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    (tmp_path / "small.toml").write_text(DEVICE, encoding="utf-8")
    nets = [write_net(tmp_path / f"net{width}.onnx", width) for width in (60, 80, 100)]
    found = tmp_path / "found.toml"

    options = ["--simulated", "--device", str(tmp_path / "small.toml"), "--out", str(found)]
    assert script.main([*nets, *options]) == 0

    accelerator = load_accelerator(found)
    assert accelerator.cache_policy == "lru"
    assert accelerator.in_bytes_per_s == pytest.approx(10e6, rel=0.01)
    assert accelerator.out_bytes_per_s == pytest.approx(5e6, rel=0.01)
    assert accelerator.fixed_s == pytest.approx(1e-3, rel=0.01)
    assert accelerator.provenance == "simulated"
    assert "calls in" in capsys.readouterr().out
