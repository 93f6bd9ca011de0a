from __future__ import annotations

import dataclasses
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

from edgewise.cli.main import main
from edgewise.frontends.checkpoint import save_checkpoint
from edgewise.model import StagedModel
from edgewise.runtime import Session

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two exits, with a profile store and inputs beside it."""
    helper, rng = onnx.helper, np.random.default_rng(1)
    here = tmp_path_factory.mktemp("run")
    weights = {
        "w0": rng.normal(0, 0.3, (4, 3, 3, 3)).astype(np.float32),
        "w1": rng.normal(0, 0.3, (4, 4, 3, 3)).astype(np.float32),
        "linear": rng.normal(size=(4, 3)).astype(np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["c0"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c0"], ["r0"]),
        helper.make_node("Conv", ["r0", "w1"], ["c1"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c1"], ["r1"]),
        helper.make_node("GlobalAveragePool", ["r1"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("MatMul", ["flat", "linear"], ["logits"]),
    ]
    element = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info("x", element, ["N", 3, 8, 8])],
        [helper.make_tensor_value_info("logits", element, ["N", 3])],
        [onnx.numpy_helper.from_array(v, k) for k, v in weights.items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    proto.ir_version = 10
    onnx.save(proto, here / "tiny.onnx")
    model = StagedModel.from_onnx(here / "tiny.onnx", exits=2, name="tiny").with_random_heads()
    model = dataclasses.replace(model, class_names=("cat", "dog", "eel"))
    save_checkpoint(model, here / "tiny")
    np.savez(here / "two.npz", x=rng.normal(size=(2, 3, 8, 8)).astype(np.float32))
    np.save(here / "one.npy", np.zeros((1, 3, 8, 8), dtype=np.float32))
    np.save(here / "nan.npy", np.full((1, 3, 8, 8), np.nan, dtype=np.float32))
    (here / "broken.npz").write_bytes(b"PK")
    (here / "notes.txt").write_text("no input")
    return here


def arguments(folder: Path, *inputs: str, budget: str = "1 s", **options: str) -> list[str]:
    given = [str(folder / "tiny"), *(str(folder / name) for name in inputs), "--budget", budget]
    given += ["--store", str(folder / "profiles.sqlite3")]
    return ["run", *given, *(t for k, v in options.items() for t in (f"--{k}", v))]


def run_json(capsys: pytest.CaptureFixture[str], *given: str) -> dict[str, Any]:
    assert main([*given, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def error_of(capsys: pytest.CaptureFixture[str], code: int, given: list[str]) -> str:
    """What is said on standard error; nothing is said elsewhere, and never a traceback."""
    assert main(given) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert "Traceback" not in said.err
    return said.err


def test_json_holds_one_record_for_each_sample(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_json(capsys, *arguments(folder, "two.npz", "one.npy"))

    assert set(found) == {"model", "backend", "policy", "provenance", "threads", "answers"}
    assert (found["model"], found["policy"], found["provenance"]) == (
        "tiny",
        "edgewise",
        "measured",
    )
    assert [Path(a["input"]).name for a in found["answers"]] == [
        "two.npz[0]",
        "two.npz[1]",
        "one.npy[0]",
    ]
    for answer in found["answers"]:
        assert answer["outcome"] == "in_time"
        assert answer["class_name"] in {"cat", "dog", "eel"}
        assert answer["budget_s"] == 1.0
        assert answer["observed_s"] > 0
        assert answer["steps"]


def test_the_table_shows_each_answer_and_why(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(arguments(folder, "two.npz", policy="full_depth", budget="250 ms")) == 0

    shown = capsys.readouterr().out
    assert "full_depth on onnxruntime:CPU, budget 250 ms" in shown
    assert shown.count("full depth was asked for") == 2
    assert shown.count("in time") == 2
    for heading in ("input", "answer", "sure", "exit", "predicted", "observed", "outcome", "why"):
        assert heading in shown


def test_a_budget_that_nothing_meets_is_rejected_where_asked(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = arguments(folder, "one.npy", budget="1 ns", **{"on-infeasible": "reject"})
    (answer,) = run_json(capsys, *given)["answers"]
    assert (answer["outcome"], answer["label"], answer["steps"]) == ("rejected", None, [])

    monkeypatch.setenv("COLUMNS", "200")
    assert main(given) == 0
    assert "rejected" in capsys.readouterr().out


def test_a_budget_that_nothing_meets_is_run_anyway_by_default(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (answer,) = run_json(capsys, *arguments(folder, "one.npy", budget="1 ns"))["answers"]

    assert answer["outcome"] == "ran_anyway"
    assert answer["label"] is not None


@pytest.mark.parametrize(
    ("budget", "message", "help_text"),
    [
        ("15", "the duration '15' has no unit", "write '15 ms' or '15 s'"),
        ("0 ms", "above zero, found '0 ms'", "15 ms"),
        ("-1 ms", "above zero, found '-1 ms'", "15 ms"),
        ("nan", "such as '15 ms', found 'nan'", "a number and a unit"),
        ("1 fortnight", "unknown unit 'fortnight'", "use ns, us, ms, s or min"),
    ],
)
def test_a_budget_that_is_no_time_is_told(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    budget: str,
    message: str,
    help_text: str,
) -> None:
    said = error_of(capsys, 2, [*arguments(folder, "one.npy"), f"--budget={budget}"])

    assert message in said
    assert help_text in said.split("help: ")[1]


def test_without_a_budget_the_help_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = error_of(capsys, 2, ["run", str(folder / "tiny"), str(folder / "one.npy")])

    assert "--budget" in said
    assert "help: edgewise run --help" in said


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ({"policy": "brachynet"}, 2, "did you mean 'branchynet'"),
        ({"policy": "branchynet"}, 2, "edgewise prepare"),
        ({"backend": "onnxrutime"}, 4, "did you mean 'onnxruntime:CPU'"),
        ({"backend": "onnxruntime:GPU"}, 4, "'onnxruntime:CPU'"),
        ({"on-infeasible": "rejct"}, 2, "did you mean 'reject'"),
        ({"policy": "full_depth", "on-infeasible": "reject"}, 2, "does not take these options"),
        ({"threads": "0"}, 2, "at least one thread"),
        ({"profile": "nowhere.json"}, 3, "cannot read the profile nowhere.json"),
    ],
    ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_a_wrong_option_is_told_with_the_next_step(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    options: dict[str, str],
    code: int,
    message: str,
) -> None:
    said = error_of(capsys, code, arguments(folder, "one.npy", **options))

    assert message in said


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.png", "does not exist"),
        ("notes.txt", "not a kind of file"),
        ("broken.npz", "broken.npz"),
        ("nan.npy", "NaN"),
    ],
)
def test_an_unreadable_input_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    assert message in error_of(capsys, 2, arguments(folder, name))


def test_a_model_that_is_not_there_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["run", "no-such-model", str(folder / "one.npy"), "--budget", "15 ms"]

    assert "unknown model 'no-such-model'" in error_of(capsys, 2, given)


def test_a_truncated_checkpoint_is_told(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.json").write_text('{"format": "edgew')
    given = ["run", str(tmp_path), str(folder / "one.npy"), "--budget", "15 ms"]

    assert "truncated or damaged" in error_of(capsys, 3, given)


def test_an_interrupt_ends_with_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "run", interrupted)

    assert main(arguments(folder, "one.npy")) == 130
    assert capsys.readouterr().err.strip().startswith("interrupted: edgewise run ")


def test_a_real_interrupt_ends_the_process_without_a_traceback(
    folder: Path, tmp_path: Path
) -> None:
    np.save(tmp_path / "many.npy", np.zeros((5000, 3, 8, 8), dtype=np.float32))
    store = tmp_path / "profiles.sqlite3"
    inputs = [str(tmp_path / "many.npy")] * 50
    given = ["run", str(folder / "tiny"), *inputs, "--budget", "1 s", "--store", str(store)]
    process = subprocess.Popen(
        [sys.executable, "-m", "edgewise", *given],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    # It measures first, then answers for minutes; when the store is there, it is at work.
    while not store.exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)

    assert process.returncode == 130
    assert out == b""
    assert b"Traceback" not in err
    assert b"interrupted: edgewise run" in err
