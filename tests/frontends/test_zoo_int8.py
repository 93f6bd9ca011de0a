from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from edgewise.backends.piece import load_piece
from edgewise.errors import ModelError
from edgewise.frontends import zoo_int8
from edgewise.frontends.partition import read_partitioned
from edgewise.frontends.zoo import build_backbone
from edgewise.frontends.zoo_int8 import int8_file, models_folder, with_eight_bit_ends


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    small = pytest.MonkeyPatch()
    small.setattr(zoo_int8, "build_backbone", lambda name: build_backbone(name, size_pixels=64))
    with small.context():
        path, made = int8_file("squeezenet", tmp_path_factory.mktemp("models"))
    small.undo()
    assert "random weights" in made
    return path


def test_a_network_becomes_an_eight_bit_file_that_can_be_cut(file: Path) -> None:
    model = read_partitioned(file, places=4)

    assert model.places[0].dtype == model.places[-1].dtype == "uint8"
    assert model.places[0].shape == (1, 3, 64, 64)
    assert model.last == 5
    x = np.random.default_rng(0).integers(0, 255, (1, 3, 64, 64), dtype=np.uint8)
    whole = load_piece(model.segment(0, model.last), "onnx").run(x)
    halves = load_piece(model.suffix(2), "onnx").run(load_piece(model.prefix(2), "onnx").run(x))
    np.testing.assert_array_equal(halves, whole)


def test_a_file_that_is_there_is_not_made_again(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zoo_int8, "build_backbone", lambda _: pytest.fail("built again"))
    said: list[str] = []

    path, _ = int8_file("squeezenet", file.parent, say=said.append)

    assert path == file
    assert said == []
    assert [p.name for p in file.parent.iterdir()] == [file.name]


def test_a_model_with_other_ends_is_refused() -> None:
    def value(name: str) -> onnx.ValueInfoProto:
        return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 3])

    node = onnx.helper.make_node("Relu", ["x"], ["y"])
    graph = onnx.helper.make_graph([node], "relu", [value("x")], [value("y")])

    with pytest.raises(ModelError, match="QuantizeLinear"):
        with_eight_bit_ends(onnx.helper.make_model(graph).SerializeToString())


def test_files_are_kept_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    assert models_folder() == tmp_path / "edgewise" / "models"
