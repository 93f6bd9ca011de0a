from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from edgewise.cli.main import main
from edgewise.frontends.checkpoint import save_checkpoint
from edgewise.model.staged import StagedModel


@pytest.fixture
def net(tmp_path: Path) -> Path:
    """Two convolutions and a classifier of three classes, in an ONNX file."""
    rng = np.random.default_rng(0)
    helper, to_tensor = onnx.helper, onnx.numpy_helper.from_array
    shapes = {"a.w": (8, 1, 3, 3), "b.w": (8, 8, 3, 3), "c.w": (3, 8)}
    weights = [
        to_tensor(rng.standard_normal(s).astype(np.float32) / 3, n) for n, s in shapes.items()
    ]
    nodes = [
        helper.make_node("Conv", ["image", "a.w"], ["a"], name="first"),
        helper.make_node("Relu", ["a"], ["early"], name="early_act"),
        helper.make_node("Conv", ["early", "b.w"], ["b"], name="second"),
        helper.make_node("Relu", ["b"], ["late"], name="late_act"),
        helper.make_node("GlobalAveragePool", ["late"], ["pooled"], name="pool"),
        helper.make_node("Flatten", ["pooled"], ["flat"], name="flat"),
        helper.make_node("Gemm", ["flat", "c.w"], ["logits"], transB=1, name="classify"),
    ]
    real = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("image", real, ["batch", 1, 12, 12])],
        [helper.make_tensor_value_info("logits", real, ["batch", 3])],
        weights,
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    proto.ir_version = 10
    onnx.save(proto, tmp_path / "net.onnx")
    return tmp_path / "net.onnx"


def test_stages_of_an_onnx_file_add_up(net: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["stage", str(net), "--exits", "0.2,1.0", "--json"])
    printed = json.loads(capsys.readouterr().out)

    assert code == 0
    assert [s["boundary"] for s in printed["stages"]] == ["early", "logits"]
    assert sum(s["flops"] for s in printed["stages"]) == printed["flops"]
    assert printed["stages"][0]["boundary_bytes"] == 8 * 10 * 10 * 4
    assert printed["stages"][-1]["depth_ratio"] == 1.0
    # Two per multiply-add: 8 filters of 9 on 10 x 10; the ReLU is one each.
    assert printed["stages"][0]["flops"] == 2 * 800 * 9 + 800


def test_cuts_are_listed(net: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["stage", str(net), "--cuts", "--json"])
    cuts = json.loads(capsys.readouterr().out)["cuts"]

    assert code == 0
    assert [c["tensor"] for c in cuts] == ["a", "early", "b", "late", "pooled", "flat"]
    assert main(["stage", str(net), "--cuts"]) == 0
    assert "8x10x10" in capsys.readouterr().out


def test_a_checkpoint_is_shown_with_its_heads_and_keeps_its_exits(
    net: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = StagedModel.from_onnx(net, exits=["early", "late"]).with_random_heads()
    save_checkpoint(model, tmp_path / "saved")

    assert main(["stage", str(tmp_path / "saved")]) == 0
    assert "pool head" in capsys.readouterr().out
    assert main(["stage", str(tmp_path / "saved"), "--exits", "2"]) == 2
    assert "its exits are where its heads were fitted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(["resnet5"], "did you mean 'resnet50'", id="unknown name"),
        pytest.param(["gone.onnx"], "found nothing", id="no such file"),
        pytest.param(["{net}", "--exits", "0"], "at least one exit", id="no exit"),
        pytest.param(["{net}", "--exits", "1,,2"], "fractions or names", id="nothing between"),
        pytest.param(["{net}", "--exits", "0.5,1.5"], r"fractions in (0, 1]", id="too deep"),
        pytest.param(["{net}", "--exits", "erly,late"], "did you mean 'early'", id="mistyped"),
    ],
)
def test_mistakes_are_told_without_a_traceback(
    net: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    code = main(["stage", *(a.format(net=net) for a in arguments)])
    err = " ".join(capsys.readouterr().err.split())

    assert code in (2, 4)
    assert said in err
    assert "Traceback" not in err
