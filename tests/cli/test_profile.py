from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgewise
from edgewise.cli.main import main
from edgewise.cli.profile import load_programs, progress_text, summary
from edgewise.model.staged import StagedModel
from edgewise.profiles import ProfileStore, read_profile
from edgewise.profiling import THOROUGH, Progress, find_profile, measure

onnx: Any = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chain of four small convolutions with a classifier, as an ONNX file."""
    helper, float32 = onnx.helper, onnx.TensorProto.FLOAT
    rng = np.random.default_rng(0)
    nodes, weights, tensor, channels = [], [], "x", 3
    for k in range(4):
        kernel = rng.standard_normal((8, channels, 3, 3)).astype(np.float32) / 5
        weights.append(onnx.numpy_helper.from_array(kernel, f"w{k}"))
        nodes += [
            helper.make_node("Conv", [tensor, f"w{k}"], [f"c{k}"], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", [f"c{k}"], [f"r{k}"]),
        ]
        tensor, channels = f"r{k}", 8
    linear = rng.standard_normal((8, 5)).astype(np.float32)
    weights.append(onnx.numpy_helper.from_array(linear, "linear"))
    nodes += [
        helper.make_node("GlobalAveragePool", [tensor], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("MatMul", ["flat", "linear"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info("x", float32, ["batch", 3, 16, 16])],
        [helper.make_tensor_value_info("logits", float32, ["batch", 5])],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    file = tmp_path_factory.mktemp("models") / "tiny.onnx"
    onnx.save(model, file)
    return file


def test_json_is_one_object_with_every_unit(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, export = tmp_path / "p.sqlite3", tmp_path / "p.json"
    arguments = ["--rounds", "6", "--store", str(store), "--export", str(export), "--json"]

    assert main(["profile", str(path), "--backend", "onnxruntime", *arguments]) == 0

    said = capsys.readouterr()
    assert said.err == ""
    found = json.loads(said.out)
    assert found["provenance"] == "measured"
    assert found["rounds"] == 6
    (turn,) = found["backends"]
    assert turn["backend"] == "onnxruntime:CPU"
    names = [unit["unit"] for unit in turn["units"]]
    stages = sum(1 for name in names if name.startswith("head"))
    assert names[:stages] == [f"segment:{k}-{k + 1}" for k in range(stages)]
    assert names[-1] == "controller"
    for unit in turn["units"]:
        assert unit["samples"] == 6
        assert 0 < unit["median_s"] <= unit["p95_s"] <= unit["p99_s"] < 1
        assert unit["energy_j"] is None
        assert unit["energy_note"]
    assert turn["stages_s"] > 0
    assert turn["whole_s"] > 0
    assert any("untrained" in note for note in found["notes"])
    assert read_profile(export).model_version == found["model_version"]


def test_what_was_measured_is_what_a_session_finds(path: Path, tmp_path: Path) -> None:
    store = ProfileStore(tmp_path / "p.sqlite3")
    assert main(["profile", str(path), "--rounds", "2", "--json", "--store", str(store.path)]) == 0

    model = StagedModel.from_onnx(path).with_random_heads()
    profile = find_profile(model, "onnxruntime:CPU", store=store)

    assert profile.num_rounds == 2


def test_a_person_sees_a_table_for_each_backend_and_the_totals(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "p.sqlite3"
    arguments = ["--backend", "onnxruntime", "--backend", "numpy", "--batch", "2", "--rounds", "2"]

    assert main(["profile", str(path), *arguments, "--store", str(store)]) == 0

    said = capsys.readouterr()
    assert "onnxruntime:CPU, batch 2" in said.out
    assert "numpy:CPU, batch 2" in said.out
    assert "segment:0-1" in said.out
    assert "single stages" in said.out
    assert f"kept in {store}" in said.out
    assert "tiny on onnxruntime:CPU, numpy:CPU" in said.err


def test_all_leaves_out_what_cannot_run_the_model_and_says_so(path: Path) -> None:
    model = StagedModel.from_onnx(path).with_random_heads()

    programs, notes = load_programs(model, ["all"], threads=1)

    assert "onnxruntime:CPU" in programs
    assert not any(name.startswith("numpy") for name in programs)
    for name in {"torch:cpu"} - set(programs):
        assert all(note.startswith(f"{name} was left out: ") for note in notes)


def test_a_backend_is_loaded_once_however_often_it_is_named(path: Path) -> None:
    model = StagedModel.from_onnx(path).with_random_heads()

    programs, notes = load_programs(
        model, ["onnxruntime:CPU", "onnxruntime", "onnxruntime"], threads=1
    )

    assert list(programs) == ["onnxruntime:CPU"]
    assert notes == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--backend", "onnxrutime"], (4, "did you mean 'onnxruntime:CPU'")),
        (["--backend", "torch"], (4, "no torch form")),
        (["--rounds", "0"], (2, "at least one round")),
        (["--threads", "0"], (2, "at least one thread")),
        (["--batch", "0"], (2, "batch sizes of at least one")),
        (["--rounds", "many"], (2, "edgewise profile --help")),
    ],
    ids=["misspelt backend", "no torch form", "no rounds", "no threads", "no batch", "no number"],
)
def test_a_wrong_argument_is_a_clear_error(
    path: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    expected: tuple[int, str],
) -> None:
    code, said = expected
    if "torch" in arguments:
        pytest.importorskip("torch")
    found = main(["profile", str(path), "--store", str(tmp_path / "p.sqlite3"), *arguments])

    error = capsys.readouterr().err
    assert found == code
    assert said in error
    assert "Traceback" not in error


def test_a_damaged_store_is_refused_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "p.sqlite3"
    store.write_text("not a database, and long enough to have had a header" * 4)

    assert main(["profile", "no-such-model.onnx", "--store", str(store)]) == 3

    assert "is damaged" in capsys.readouterr().err
    assert store.read_text().startswith("not a database")


def test_ctrl_c_says_what_is_kept_and_a_rerun_goes_on(path: Path, tmp_path: Path) -> None:
    store = ProfileStore(tmp_path / "p.sqlite3")
    command = [
        sys.executable, "-m", "edgewise", "profile", str(path), "--rounds", "1000000",
        "--store", str(store.path),
    ]  # fmt: skip
    assert edgewise.__file__ is not None
    source = Path(edgewise.__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": str(source), "EDGEWISE_DEBUG": ""}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as process:
        until_s = time.monotonic() + 60
        while time.monotonic() < until_s and process.poll() is None:
            if any(each.num_samples > 50 for each in store.list()):
                break
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        error = process.stderr.read()

    assert process.returncode == 130
    assert "samples taken so far are kept, and the same command goes on from there" in error
    assert "Traceback" not in error
    assert store.list()[0].num_samples > 50


def test_a_summary_tells_where_a_unit_did_not_settle(path: Path, tmp_path: Path) -> None:
    model = StagedModel.from_onnx(path).with_random_heads()
    programs, _ = load_programs(model, ["onnxruntime"], threads=1)
    store = ProfileStore(tmp_path / "p.sqlite3")

    found = summary(measure(programs, store, rounds=3), model, effort=THOROUGH, store=store.path)

    assert {unit["steady_reason"] for unit in found["backends"][0]["units"]} == {
        "3 samples of at least 20"
    }
    assert any("did not settle" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("remaining_s", "unsteady", "resumed", "said"),
    [
        (None, None, 0, "warming up"),
        (12.3, None, 0, "round 40, at most 12 s left"),
        (1.0, 2, 0, "round 40, at most 1 s left, 22 of 24 steady"),
        (1.0, None, 7, "round 40, at most 1 s left, resumed at round 7"),
    ],
)
def test_progress_is_told_with_the_time_left(
    remaining_s: float | None, unsteady: int | None, resumed: int, said: str
) -> None:
    progress = Progress(
        rounds=40, max_rounds=60, resumed_rounds=resumed, units=24, unsteady=unsteady,
        elapsed_s=2.0, remaining_s=remaining_s,
    )  # fmt: skip

    assert progress_text(progress) == said
