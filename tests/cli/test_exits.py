"""A model with exits as a tenant: profiled, planned for and played."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgewise.cli.main import main
from edgewise.placement.workload import load_workload

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

WORKLOAD = """\
[device]
accelerator = "none"
cores = 2
horizon_s = 1.5

[[tenant]]
name = "early"
model = "CHECKPOINT"
profile = "tiny.partition.json"
rate = 30
budget = "2 s"
exits = true

[[tenant]]
name = "whole"
model = "CHECKPOINT"
profile = "tiny.partition.json"
rate = 10
"""


@pytest.fixture(name="folder", scope="module")
def _folder(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workload, the profile beside it, and a store with costs of stages and heads."""
    folder = tmp_path_factory.mktemp("exits")
    profile = folder / "tiny.partition.json"
    command = ["profile", str(checkpoint), "--segments", "--rounds", "3", "--threads-up-to", "1"]
    assert main([*command, "--export", str(profile)]) == 0
    store = folder / "home" / "profiles.sqlite3"
    store.parent.mkdir()
    assert main(["profile", str(checkpoint), "--rounds", "8", "--store", str(store)]) == 0
    text = WORKLOAD.replace("CHECKPOINT", str(checkpoint))
    (folder / "ample.toml").write_text(text, encoding="utf-8")
    return folder


def test_a_plan_counts_the_work_that_exits_leave(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EDGEWISE_HOME", str(folder / "home"))
    assert load_workload(folder / "ample.toml").tenants[0].model is not None
    assert main(["place", str(folder / "ample.toml"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    ratio = found["work_left_ratio"]["early"]
    assert ratio > 0
    alone_s = [t["cpu_s"] for t in found["placement"]["predicted"]]
    assert alone_s[0] == pytest.approx(ratio * alone_s[1])  # the same model, in its one piece

    assert main(["place", str(folder / "ample.toml")]) == 0
    assert "early leaves early:" in capsys.readouterr().out


def test_a_play_shows_where_answers_came_from(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("jinja2", reason="jinja2 is not installed")
    monkeypatch.setenv("EDGEWISE_HOME", str(folder / "home"))
    page = tmp_path / "page.html"
    command = [
        "run-workload",
        str(folder / "ample.toml"),
        "--no-replan",
        "--json",
        "--html",
        str(page),
    ]
    assert main(command) == 0
    early, whole = json.loads(capsys.readouterr().out)["tenants"]

    assert early["exits"] == [0, 0, early["outcomes"]["answered"]]  # there is time for all
    assert early["accuracy_ratio"] > 0.5
    assert (whole["exits"], whole["accuracy_ratio"]) == ([], None)
    assert "exit 2: 100 %" in page.read_text(encoding="utf-8")

    assert main(["run-workload", str(folder / "ample.toml"), "--duration", "300 ms"]) == 0
    out = capsys.readouterr().out
    assert "where answers came from" in out
    assert "exit 2" in out


def test_exits_of_a_file_and_of_a_real_device_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EDGEWISE_HOME", str(folder / "home"))
    (folder / "net.onnx").touch()
    text = (folder / "ample.toml").read_text(encoding="utf-8")
    lines = ['model = "net.onnx"' if x.startswith("model") else x for x in text.splitlines()]
    (folder / "file.toml").write_text("\n".join(lines), encoding="utf-8")
    assert main(["place", str(folder / "file.toml")]) == 2
    assert "line 12: net.onnx has no exits" in capsys.readouterr().err

    assert main(["run-workload", str(folder / "ample.toml"), "--device", "edgetpu"]) == 2
    assert "floating point" in " ".join(capsys.readouterr().err.split())
