from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgewise.cli.main import main
from edgewise.device import usable_cores
from edgewise.profiles.partition import read_partition_profile

onnx: Any = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


def _write_chain(path: Path, *, bridge: bool = False) -> Path:
    """Three convolutions and a classifier; with a bridge, no single tensor separates it."""
    helper, float32 = onnx.helper, onnx.TensorProto.FLOAT
    rng = np.random.default_rng(0)
    nodes, weights, tensor, channels = [], [], "x", 8
    for k in range(3):
        kernel = rng.standard_normal((8, channels, 3, 3)).astype(np.float32) / 9
        weights.append(onnx.numpy_helper.from_array(kernel, f"w{k}"))
        nodes.append(helper.make_node("Conv", [tensor, f"w{k}"], [f"c{k}"], pads=[1, 1, 1, 1]))
        tensor = f"c{k}"
        if bridge and k < 2:
            nodes.append(helper.make_node("Add", [tensor, "x"], [f"a{k}"]))
            tensor = f"a{k}"
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
        [helper.make_tensor_value_info("x", float32, [1, 8, 16, 16])],
        [helper.make_tensor_value_info("logits", float32, [1, 5])],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write_chain(tmp_path_factory.mktemp("models") / "tiny.onnx")


def _run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["profile", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_json_is_one_object_with_both_kinds_of_cost_at_every_place(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = _run(capsys, model, "--segments", "--rounds", 3, "--threads-up-to", 1, "--json")
    found = json.loads(out)

    assert code == 0
    assert (found["cpu_provenance"], found["accelerator_provenance"]) == ("measured", "simulated")
    places = found["places"]
    assert [each["place"] for each in places] == list(range(len(places)))
    assert len(places) == 5
    assert all(each["cpu_rest_s"]["1"] > 0 for each in places[:-1])
    assert places[-1]["cpu_rest_s"] == {"1": 0.0}
    assert places[0]["accelerator_call_s"] == places[0]["accelerator_compute_s"] == 0
    assert places[1]["accelerator_call_s"] == pytest.approx(
        places[1]["accelerator_compute_s"] + 0.3e-3
    )
    total_s = sum(each["cpu_s"]["1"] for each in found["segments"])
    assert found["sums"][0]["segments_s"] == pytest.approx(total_s)
    assert found["sums"][0]["ratio"] == pytest.approx(total_s / places[0]["cpu_rest_s"]["1"])
    assert any("floating point" in note for note in found["notes"])


def test_the_table_tells_measured_from_simulated_and_the_export_can_be_read(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tiny.json"
    code, out, _ = _run(
        capsys, model, "--segments", "--quick", "--places", 1, "--threads-up-to", 1,
        "--accelerator", "coral-dev-board", "--export", file,
    )  # fmt: skip
    profile = read_partition_profile(file)

    assert code == 0
    for words in ("simulated", "measured", "1 thread", "segments together", "times)", str(file)):
        assert words in out
    assert profile.model_id == "tiny"
    assert profile.last == 2
    assert profile.accelerator == "coral-dev-board"
    assert profile.threads == (1,)


def test_a_model_without_a_place_to_cut_is_measured_whole_and_said_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _write_chain(tmp_path / "bridged.onnx", bridge=True)
    code, out, _ = _run(
        capsys, path, "--segments", "--rounds", 3, "--threads-up-to", 1, "--json", "--places", 0
    )
    found = json.loads(out)

    assert code == 0
    assert len(found["places"]) == 2
    assert "no place inside the model" in " ".join(found["notes"])


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        pytest.param(["--accelerator", "coral-usbb"], 2, "coral-usb", id="unknown accelerator"),
        pytest.param(["--threads-up-to", 10_000], 2, "cores usable here", id="too many threads"),
        pytest.param(["--threads-up-to", 0], 2, "cores usable here", id="no thread"),
        pytest.param(["--places", -1], 2, "at least 0", id="negative places"),
        pytest.param(["--rounds", 1], 2, "at least 3 rounds", id="one round"),
        pytest.param(["--backend", "torch"], 2, "--backend has no meaning with", id="a backend"),
        pytest.param(["--threads", 2], 2, "--threads has no meaning with", id="threads"),
    ],
)
def test_options_that_cannot_be_are_refused(
    model: Path,
    arguments: list[object],
    code: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = _run(capsys, model, "--segments", *arguments)

    assert found[0] == code
    assert said in found[2]
    assert found[1] == ""


def test_options_of_segments_are_refused_without_it(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = _run(capsys, model, "--places", 0)

    assert code == 2
    assert "--places has no meaning without --segments" in err


def test_files_that_are_no_model_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, damaged = tmp_path / "model.pt", tmp_path / "model.onnx"
    for path in (other, damaged):
        path.write_bytes(b"not a model")

    for path in (other, damaged, tmp_path / "nothing.onnx"):
        code, out, err = _run(capsys, path, "--segments")
        assert code == 4
        assert out == ""
        assert path.name in err
        assert "help:" in err


def test_all_usable_cores_are_measured_by_default(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = _run(capsys, model, "--segments", "--rounds", 3, "--places", 0, "--json")

    counts = [each["threads"] for each in json.loads(out)["sums"]]
    assert counts == list(range(1, usable_cores().threads + 1))
