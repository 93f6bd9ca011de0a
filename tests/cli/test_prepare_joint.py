from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgewise.cli.main import main
from edgewise.frontends.checkpoint import load_checkpoint
from edgewise.frontends.zoo import small_resnet

pytest.importorskip("transformers")
pytest.importorskip("onnxruntime")


@pytest.fixture(autouse=True)
def _three_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight blocks take long to export, and this is about the command."""
    monkeypatch.setattr(small_resnet, "_WIDTHS", (48,))
    monkeypatch.setattr(small_resnet, "_DEPTHS", (3,))


def _arguments(out: Path) -> list[str]:
    small = ["--limit", "120", "--epochs", "1", "--width", "8", "--exits", "3"]
    return ["prepare", "small_resnet", "--joint", "--data", "shapes", "--out", str(out), *small]


def test_joint_training_makes_a_checkpoint_and_notes_its_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main([*_arguments(tmp_path / "out"), "--learning-rate", "0.01", "--json"])
    printed = json.loads(capsys.readouterr().out)
    model = load_checkpoint(tmp_path / "out")

    assert code == 0
    assert len(printed["exits"]) == model.num_exits == 3
    assert "--joint --loss wel+mono --schedule milestones" in str(model.provenance["command"])
    assert len(model.provenance["training_curve"]["epochs"]) == 1


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--loss", "wel+momo"], "unknown part 'momo'"),
        (["--schedule", "cosin"], "did you mean 'cosine'"),
        (["--finish"], "no state of a training that could be finished"),
    ],
)
def test_a_wrong_option_is_named(
    more: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main([*_arguments(tmp_path / "out"), *more])

    assert code != 0
    assert said in capsys.readouterr().err


def test_only_backbones_by_name_are_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    code = main(["prepare", "net.onnx", "--joint", "--data", "shapes", "--out", out])

    assert code != 0
    assert "--joint trains a backbone by name" in capsys.readouterr().err
