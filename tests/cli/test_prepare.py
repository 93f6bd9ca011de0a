from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest

from edgewise.cli.main import main
from edgewise.frontends.checkpoint import load_checkpoint

pytest.importorskip("onnxruntime")
QUICK = ["--exits", "early,late", "--width", "8", "--epochs", "3", "--limit", "200"]


@pytest.fixture
def net(tmp_path: Path) -> Path:
    """Two convolutions and a classifier of three classes, in an ONNX file."""
    rng = np.random.default_rng(0)
    helper, to_tensor = onnx.helper, onnx.numpy_helper.from_array
    shapes = {"a.w": (8, 1, 3, 3), "b.w": (16, 8, 3, 3), "c.w": (3, 16)}
    weights = [
        to_tensor(rng.standard_normal(s).astype(np.float32) / 3, n) for n, s in shapes.items()
    ]
    nodes = [
        helper.make_node("Conv", ["image", "a.w"], ["a"], strides=[2, 2], name="first"),
        helper.make_node("Relu", ["a"], ["early"], name="early_act"),
        helper.make_node("Conv", ["early", "b.w"], ["b"], strides=[2, 2], name="second"),
        helper.make_node("Relu", ["b"], ["late"], name="late_act"),
        helper.make_node("GlobalAveragePool", ["late"], ["pooled"], name="pool"),
        helper.make_node("Flatten", ["pooled"], ["flat"], name="flat"),
        helper.make_node("Gemm", ["flat", "c.w"], ["logits"], transB=1, name="classify"),
    ]
    real = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("image", real, ["batch", 1, 20, 20])],
        [helper.make_tensor_value_info("logits", real, ["batch", 3])],
        weights,
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    proto.ir_version = 10
    onnx.save(proto, tmp_path / "net.onnx")
    return tmp_path / "net.onnx"


def test_a_backbone_gets_heads_and_a_second_run_finds_its_work(
    net: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["prepare", str(net), "--data", "shapes", "--out", str(out), *QUICK]
    code = main([*arguments, "--test", "50", "--json"])
    printed = json.loads(capsys.readouterr().out)
    model = load_checkpoint(out)

    assert code == 0
    assert printed["version"] == model.version()
    assert [e["head"] for e in printed["exits"]] == ["pool", "pool"]
    assert model.provenance["test_images"] == 50
    assert model.provenance["test_accuracy"] == printed["test_accuracy"]
    assert str(model.provenance["command"]).startswith(f"edgewise prepare {net} --data shapes")
    assert main(arguments) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "temperature" in shown
    assert "saved" in shown
    assert load_checkpoint(out).version() == model.version()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(["resnet5", "--data", "shapes"], "unknown backbone", id="backbone"),
        pytest.param(["{net}", "--data", "shape"], "did you mean 'shapes'", id="data set"),
        pytest.param(["{net}", "--data", "shapes", "--head", "cnv"], "'conv'", id="head"),
        pytest.param(["{net}", "--data", "shapes", "--limit", "1"], "found 1", id="one image"),
        pytest.param(["{net}", "--data", "shapes", "--until", "lat"], "'late'", id="until"),
        pytest.param(
            ["{net}", "--data", "shapes", "--learning-rate", "nan"], "above zero", id="nan"
        ),
        pytest.param(["{net}"], "--data", id="no data"),
    ],
)
def test_mistakes_are_told_without_a_traceback(
    net: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    code = main(["prepare", *(a.format(net=net) for a in arguments), "--out", str(tmp_path / "o")])
    err = " ".join(capsys.readouterr().err.split())

    assert code == 2
    assert said in err
    assert "Traceback" not in err
    assert not (tmp_path / "o").exists()


def test_a_directory_with_something_else_is_refused_before_any_work(
    net: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/cat.jpg").write_bytes(b"meow")
    code = main(["prepare", str(net), "--data", "shapes", "--out", str(tmp_path / "photos")])

    assert code == 2
    assert "holds something that is not a checkpoint" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "photos.work").exists()


# A shell's background jobs ignore the signal, and so would a test that is run in one.
INTERRUPTIBLE = """
import signal, sys
from edgewise.cli.main import main
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main(sys.argv[1:]))
"""


def test_ctrl_c_says_where_finished_work_is_kept(net: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["prepare", str(net), "--data", "shapes", "--out", str(out), "--exits", "2"]
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, *arguments], stderr=subprocess.PIPE, text=True
    ) as process:
        while not (tmp_path / "out.work/job.json").exists() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        said = " ".join(process.communicate()[1].split())

    assert process.returncode == 130
    assert f"finished work is kept in {tmp_path / 'out.work'}" in said
    assert "Traceback" not in said
    assert not out.exists()
